from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zoo
from vision.unetr import UNETR, UNETRConfig
from zoo import tensorfile
from zoo.errors import ConfigError, DataError
from zoo.groups import layer_groups

SMALL = {
    "size": (32, 32, 32),
    "hidden_size": 8,
    "mlp_size": 12,
    "heads": 2,
    "layers": 4,
    "width": 2,
}


def small(**changes: object) -> UNETR:
    torch.manual_seed(0)
    return UNETR(UNETRConfig(**{**SMALL, **changes})).eval()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def keep_their_size(count: int) -> None:
    draw, model = random.Random(0), small()
    for _ in range(count):
        size = [draw.randint(1, 40) for _ in range(3)]
        with torch.no_grad():
            logits = model(normal(1, 1, *size))
        assert logits.shape == (1, 2, *size)
        assert logits.isfinite().all()


def test_sizes_down_to_one_voxel_come_back() -> None:
    keep_their_size(8)
    assert small()(normal(1, 1, 1, 1, 1)).shape == (1, 2, 1, 1, 1)


@pytest.mark.prove
def test_five_hundred_sizes() -> None:
    keep_their_size(500)


def test_keys_and_shapes_are_those_of_monai() -> None:
    with torch.device("meta"):
        model = UNETR(UNETRConfig(num_classes=14))
    shapes = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    assert shapes["vit.patch_embedding.position_embeddings"] == (1, 216, 768)
    assert shapes["vit.patch_embedding.patch_embeddings.weight"] == (768, 1, 16, 16, 16)
    assert shapes["vit.blocks.11.attn.qkv.weight"] == (2304, 768)
    assert "vit.blocks.0.attn.qkv.bias" not in shapes
    assert shapes["vit.blocks.0.attn.out_proj.bias"] == (768,)
    assert shapes["vit.blocks.3.mlp.linear1.weight"] == (3072, 768)
    assert shapes["vit.norm.weight"] == (768,)
    assert shapes["encoder1.layer.conv3.conv.weight"] == (16, 1, 1, 1, 1)
    assert shapes["encoder2.transp_conv_init.conv.weight"] == (768, 32, 2, 2, 2)
    assert shapes["encoder2.blocks.1.1.conv2.conv.weight"] == (32, 32, 3, 3, 3)
    assert shapes["encoder3.blocks.0.0.conv.weight"] == (64, 64, 2, 2, 2)
    assert shapes["encoder4.transp_conv_init.conv.weight"] == (768, 128, 2, 2, 2)
    assert shapes["decoder5.transp_conv.conv.weight"] == (768, 128, 2, 2, 2)
    assert shapes["decoder2.conv_block.conv1.conv.weight"] == (16, 32, 3, 3, 3)
    assert shapes["out.conv.conv.bias"] == (14,)
    # 92.58 million in the paper, table 4, rounded, with 4 channels and other norms.
    assert sum(p.numel() for p in model.parameters()) == 92_784_046


def test_norms_that_nothing_goes_through_are_left_out(tmp_path: Path) -> None:
    model = zoo.load("unetr", **SMALL)
    state = dict(model.state_dict())
    state["vit.blocks.0.norm_cross_attn.weight"] = torch.ones(8)
    tensorfile.write(tmp_path / "monai.safetensors", state, {})
    loaded = zoo.load("unetr", pretrained=tmp_path / "monai.safetensors", **SMALL)
    assert all(torch.equal(t, state[name]) for name, t in loaded.state_dict().items())


def test_attention_by_hand() -> None:
    layer = small(heads=1, hidden_size=2).vit.blocks[0].attn
    layer.qkv.weight.data = torch.tensor(
        [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 2.0]]
    )
    layer.out_proj.weight.data = torch.eye(2)
    tokens = torch.eye(2)[None]
    one = 1 / (1 + torch.tensor(2.0).rsqrt().neg().exp())  # of a token for itself: 1 against 0
    expected = 2 * torch.stack((torch.stack((one, 1 - one)), torch.stack((1 - one, one))))
    torch.testing.assert_close(layer(tokens)[0], expected)


def test_positions_of_the_configured_size_are_taken_as_they_are() -> None:
    embedding = small().vit.patch_embedding
    embedding.patch_embeddings.weight.data.zero_()
    found = embedding(normal(1, 1, 32, 32, 32))
    torch.testing.assert_close(found.flatten(2).transpose(1, 2), embedding.position_embeddings)
    longer = embedding(normal(1, 1, 64, 32, 32))
    torch.testing.assert_close(longer[:, :, 0], found[:, :, 0])
    torch.testing.assert_close(longer[:, :, 3], found[:, :, 1])


def test_four_layers_are_tapped() -> None:
    model = small(layers=8)
    maps = model.features(normal(1, 1, 33, 16, 20))
    assert [tuple(m.shape) for m in maps] == [(1, 8, 3, 1, 2)] * 4
    seen: list[Tensor] = []
    hook = model.vit.blocks[2].register_forward_hook(lambda *a: seen.append(a[-1]))
    model.features(normal(1, 1, 16, 16, 32))
    hook.remove()
    torch.testing.assert_close(
        model.features(normal(1, 1, 16, 16, 32))[0].flatten(2).transpose(1, 2), seen[0]
    )


def test_what_is_filled_up_is_zero_and_cut_off() -> None:
    model, volume = small(), normal(1, 1, 17, 16, 16)
    filled = torch.zeros(1, 1, 32, 16, 16)
    filled[:, :, :17] = volume
    torch.testing.assert_close(model(volume), model(filled)[:, :, :17])


def test_groups_hold_every_parameter() -> None:
    model = small()
    assert sum(map(len, layer_groups(model))) == len(list(model.parameters()))


def test_gradient_checkpointing_changes_no_bit() -> None:
    gradients = []
    for recompute in (False, True):
        model = small(gradient_checkpointing=recompute).train()
        model(normal(1, 1, 20, 16, 16)).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_other_input_channels_answer_a_grey_volume_alike() -> None:
    one, three = small(), small(in_channels=3)
    state = one.state_dict()
    three.load_state_dict(state | three.adapt_input(state, 1))
    volume = normal(1, 1, 16, 16, 32)
    torch.testing.assert_close(
        three(volume.expand(-1, 3, -1, -1, -1)), one(volume), atol=1e-4, rtol=1e-4
    )


@pytest.mark.untyped
def test_what_is_no_batch_of_volumes_is_refused() -> None:
    with pytest.raises(DataError, match="one scan becomes a batch"):
        small()(torch.zeros(8, 8, 8))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"size": (32, 30, 32)}, "multiples of 16"),
        ({"layers": 6}, "layers is 6"),
        ({"heads": 3}, "hidden_size is 8"),
        ({"width": 0}, "width is 0"),
        ({"num_classes": 0}, "num_classes is 0"),
    ],
)
def test_a_wrong_architecture_is_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small(**changes)
    assert text in caught.value.line
