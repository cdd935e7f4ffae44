"""UNETR: a Transformer over patches of the volume as the encoder of a U-Net.

Paper:
    Hatamizadeh et al. 2021, "UNETR: Transformers for 3D medical image segmentation",
    https://arxiv.org/abs/2103.10504.

Differs from the paper:
    * Any size comes in and the same goes out: a volume is filled up with zeros, at its end, to
      whole patches, and position embeddings are interpolated to their grid.
    * Convolutions of the decoder come in residual blocks with instance norm, and the maps tapped
      are those after layers 4, 7, 10 and 12, as in the authors' code.

State-dict keys are those of MONAI's ``UNETR``.

Cards: unetr.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vision.convnet import adapted_stem, checkpointed
from vision.segresnet import Conv
from vision.volumenet import check_volumes, cut_to
from zoo.errors import ConfigError, shown

PATCH = 16  # voxels of a patch's side
SLOPE = 0.01  # of the leaky rectifiers below 0
HEAD_STD = 0.08  # of the head: large enough to learn from, small enough for exact exports
INIT_STD = 0.02  # of linear layers and position embeddings


@dataclass(frozen=True, kw_only=True)
class UNETRConfig:
    """Architecture of a `UNETR`; the defaults are the paper's, ViT-B/16."""

    size: tuple[int, int, int] = (96, 96, 96)  # whose patches have position embeddings
    hidden_size: int = 768
    mlp_size: int = 3072
    heads: int = 12
    layers: int = 12  # a multiple of four
    width: int = 16  # channels of the decoder's finest stage
    num_classes: int = 2
    in_channels: int = 1
    gradient_checkpointing: bool = False  # in training: less memory, one more forward pass

    def __post_init__(self) -> None:
        for name, right, takes in (
            ("size", all(n > 0 and n % PATCH == 0 for n in self.size), f"multiples of {PATCH}"),
            ("layers", self.layers > 0 and self.layers % 4 == 0, "a multiple of 4"),
            (
                "hidden_size",
                self.heads > 0 and self.hidden_size > 0 and self.hidden_size % self.heads == 0,
                f"a multiple of the {self.heads} heads",
            ),
            ("mlp_size", self.mlp_size >= 1, "at least 1"),
            ("width", self.width >= 1, "at least 1"),
            ("num_classes", self.num_classes >= 1, "at least 1"),
            ("in_channels", self.in_channels >= 1, "at least 1"),
        ):
            if not right:
                raise ConfigError(f"{name} is {shown(getattr(self, name))}; it takes {takes}")


class Embedding(nn.Module):
    """Patches as tokens, with learnt positions on the grid of the configured size."""

    def __init__(self, config: UNETRConfig) -> None:
        super().__init__()
        depth, height, width = (n // PATCH for n in config.size)
        self.grid = depth, height, width
        self.patch_embeddings = nn.Conv3d(config.in_channels, config.hidden_size, PATCH, PATCH)
        places = torch.empty(1, math.prod(self.grid), config.hidden_size)
        self.position_embeddings = nn.Parameter(places)

    def forward(
        self, volume: Float[Tensor, "batch in_channels _ _ _"]
    ) -> Float[Tensor, "batch hidden depth height width"]:
        """A vector for every patch."""
        x = self.patch_embeddings(volume)
        places = self.position_embeddings.transpose(1, 2).unflatten(2, self.grid)
        return x + F.interpolate(places, x.shape[2:], mode="trilinear")


class Attention(nn.Module):
    """Multi-head self-attention without biases of queries, keys and values."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(size, 3 * size, bias=False)
        self.out_proj = nn.Linear(size, size)

    def forward(
        self, x: Float[Tensor, "batch tokens hidden"]
    ) -> Float[Tensor, "batch tokens hidden"]:
        """Every token's mixture of all (Vaswani et al. 2017, section 3.2)."""
        query, key, value = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(size, inner)
        self.linear2 = nn.Linear(inner, size)

    def forward(
        self, x: Float[Tensor, "batch tokens hidden"]
    ) -> Float[Tensor, "batch tokens hidden"]:
        """Token by token."""
        return self.linear2(F.gelu(self.linear1(x)))


class Layer(nn.Module):
    """A layer of the Transformer, norms first (equations 3 and 4)."""

    def __init__(self, config: UNETRConfig) -> None:
        super().__init__()
        self.mlp = MLP(config.hidden_size, config.mlp_size)
        self.norm1 = nn.LayerNorm(config.hidden_size)
        self.attn = Attention(config.hidden_size, config.heads)
        self.norm2 = nn.LayerNorm(config.hidden_size)

    def forward(
        self, x: Float[Tensor, "batch tokens hidden"]
    ) -> Float[Tensor, "batch tokens hidden"]:
        """The same tokens, further on."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """The encoder: parameters under the names that MONAI gives them."""

    def __init__(self, config: UNETRConfig) -> None:
        super().__init__()
        self.patch_embedding = Embedding(config)
        self.blocks = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden_size)


class Up(nn.Module):
    """Twice the size in every direction, by a transposed convolution."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose3d(in_channels, channels, 2, 2, bias=False)

    def forward(self, x: Float[Tensor, "batch _ _ _ _"]) -> Float[Tensor, "batch _ _ _ _"]:
        """The transposed convolution."""
        return self.conv(x)


class ResBlock(nn.Module):
    """Two convolutions with instance norm, plus shortcut; norms have no parameters."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv1 = Conv(in_channels, channels)
        self.conv2 = Conv(channels, channels)
        self.conv3 = Conv(in_channels, channels, (1, 1, 1)) if in_channels != channels else None

    def forward(
        self, x: Float[Tensor, "batch _ depth height width"]
    ) -> Float[Tensor, "batch channels depth height width"]:
        """Residual branch plus shortcut, rectified."""
        y = F.leaky_relu(F.instance_norm(self.conv1(x)), SLOPE)
        y = F.instance_norm(self.conv2(y))
        if self.conv3 is not None:
            x = F.instance_norm(self.conv3(x))
        return F.leaky_relu(y + x, SLOPE)


class First(nn.Module):
    """What the decoder sees of the volume itself."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.layer = ResBlock(in_channels, channels)

    def forward(self, x: Float[Tensor, "batch _ _ _ _"]) -> Float[Tensor, "batch _ _ _ _"]:
        """The block."""
        return self.layer(x)


class Tapped(nn.Module):
    """Tokens of a layer, brought to the resolution at which the decoder joins them."""

    def __init__(self, in_channels: int, channels: int, blocks: int) -> None:
        super().__init__()
        self.transp_conv_init = Up(in_channels, channels)
        self.blocks = nn.ModuleList(
            nn.Sequential(Up(channels, channels), ResBlock(channels, channels))
            for _ in range(blocks)
        )

    def forward(self, x: Float[Tensor, "batch _ _ _ _"]) -> Float[Tensor, "batch _ _ _ _"]:
        """The map, 2^(blocks + 1) times the size."""
        x = self.transp_conv_init(x)
        for block in self.blocks:
            x = block(x)
        return x


class Joined(nn.Module):
    """Up, joined with what was tapped, convolved (figure 2)."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.transp_conv = Up(in_channels, channels)
        self.conv_block = ResBlock(2 * channels, channels)

    def forward(
        self,
        x: Float[Tensor, "batch _ _ _ _"],
        skip: Float[Tensor, "batch channels depth height width"],
    ) -> Float[Tensor, "batch channels depth height width"]:
        """A map at the resolution of `skip`."""
        return self.conv_block(torch.cat((self.transp_conv(x), skip), 1))


class UNETR(nn.Module):
    """Transformer encoder, convolutional decoder, one linear classifier a voxel."""

    def __init__(self, config: UNETRConfig) -> None:
        super().__init__()
        self.config = config
        width, hidden = config.width, config.hidden_size
        self.vit = ViT(config)
        self.encoder1 = First(config.in_channels, width)
        self.encoder2 = Tapped(hidden, 2 * width, 2)
        self.encoder3 = Tapped(hidden, 4 * width, 1)
        self.encoder4 = Tapped(hidden, 8 * width, 0)
        self.decoder5 = Joined(hidden, 8 * width)
        self.decoder4 = Joined(8 * width, 4 * width)
        self.decoder3 = Joined(4 * width, 2 * width)
        self.decoder2 = Joined(2 * width, width)
        self.out = nn.ModuleDict({"conv": Conv(width, config.num_classes, (1, 1, 1), bias=True)})
        self.apply(self.init_weights)

    @staticmethod
    def init_weights(module: nn.Module) -> None:
        """Initial values of one module; ``apply`` comes to the head after its convolution.

        Source: linear layers and positions Dosovitskiy et al. 2020,
            https://arxiv.org/abs/2010.11929; convolutions He et al. 2015,
            https://arxiv.org/abs/1502.01852, with the fan of the input.
        """
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=INIT_STD)
        elif isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
            nn.init.kaiming_normal_(module.weight, a=SLOPE)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, nn.ModuleDict):  # the head begins with classes nearly alike
            nn.init.trunc_normal_(module["conv"].conv.weight, std=HEAD_STD)
        elif isinstance(module, Embedding):
            nn.init.trunc_normal_(module.position_embeddings, std=INIT_STD)
        bias = getattr(module, "bias", None)
        if isinstance(bias, Tensor):
            nn.init.zeros_(bias)

    def features(
        self, volume: Float[Tensor, "batch in_channels depth height width"]
    ) -> tuple[Float[Tensor, "batch hidden _ _ _"], ...]:
        """Tokens of four layers as maps, one vector for each 16x16x16 patch, the last normalised.

        Raises:
            DataError: `volume` is no batch of volumes for this network.
        """
        check_volumes(volume, self.config.in_channels)
        recompute = self.config.gradient_checkpointing and self.training
        x = self.vit.patch_embedding(_filled(volume))
        shape, x = x.shape, x.flatten(2).transpose(1, 2)
        quarter = self.config.layers // 4
        maps = []
        for number, layer in enumerate(self.vit.blocks):
            x = checkpointed(layer, x) if recompute else layer(x)
            if number in (quarter, 2 * quarter, 3 * quarter):
                maps.append(x)
        maps.append(self.vit.norm(x))
        return tuple(tokens.transpose(1, 2).reshape(*shape) for tokens in maps)

    def forward(
        self, volume: Float[Tensor, "batch in_channels depth height width"]
    ) -> Float[Tensor, "batch num_classes depth height width"]:
        """Logits of every voxel of a volume of any size.

        Raises:
            DataError: As `features`.
        """
        early, middle, late, last = self.features(volume)
        x = self.decoder5(last, self.encoder4(late))
        x = self.decoder4(x, self.encoder3(middle))
        x = self.decoder3(x, self.encoder2(early))
        x = self.decoder2(x, self.encoder1(_filled(volume)))
        return cut_to(self.out["conv"](x), volume)

    def convert_keys(self, names: Iterable[str]) -> dict[str, str | None]:
        """Every stored name, or None for a norm of newer MONAI that nothing goes through."""
        return {name: None if ".norm_cross_attn." in name else name for name in names}

    def depth_order(self) -> list[list[str]]:
        """Key prefixes from the volume to the answer: patches, layers, decoder, head."""
        layers = [[f"vit.blocks.{i}"] for i in range(self.config.layers)]
        layers[-1].append("vit.norm")
        taps = [f"encoder{number}" for number in (1, 2, 3, 4)]
        decoder = [[*taps, "decoder5"], ["decoder4"], ["decoder3"], ["decoder2"]]
        return [["vit.patch_embedding"], *layers, *decoder, ["out"]]

    def adapt_input(self, tensors: dict[str, Tensor], in_channels: int) -> dict[str, Tensor]:
        """The kernels that see the volume, for this network's channels."""
        adapted: dict[str, Tensor] = {}
        for key in (
            "vit.patch_embedding.patch_embeddings.weight",
            "encoder1.layer.conv1.conv.weight",
            "encoder1.layer.conv3.conv.weight",
        ):
            adapted |= adapted_stem(key, tensors, in_channels, self.config.in_channels)
        return adapted


def _filled(volume: Tensor) -> Tensor:
    """Zeros at the end of every axis, up to whole patches."""
    depth, height, width = (-size % PATCH for size in volume.shape[2:])
    return F.pad(volume, (0, width, 0, height, 0, depth))
