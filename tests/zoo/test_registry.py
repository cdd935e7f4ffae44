"""Loading: every tensor has a declared origin, whatever is wrong with the file or the call."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zoo
from zoo import loading, tensorfile
from zoo.errors import (
    CardError,
    ConfigError,
    UnknownModelError,
    WeightsError,
    WeightsUnavailableError,
    ZooError,
)

SMALL = {"width": 8, "num_classes": 10}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small ResNet-18 with unmistakable values, and its file."""
    folder = tmp_path_factory.mktemp("trained")
    model = zoo.load("resnet18", **SMALL)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
            else:
                tensor.fill_(7)
    zoo.save(model, folder)
    return model, folder, next(folder.glob("*.safetensors"))


def test_a_model_comes_in_eval_mode_trained_or_not(trained):
    _, folder, file = trained
    assert not zoo.load("resnet18", **SMALL).training
    assert not zoo.load(folder).training
    assert not zoo.load("resnet18", pretrained=file, **SMALL).training


def test_a_plain_name_is_random_and_says_so():
    model = zoo.load("resnet18", **SMALL)
    assert model.load_report.source == "random"
    assert set(model.load_report.fresh) == set(model.state_dict())


def test_a_file_fills_every_tensor(trained):
    model, _, file = trained
    loaded = zoo.load("resnet18", pretrained=file, **SMALL)
    report = loaded.load_report
    assert (report.fresh, report.dropped, report.absent, report.adapted) == ((), (), (), ())
    assert set(report.tensors) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_other_classes_leave_exactly_the_head_fresh(trained):
    model, _, file = trained
    loaded = zoo.load("resnet18", pretrained=file, width=8, num_classes=3)
    assert set(loaded.load_report.fresh) == {"fc.weight", "fc.bias"}
    assert set(loaded.load_report.dropped) == {"fc.weight", "fc.bias"}
    assert loaded.fc.weight.shape == (3, 64)
    assert 0 < loaded.fc.weight.abs().max() <= 1 / 8  # the family's own initialisation
    assert torch.equal(loaded.layer4[0].conv1.weight, model.layer4[0].conv1.weight)


def test_a_head_that_does_not_fit_is_refused_unless_asked_for(trained):
    _, _, file = trained
    with pytest.raises(WeightsError, match="pass num_classes=10"):
        zoo.load("resnet18", pretrained=file, width=8)


def test_a_lacking_body_tensor_is_refused_whatever_the_classes(trained, tmp_path):
    _, _, file = trained
    tensors = load_file(file)
    del tensors["layer4.0.conv1.weight"]
    save_file(tensors, tmp_path / "x.safetensors")
    for classes in (10, 3):
        with pytest.raises(WeightsError, match=r"lacks 1 .*layer4\.0\.conv1\.weight") as caught:
            zoo.load(
                "resnet18", pretrained=tmp_path / "x.safetensors", width=8, num_classes=classes
            )
        assert "missing: layer4.0.conv1.weight" in caught.value.details


def test_missing_unexpected_and_mismatched_are_all_listed(trained, tmp_path):
    _, _, file = trained
    tensors = load_file(file)
    del tensors["bn1.weight"]
    tensors["old.bias"] = torch.zeros(1)
    tensors["bn1.bias"] = torch.zeros(3, 8)
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(WeightsError) as caught:
        zoo.load("resnet18", pretrained=tmp_path / "x.safetensors", **SMALL)
    assert {line.partition(":")[0] for line in caught.value.details} == {
        "mismatched",
        "missing",
        "unexpected",
    }
    assert "(3, 8)" in caught.value.line
    assert "(8,)" in caught.value.line


def test_an_old_file_without_counters_loads_and_reports_them(trained, tmp_path):
    _, _, file = trained
    tensors = {k: v for k, v in load_file(file).items() if not k.endswith("num_batches_tracked")}
    save_file(tensors, tmp_path / "x.safetensors")
    loaded = zoo.load("resnet18", pretrained=tmp_path / "x.safetensors", **SMALL)
    assert len(loaded.load_report.absent) == 20
    assert loaded.bn1.num_batches_tracked == 0


@pytest.mark.parametrize(
    "prefix",
    ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module.", "a.b.c."],
)
def test_a_prefix_that_all_names_share_is_stripped(trained, tmp_path, prefix):
    model, _, file = trained
    save_file({prefix + k: v for k, v in load_file(file).items()}, tmp_path / "x.safetensors")
    loaded = zoo.load("resnet18", pretrained=tmp_path / "x.safetensors", **SMALL)
    assert loaded.load_report.prefix == prefix
    assert torch.equal(loaded.conv1.weight, model.conv1.weight)


class Wrapped(nn.Module):
    """Really has a child called module, and another with one inside."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.encoder = nn.ModuleDict({"module": nn.Linear(2, 2)})


def test_a_child_that_is_called_module_is_not_stripped():
    with loading.skeleton_of():
        only, both = nn.ModuleDict({"module": nn.Linear(2, 2)}), Wrapped()
    for skeleton in (only, both):
        info = {
            name: tensorfile.TensorInfo("F32", tuple(t.shape), 0, 0)
            for name, t in skeleton.state_dict().items()
        }
        plan = loading.make_plan(skeleton, info, name="x")
        assert plan.prefix == ""
        assert plan.sources == {name: name for name in info}
        again = loading.make_plan(skeleton, {"module." + k: v for k, v in info.items()}, name="x")
        assert again.prefix == "module."
        assert again.sources == {name: "module." + name for name in info}


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_become_float32(trained, tmp_path, stored):
    model, _, file = trained
    tensors = {k: v.to(stored) if v.is_floating_point() else v for k, v in load_file(file).items()}
    save_file(tensors, tmp_path / "x.safetensors")
    loaded = zoo.load("resnet18", pretrained=tmp_path / "x.safetensors", **SMALL)
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == model.state_dict()[name].dtype
        assert torch.equal(tensor, tensors[name].to(tensor.dtype))


def test_a_wanted_dtype_is_given(trained):
    _, folder, _ = trained
    for wanted in ("bfloat16", torch.bfloat16):
        loaded = zoo.load(folder, dtype=wanted)
        kinds = {t.dtype for t in loaded.state_dict().values()}
        assert kinds == {torch.bfloat16, torch.int64}
    with pytest.raises(ConfigError, match="dtype"):
        zoo.load(folder, dtype="int8")
    with pytest.raises(ConfigError, match="device"):
        zoo.load(folder, device="abacus")


@pytest.mark.parametrize("channels", [1, 2, 4, 5])
def test_a_grey_image_gives_what_the_colour_network_gives_on_equal_channels(trained, channels):
    model, _, file = trained
    other = zoo.load("resnet18", pretrained=file, in_channels=channels, **SMALL)
    assert other.load_report.adapted == ("conv1.weight",)
    grey = torch.randn(2, 1, 64, 64)
    with torch.no_grad():
        one, three = other(grey.expand(-1, channels, -1, -1)), model(grey.expand(-1, 3, -1, -1))
    assert (one - three).abs().max() <= 1e-5 * three.abs().max()


def test_another_architecture_is_named_as_such(trained):
    _, _, file = trained
    with pytest.raises(WeightsError, match="another architecture"):
        zoo.load("resnet50", pretrained=file)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight


def test_a_tied_weight_is_stored_once_and_stays_one_object(tmp_path):
    from zoo.saving import state_of

    model = Tied()
    file = tmp_path / "tied.safetensors"
    tensorfile.write(file, state_of(model))
    with file.open("rb") as opened:
        header = tensorfile.read_header(opened, "x")
    assert sum(t.end - t.start for t in header.tensors.values()) == 60
    with loading.skeleton_of():
        fresh = Tied()
    from zoo.weights import open_path

    report = loading.load_into(
        fresh,
        open_path(file),
        name="tied",
        head=(),
        new_head=False,
        stored_channels=None,
        dtype=None,
    )
    assert fresh.head.weight is fresh.emb.weight
    assert torch.equal(fresh.emb.weight, model.emb.weight)
    assert report.fresh == report.dropped == ()


def test_two_stored_copies_of_a_tied_weight_must_agree(tmp_path):
    from zoo.weights import open_path

    one = torch.rand(5, 3)
    for other, agrees in ((one.clone(), True), (one + 1, False)):
        save_file({"emb.weight": one, "head.weight": other}, tmp_path / "x.safetensors")
        with loading.skeleton_of():
            fresh = Tied()
        stored = open_path(tmp_path / "x.safetensors")
        arguments = {
            "name": "tied",
            "head": (),
            "new_head": False,
            "stored_channels": None,
            "dtype": None,
        }
        if agrees:
            loading.load_into(fresh, stored, **arguments)
            assert fresh.head.weight is fresh.emb.weight
        else:
            with pytest.raises(WeightsError, match="one tensor in the model and differ"):
                loading.load_into(fresh, stored, **arguments)


def test_saving_onto_the_file_the_tensors_are_mapped_from_keeps_both(trained, tmp_path):
    _, folder, _ = trained
    model = zoo.load(folder)
    zoo.save(model, tmp_path)
    mapped = zoo.load(tmp_path)
    with torch.no_grad():
        mapped.fc.bias[0] = 9.0
    zoo.save(mapped, tmp_path)
    assert mapped.fc.bias[0] == 9.0
    assert torch.equal(zoo.load(tmp_path).fc.bias, mapped.fc.bias)


def test_a_loaded_model_trains_and_leaves_its_file_alone(trained):
    _, folder, file = trained
    before = file.read_bytes()
    model = zoo.load(folder).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    optimizer.step()
    assert all(p.grad is not None for p in model.parameters())
    assert file.read_bytes() == before


def test_initialisers_work_for_other_threads_while_a_skeleton_is_built():
    import threading

    made = {}

    def ordinary():
        made["weight"] = nn.Linear(64, 64).weight

    with loading.skeleton_of():
        thread = threading.Thread(target=ordinary)
        thread.start()
        thread.join()
        assert nn.Linear(4, 4).weight.is_meta
    assert 0 < made["weight"].abs().max() <= 1 / 8
    assert nn.init.normal_.__module__ == "torch.nn.init"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"name": "resnet18", "num_clases": 3}, ConfigError, "num_classes"),
        ({"name": "resnet18", "num_classes": "3"}, ConfigError, "whole number"),
        ({"name": "resnet18", "num_classes": 0}, ConfigError, "at least 1"),
        ({"name": "resnet18", "depths": [1, 2]}, ConfigError, "depths"),
        ({"name": "resnet18", "verify": "never"}, ConfigError, "'auto' or 'always'"),
        ({"name": "resnet18", "task": "speech-recognition"}, ConfigError, "image-classification"),
        ({"name": "resnet18", "pretrained": "imagenet1k_v9"}, UnknownModelError, "imagenet1k_v1"),
        ({"name": "resnet18", "pretrained": "mine.safetensors"}, UnknownModelError, "pathlib.Path"),
        ({"name": "resnet18", "pretrained": 1}, ConfigError, "pathlib.Path"),
        ({"name": "resnet50.imagenet1k_v1", "pretrained": "imagenet1k_v2"}, ConfigError, "one"),
        ({"name": "resnet18", "pretrained": True}, WeightsUnavailableError, "imagenet1k_v1"),
        ({"name": "bert-base-uncased", "pretrained": True}, WeightsUnavailableError, "pull"),
        ({"name": "resnet50.imagenet1k_v1"}, WeightsUnavailableError, "ZOO_WEIGHTS"),
        ({"name": "resnet18", "pretrained": Path("no/x.safetensors")}, WeightsError, "No such"),
        ({"name": "resnet18", "pretrained": Path(".")}, WeightsError, "folder"),
        ({"name": Path("no/such/folder")}, UnknownModelError, "nothing"),
        ({"name": Path(".")}, UnknownModelError, "zoo.save"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_answered_in_one_line(arguments, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = arguments.pop("name")
    with pytest.raises(error) as caught:
        zoo.load(name, **arguments)
    assert words in caught.value.line
    assert len(caught.value.line) <= 200


def test_pretrained_false_with_a_tag_gives_its_configuration_and_random_weights(trained):
    model = zoo.load("resnet50.imagenet1k_v1", pretrained=False, depths=[1, 1, 1, 1], width=8)
    assert model.load_report.source == "random"
    assert model.fc.out_features == 1000


def test_a_card_whose_class_is_not_there_says_where_it_looked(tmp_path):
    from dataclasses import replace

    from zoo.registry import symbol

    card = zoo.card("resnet18")
    with pytest.raises(CardError, match="ResNet"):
        symbol("vision.resnet:ResNett", card)
    with pytest.raises(CardError, match="vision was imported from"):
        symbol("vision.resnett:ResNet", card)
    with pytest.raises(CardError, match="no module"):
        symbol("visionn.resnet:ResNet", replace(card, name="x"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('task = "vision.tasks:ImageClassification"', 'task = "vision.resnet:ResNet"', "no task"),
        ('task = "vision.tasks:ImageClassification"', 'task = "vision.tasks:CHUNK"', "no task"),
        ('model = "vision.resnet:ResNet"', 'model = "vision.resnet:nn"', "no class"),
        ('shape = ["batch", 3, "height", "width"]', 'shape = ["batch"]', "task cannot be made"),
        ("width = 8", f"width = {2**62}", "can be built"),
        ("crop = 224", "crop = 100000", "crop is 100000"),
    ],
)
def test_a_card_that_leads_nowhere_is_one_line(tmp_path, old, new, words):
    folder = zoo.save(
        zoo.load("resnet50.imagenet1k_v2", pretrained=False, width=8), tmp_path / "mine"
    )
    card = folder / "resnet50.toml"
    text = card.read_text("utf-8")
    assert old in text
    card.write_text(text.replace(old, new, 1), "utf-8")
    with pytest.raises(CardError, match=words) as caught:
        zoo.pipeline(folder)
    assert len(caught.value.line) <= 200


def test_an_argument_that_no_memory_holds_is_one_line():
    with pytest.raises(ConfigError, match="can be built"):
        zoo.load("resnet50", width=2**62)


def test_python_m_zoo_imports_nothing_from_the_current_folder(trained, tmp_path):
    model, _, _ = trained
    zoo.save(model, tmp_path / "mine")
    (tmp_path / "vision").mkdir()
    for name in ("vision/__init__.py", "evil.py", "zoo_plugin.py", "torch.py"):
        (tmp_path / name).write_text("raise SystemExit('imported from here')")
    card = tmp_path / "mine" / "resnet18.toml"
    command = [sys.executable, "-m", "zoo", "check", "mine", "--only", "check_card"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    card.write_text(card.read_text("utf-8").replace("vision.resnet:", "evil:"), "utf-8")
    command = [sys.executable, "-m", "zoo", "show", "mine"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "'evil', which is neither a domain of the zoo nor a plug-in" in done.stderr
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("place", ["x" * 5000, "a-file/below", "pipe"])
def test_a_source_that_cannot_be_read_is_passed_over(trained, tmp_path, monkeypatch, place):
    _, folder, file = trained
    (tmp_path / "a-file").touch()
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / file.name)
    monkeypatch.setenv("ZOO_WEIGHTS", str(tmp_path / place))
    assert "ZOO_WEIGHTS" not in zoo.load(folder).load_report.source
    if place == "pipe":
        with pytest.raises(WeightsError, match="not a regular file"):
            zoo.load("resnet18", pretrained=tmp_path / "pipe" / file.name)


def test_a_damaged_folder_is_refused_by_its_hash(trained, tmp_path):
    model, _, _ = trained
    zoo.save(model, tmp_path)
    file = next(tmp_path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(WeightsError, match="sha256"):
        zoo.load(tmp_path)


def test_zoo_weights_folders_come_first_and_a_damaged_one_is_reported(
    trained, tmp_path, monkeypatch
):
    _, folder, file = trained
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("ZOO_WEIGHTS", str(elsewhere))
    (elsewhere / file.name).write_bytes(file.read_bytes())
    assert "ZOO_WEIGHTS" in zoo.load(folder).load_report.source
    (elsewhere / file.name).write_bytes(file.read_bytes()[:-1])
    report = zoo.load(folder).load_report
    assert "ZOO_WEIGHTS" not in report.source
    assert len(report.notes) == 1
    assert "ZOO_WEIGHTS" in report.notes[0]


KINDS = (
    "drop", "rename", "prefix all", "prefix one", "reshape", "recast float", "recast integer",
    "swap", "swap alike", "extra", "truncate", "other architecture", "head only",
)  # fmt: skip
CALLS = ({}, {"num_classes": 3}, {"in_channels": 1}, {"in_channels": 5, "num_classes": 3})


def corrupted(kind, tensors, rng):
    """A copy of a state with one fault of this kind, and what may still be loaded from it."""
    names = sorted(tensors)
    name = rng.choice(names)
    new = dict(tensors)
    if kind == "drop":
        for victim in rng.sample(names, rng.randint(1, 5)):
            del new[victim]
    elif kind == "rename":
        at = rng.randrange(len(name))
        new[name[:at] + rng.choice("abcxyz_0") + name[at + 1 :]] = new.pop(name)
    elif kind == "prefix all":
        prefix = rng.choice(["module.", "_orig_mod.", "module._orig_mod.", "net.body."])
        new = {prefix + k: v for k, v in new.items()}
    elif kind == "prefix one":
        new["module." + name] = new.pop(name)
    elif kind == "reshape":
        shape = [*new[name].shape, 1] if rng.random() < 0.5 else [new[name].numel(), 1, 1]
        new[name] = new[name].reshape(shape)
    elif kind == "recast float":
        new[name] = new[name].to(rng.choice([torch.float16, torch.bfloat16, torch.float64]))
    elif kind == "recast integer":
        new[name] = new[name].to(rng.choice([torch.int32, torch.int8, torch.bool]))
    elif kind in ("swap", "swap alike"):
        alike = kind == "swap alike"
        others = [n for n in names if n != name and (new[n].shape == new[name].shape) == alike]
        if others:
            other = rng.choice(others)
            new[name], new[other] = new[other], new[name]
    elif kind == "extra":
        new[rng.choice(["old.bias", "fc.scale", "layer5.0.conv1.weight", "x"])] = torch.zeros(2)
    elif kind == "head only":
        new = {k: v for k, v in new.items() if k.startswith("fc.")}
    return {k: v.contiguous().clone() for k, v in new.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_corrupted_file_is_repaired_with_a_report_or_refused(trained, tmp_path, kind):
    """77 faults a kind, 1,001 in all: no tensor of a loaded model is ever undeclared."""
    _, _, file = trained
    tensors = load_file(file)
    foreign = zoo.load("resnet34", **SMALL).state_dict()
    path = tmp_path / "x.safetensors"
    loaded = refused = 0
    for case in range(77):
        rng = random.Random(f"{kind}/{case}")
        call = rng.choice(CALLS)
        stored = dict(foreign) if kind == "other architecture" else corrupted(kind, tensors, rng)
        save_file(stored, path)
        if kind == "truncate":
            path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
        try:
            model = zoo.load("resnet18", pretrained=path, **{**SMALL, **call})
        except WeightsError:
            refused += 1
            continue
        loaded += 1
        report = model.load_report
        for name, tensor in model.state_dict().items():
            assert bool(tensor.isfinite().all())
            if name in report.fresh:
                assert name in ("fc.weight", "fc.bias")
                assert "num_classes" in call
            elif name in report.absent:
                assert name.endswith("num_batches_tracked")
                assert tensor == 0
            elif name in report.adapted:
                assert name == "conv1.weight"
                assert "in_channels" in call
                assert torch.allclose(
                    tensor.sum(1), stored[report.prefix + name].float().sum(1), rtol=1e-5
                )
            else:
                assert torch.equal(tensor, stored[report.prefix + name].to(tensor.dtype))
    assert loaded + refused == 77
    if kind in ("truncate", "other architecture", "prefix one", "head only", "extra", "swap"):
        assert (
            loaded <= refused // 3
        )  # a counter may be named anew and then is absent; an alike pair swaps
    if kind in ("prefix all", "recast float"):
        assert refused <= 20  # integers that became floats


def test_a_swap_of_equal_shapes_is_caught_by_the_cards_hash(trained, tmp_path):
    model, _, _ = trained
    zoo.save(model, tmp_path)
    file = next(tmp_path.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["bn1.weight"], tensors["bn1.bias"] = tensors["bn1.bias"], tensors["bn1.weight"]
    save_file(tensors, file)
    with pytest.raises(ZooError):
        zoo.load(tmp_path)


def test_classes_where_there_are_none_are_refused():
    with pytest.raises(ConfigError, match="text-classification"):
        zoo.load("all-minilm-l6-v2", pretrained=True, num_classes=3)


def test_a_numpy_number_is_a_number():
    import numpy as np

    assert zoo.load("resnet18", width=8, num_classes=np.int64(7)).fc.out_features == 7


def test_the_card_of_a_model_has_its_own_channels():
    model = zoo.load("resnet18", width=8, in_channels=1)
    assert model.card.inputs["image"].shape == ("batch", 1, "height", "width")


def test_random_weights_are_not_called_by_the_tag():
    model = zoo.load("resnet18.imagenet1k_v1", pretrained=False, width=8)
    assert model.card.full_name == "resnet18.untrained"


def test_a_file_that_fits_other_channels_already_is_taken_as_it_is(tmp_path):
    model = zoo.load("resnet18", width=8, in_channels=7)
    zoo.save(model, tmp_path)
    file = next(tmp_path.glob("*.safetensors"))
    loaded = zoo.load("resnet18", pretrained=file, width=8, in_channels=7)
    assert torch.equal(loaded.conv1.weight, model.conv1.weight)
    assert loaded.load_report.adapted == ()
    with pytest.raises(WeightsError, match=r"conv1\.weight"):
        zoo.load("resnet18", pretrained=file, width=8, in_channels=5)


def test_a_saved_folder_never_means_random_weights(tmp_path):
    zoo.save(zoo.load("resnet18", width=8), tmp_path)
    card = tmp_path / "resnet18.toml"
    card.write_text(card.read_text("utf-8").partition("[weights")[0], "utf-8")
    with pytest.raises(WeightsUnavailableError, match="lists no weights"):
        zoo.load(tmp_path)
    assert zoo.load(tmp_path, pretrained=False).load_report.source == "random"
