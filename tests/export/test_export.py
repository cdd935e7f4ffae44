from __future__ import annotations

import hashlib
import importlib
import json
import logging
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
import zoo.registry
from zoo.cards import Card, Weights
from zoo.config import build
from zoo.errors import CardError, ConfigError, ExportError, MissingPackageError
from zoo.examples import example_inputs
from zoo.export import FORMATS, describe, export, pt2
from zoo.export import onnx as onnx_format
from zoo.export.parity import difference

pytestmark = pytest.mark.untyped

BOTH = pytest.mark.parametrize("format", ["pt2", "onnx"])
FLAT = {"x": {"dtype": "float32", "shape": ["batch", 5], "example": {"batch": 2}}}
SAME = {"y": {"dtype": "float32", "shape": ["batch", 5]}}


class Pixels(nn.Module):
    """Strided convolutions, so that odd images matter."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(8, 4)

    def forward(self, image: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(image))), 2)
        return self.fc(self.dropout(x.mean((2, 3))))


class Words(nn.Module):
    """Attention over the valid tokens, positions from a table, one optional input."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.segment = nn.Embedding(50, 16), nn.Embedding(2, 16)
        self.position = nn.Parameter(torch.randn(24, 16))
        self.qkv, self.fc = nn.Linear(16, 48), nn.Linear(16, 3)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        batch, tokens = input_ids.shape
        segments = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x = self.word(input_ids) + self.segment(segments) + self.position[:tokens]
        q, k, v = self.qkv(x).view(batch, tokens, 3, 2, 8).permute(2, 0, 3, 1, 4)
        valid = attention_mask[:, None, None, :].bool()
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=valid)
        x = x.transpose(1, 2).reshape(batch, tokens, 16)
        weight = attention_mask[..., None].float()
        return self.fc((x * weight).sum(1) / weight.sum(1))


class Frames(nn.Module):
    """Two outputs, the first one as long as the input."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.Conv1d(5, 6, 3, padding=1), nn.Linear(6, 2)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        x = self.rnn(features.transpose(1, 2)).transpose(1, 2)
        return x, self.fc(x.amax(1))


class Apply(nn.Module):
    """One function of x, to provoke the exporter."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Any:
        return self.function(x * self.scale)


def carded(
    model: nn.Module, inputs: Mapping[str, Any], outputs: Mapping[str, Any], name: str = "toy"
) -> nn.Module:
    table = {
        "model": "nowhere:Toy",
        "task": "nowhere:Task",
        "summary": "A toy.",
        "paper": "https://example.org",
        "parameters": 1,
        "inputs": inputs,
        "outputs": outputs,
    }
    model.card = replace(build(Card, table, where="toy"), name=name)
    return model


def pixels() -> nn.Module:
    torch.manual_seed(0)
    image = {
        "dtype": "float32",
        "shape": ["batch", 3, "height", "width"],
        "example": {"batch": 2, "height": 32, "width": 32},
    }
    logits = {"dtype": "float32", "shape": ["batch", "num_classes"]}
    model = carded(Pixels(), {"image": image}, {"logits": logits}, "pixels")
    weights = {
        "licence": "MIT",
        "preprocessing": {"mean": [0.5, 0.5, 0.5], "size": 32},
        "files": [{"name": "pixels.toy.safetensors", "size": 3, "sha256": "ab" * 32}],
    }
    weights = {"toy": build(Weights, weights, where="weights")}
    model.card = replace(model.card, weights=weights).with_tag("toy")
    return model.eval()


def words() -> nn.Module:
    torch.manual_seed(0)
    ids = {
        "dtype": "int64",
        "shape": ["batch", "tokens"],
        "example": {"batch": 2, "tokens": 13},
        "range": [0, 50],
    }
    mask = {"dtype": "int64", "shape": ["batch", "tokens"], "mask": True}
    logits = {"dtype": "float32", "shape": ["batch", "num_classes"]}
    inputs = {"attention_mask": mask, "input_ids": ids}  # not in forward's order
    return carded(Words(), inputs, {"logits": logits}, "words").eval()


def frames() -> nn.Module:
    torch.manual_seed(0)
    features = {
        "dtype": "float32",
        "shape": ["batch", "frames", 5],
        "example": {"batch": 2, "frames": 7},
    }
    outputs = {
        "states": {"dtype": "float32", "shape": ["batch", "frames", 6]},
        "logits": {"dtype": "float32", "shape": ["batch", 2]},
    }
    return carded(Frames(), {"features": features}, outputs, "frames").eval()


def apply(function: Callable[[Tensor], Any]) -> nn.Module:
    return carded(Apply(function), FLAT, SAME).eval()


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def dims(tensor: Any) -> list[int | str]:
    return [d.dim_param or d.dim_value for d in tensor.type.tensor_type.shape.dim]


@BOTH
@pytest.mark.parametrize(
    ("make", "cases"),
    [
        (pixels, {(2, 32, 32), (1, 32, 32), (3, 29, 45), (5, 45, 29), (1, 29, 29), (7, 29, 45)}),
        (words, {(2, 13), (1, 13), (3, 1), (5, 19), (1, 1), (7, 11)}),
        (frames, {(2, 7), (1, 7), (3, 7), (5, 9), (7, 7)}),
    ],
    ids=["image", "text", "two-outputs"],
)
def test_a_file_equals_its_model_at_sizes_the_exporter_has_not_seen(
    make: Callable[[], nn.Module], cases: set[tuple[int, ...]], format: Any, tmp_path: Path
) -> None:
    model = make()
    report = export(model, tmp_path / "out", format=format)
    assert report.path == tmp_path / "out" / f"{model.card.full_name}.{format}"
    assert [p.name for p in report.path.parent.iterdir()] == [report.path.name]
    assert report.size_bytes == report.path.stat().st_size
    assert (report.format, report.external_files) == (format, ())
    assert report.opset == (20 if format == "onnx" else None)
    sizes = [tuple(case.sizes[a] for a in sorted(case.sizes)) for case in report.cases]
    assert len(sizes) == len(cases)
    assert set(sizes) == cases
    assert 0 <= report.max_abs_diff <= 1e-5
    assert 0 <= report.max_rel_diff <= 1e-5
    assert 0 < report.seconds < 120
    run = FORMATS[format].run(report.path)  # the file at its place, not the one that was compared
    given = example_inputs(model.card.inputs, dict.fromkeys(report.cases[0].sizes, 9), seed=99)
    with torch.no_grad():
        expected = model(**given)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for e, g in zip(expected, run(given), strict=True):
        torch.testing.assert_close(g, e, atol=1e-5, rtol=1e-5)


def test_the_report_reads_as_a_few_lines(tmp_path: Path) -> None:
    report = export(frames(), tmp_path, format="pt2")
    first, second, *cases = str(report).splitlines()
    assert first.startswith(f"{report.path}: pt2, 0.0 MB, ")
    assert second == "largest difference 0.0e+00, at 5 sizes"
    assert cases[1].startswith("  batch 1, frames 7: largest difference 0.0e+00")


def test_axes_of_an_onnx_file_have_the_names_on_the_card(tmp_path: Path) -> None:
    graph = onnx.load(export(words(), tmp_path, format="onnx").path).graph
    assert [(t.name, dims(t)) for t in graph.input] == [
        ("input_ids", ["batch", "tokens"]),
        ("attention_mask", ["batch", "tokens"]),
    ]
    assert [(t.name, dims(t)) for t in graph.output] == [("logits", ["batch", 3])]
    graph = onnx.load(export(frames(), tmp_path, format="onnx").path).graph
    assert [(t.name, dims(t)) for t in graph.output] == [
        ("states", ["batch", "frames", 6]),
        ("logits", ["batch", 2]),
    ]


def test_axes_of_a_pt2_file_are_open_within_the_limits_of_the_model(tmp_path: Path) -> None:
    program = torch.export.load(export(words(), tmp_path, format="pt2").path)
    shapes = {
        node.name: [str(size) for size in node.meta["val"].shape]
        for node in program.graph.nodes
        if node.op == "placeholder"
    }
    batch, tokens = shapes["input_ids"]
    assert shapes["attention_mask"] == [batch, tokens]
    limits = {str(symbol): limit for symbol, limit in program.range_constraints.items()}
    assert str(limits[batch].upper) == "int_oo"
    assert limits[tokens].upper == 24  # rows of the position table
    assert program.graph_signature.user_inputs == ("input_ids", "attention_mask")


def test_a_batch_stays_open_when_the_example_on_the_card_has_one_item(tmp_path: Path) -> None:
    """Case EXP-01, pytorch/pytorch#157621: a dynamic batch lost on export."""
    net = nn.ModuleDict({"conv": nn.Conv2d(3, 4, 3), "fc": nn.Linear(4, 2)})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, image: Tensor) -> Tensor:
            return self.net["fc"](self.net["conv"](image).mean((2, 3)))

    inputs = {"image": {"dtype": "float32", "shape": ["b", 3, 8, 8], "example": {"b": 1}}}
    model = carded(Net(), inputs, {"logits": {"dtype": "float32", "shape": ["b", 2]}})
    report = export(model, tmp_path, format="onnx")
    session = onnxruntime.InferenceSession(str(report.path))
    assert session.get_inputs()[0].shape == ["b", 3, 8, 8]
    assert session.get_outputs()[0].shape == ["b", 2]
    for batch in (1, 2, 3, 7):
        image = torch.randn(batch, 3, 8, 8)
        given = session.run(None, {"image": image.numpy()})[0]
        assert np.abs(given - model(image).detach().numpy()).max() <= 1e-5


def test_an_onnx_file_runs_in_a_fresh_process_without_torch(tmp_path: Path) -> None:
    model = words()
    report = export(model, tmp_path, format="onnx")
    given = example_inputs(model.card.inputs, {"batch": 4, "tokens": 17}, seed=5)
    np.savez(tmp_path / "given.npz", **{name: t.numpy() for name, t in given.items()})
    script = """
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
numpy.save(sys.argv[3], session.run(["logits"], dict(numpy.load(sys.argv[2])))[0])
assert not {"torch", "zoo", "onnx"} & set(sys.modules)
"""
    arguments = [str(report.path), str(tmp_path / "given.npz"), str(tmp_path / "logits.npy")]
    subprocess.run([sys.executable, "-I", "-c", script, *arguments], check=True, timeout=60)
    expected = model(**given).detach().numpy()
    assert np.abs(np.load(tmp_path / "logits.npy") - expected).max() <= 1e-5


def test_both_formats_carry_the_card(tmp_path: Path) -> None:
    model = pixels()
    held = pt2.read_metadata(export(model, tmp_path, format="pt2").path)
    props = onnx.load(export(model, tmp_path, format="onnx").path).metadata_props
    texts = {p.key: p.value for p in props}
    assert held == describe(model)
    assert (held["name"], held["tag"], held["licence"]) == ("pixels", "toy", "MIT")
    assert held["weights_sha256"] == "ab" * 32
    assert held["preprocessing"] == {"mean": [0.5, 0.5, 0.5], "size": 32}
    assert held["zoo_version"] == zoo.__version__
    assert held["inputs"]["image"]["shape"] == ["batch", 3, "height", "width"]
    assert set(texts) == set(held)
    for key, value in held.items():
        assert texts[key] == value if isinstance(value, str) else json.loads(texts[key]) == value


def test_labels_are_carried_in_order(tmp_path: Path) -> None:
    model = pixels()
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "four.txt").write_text("äpple\nbird\ncat\ndog\n", "utf-8")
    weights = {"toy": replace(model.card.weights["toy"], labels="four")}
    model.card = replace(model.card, folder=tmp_path, weights=weights)
    held = pt2.read_metadata(export(model, tmp_path, format="pt2").path)
    assert held["labels"] == ["äpple", "bird", "cat", "dog"]


def test_the_hash_of_the_tensors_follows_them() -> None:
    model = pixels()
    first = describe(model)
    assert describe(pixels())["tensors_sha256"] == first["tensors_sha256"]
    with torch.no_grad():
        model.fc.bias[0] += 1e-6
    changed = describe(model)
    assert changed["tensors_sha256"] != first["tensors_sha256"]
    assert {**changed, "tensors_sha256": 0} == {**first, "tensors_sha256": 0}


@BOTH
def test_no_folder_of_this_machine_is_in_a_file(format: Any, tmp_path: Path) -> None:
    content = export(pixels(), tmp_path, format=format).path.read_bytes()
    assert b"pixels" in content
    assert Path(__file__).name.encode() not in content
    assert str(Path(torch.__file__).parent).encode() not in content


@BOTH
def test_a_file_that_differs_is_not_written_and_an_older_one_stays(
    format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = frames()
    run = FORMATS[format].run

    def off(path: Path) -> Any:
        inner = run(path)

        def call(inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
            states, logits = inner(inputs)
            wrong = 2e-2 if inputs["features"].shape[0] == 5 else 0
            return states, logits + wrong

        return call

    monkeypatch.setattr(FORMATS[format], "run", off)
    (tmp_path / f"frames.{format}").write_bytes(b"older")
    before = listing(tmp_path)
    with pytest.raises(ExportError) as caught:
        export(model, tmp_path, format=format)
    assert "differ by 2.0e-02" in caught.value.line
    assert "at batch 5, frames 9" in caught.value.line
    assert len(caught.value.details) == 5
    assert listing(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ExportError):
        export(model, tmp_path / "new" / "folder", format=format)
    assert not (tmp_path / "new").exists()
    export(model, tmp_path, format=format, tolerance=0.5)
    assert listing(tmp_path) != before


@BOTH
@pytest.mark.parametrize(
    ("function", "fixed"),
    [
        (lambda x: x.reshape(int(x.shape[0]), 5), "axis 'batch' of 'x' to 2"),
        (lambda x: x + torch.zeros(2, 1), "axis 'batch' of 'x' to 2"),
        (lambda x: torch.ones(len(x), 5) + 0 * x[:1], "axis 'batch' of"),
    ],
    ids=["int", "constant", "len"],
)
def test_an_axis_that_became_a_constant_is_refused(
    function: Callable[[Tensor], Tensor], fixed: str, format: Any, tmp_path: Path
) -> None:
    with pytest.raises(ExportError) as caught:
        export(apply(function), tmp_path, format=format)
    assert fixed in caught.value.line
    assert not list(tmp_path.iterdir())


@BOTH
def test_a_branch_on_a_size_is_refused_where_the_file_takes_the_other_one(
    format: Any, tmp_path: Path
) -> None:
    model = apply(lambda x: x + 1 if x.shape[0] > 4 else x)
    with pytest.raises(ExportError, match=r"batch [57]"):
        export(model, tmp_path, format=format)
    assert not list(tmp_path.iterdir())


@BOTH
def test_a_branch_on_a_value_is_refused_in_one_line_with_its_place(
    format: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = apply(lambda x: x if x.sum() > 0 else -x)
    with pytest.raises(ExportError) as caught:
        export(model, tmp_path, format=format)
    line = str(caught.value).splitlines()[0]
    assert line == caught.value.line
    assert line.startswith("toy cannot be traced: it branches in Python on the value of a tensor")
    assert "test_export.py:" in line
    assert len(line) <= 200
    assert any("data-dependent" in detail for detail in caught.value.details)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


def test_an_operation_that_onnx_lacks_is_named(tmp_path: Path) -> None:
    model = apply(lambda x: x + torch.linalg.eigvalsh(x[:, :, None] * x[:, None, :]))
    with pytest.raises(ExportError, match=r"as onnx cannot be written: .*linalg_eigh") as caught:
        export(model, tmp_path, format="onnx")
    assert "\x1b" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_axes_with_two_names_may_not_have_to_be_equal(tmp_path: Path) -> None:
    inputs = {
        "x": {
            "dtype": "float32",
            "shape": ["batch", "rows", "columns"],
            "example": {"batch": 2, "rows": 5, "columns": 5},
        }
    }
    model = carded(Apply(lambda x: x + x.transpose(1, 2)), inputs, {"y": inputs["x"]})
    with pytest.raises(ExportError, match="toy fails at batch 2, rows 5, columns 6: The size"):
        export(model, tmp_path, format="pt2")


@BOTH
def test_a_model_in_training_is_exported_in_eval_mode_and_stays_in_training(
    format: Any, tmp_path: Path
) -> None:
    model = pixels()
    model.train()
    model.norm.eval()  # a frozen norm stays so
    modes = {name: m.training for name, m in model.named_modules()}
    statistics = model.norm.running_mean.clone()
    report = export(model, tmp_path, format=format)
    assert {name: m.training for name, m in model.named_modules()} == modes
    assert torch.equal(model.norm.running_mean, statistics)
    given = example_inputs(model.card.inputs)
    expected = model.eval()(**given)
    torch.testing.assert_close(FORMATS[format].run(report.path)(given)[0], expected.detach())


@BOTH
def test_nothing_global_changes(
    format: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def state() -> list[Any]:
        return [
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.get_rng_state().tolist(),
            list(warnings.filters),
            logging.root.manager.disable,
            sys.stdout,
            sys.stderr,
        ]

    model = words()
    level = logging.root.manager.disable
    FORMATS[format].run(export(model, tmp_path, format=format).path)  # imports of the exporter
    before = state()
    assert logging.root.manager.disable == level
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inside = state()
        export(model, tmp_path, format=format)
        assert state() == inside
    assert state() == before
    assert capfd.readouterr() == ("", "")
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_an_exporter_is_heard_only_when_it_logs_an_error(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = pt2.write

    def chatter(*arguments: Any) -> None:
        print("a graph")
        print("a graph", file=sys.stderr)
        warnings.warn("about its own internals", stacklevel=1)
        logging.getLogger("torch.onnx").warning("falls back")
        logging.getLogger("torch.onnx").error("is broken")
        write(*arguments)

    monkeypatch.setattr(pt2, "write", chatter)
    export(frames(), tmp_path, format="pt2")
    logging.getLogger("mine").warning("heard again")
    heard = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert heard == ["is broken", "heard again"]
    assert (capfd.readouterr(), len(recwarn)) == (("", ""), 0)


def test_a_file_can_be_named(tmp_path: Path) -> None:
    report = export(frames(), str(tmp_path / "a" / "mine.pt2"), format="pt2")
    assert report.path == tmp_path / "a" / "mine.pt2"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["mine.pt2"]


def test_a_plugin_name_becomes_one_file_name(tmp_path: Path) -> None:
    model = frames()
    model.card = replace(model.card, name="theirs/frames")
    assert export(model, tmp_path, format="pt2").path == tmp_path / "theirs-frames.pt2"


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("file", "cannot write to"),
        ("file/below", "cannot write to"),
        ("frames.onnx", "this format writes .pt2 files"),
        ("folder.pt2", "is a folder"),
    ],
)
def test_a_place_that_cannot_hold_the_file_is_refused_at_once(
    out: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.pt2").mkdir()
    monkeypatch.setattr(pt2, "write", lambda *_: pytest.fail("it came to writing"))
    with pytest.raises(ExportError, match=says):
        export(frames(), tmp_path / out, format="pt2")
    assert (tmp_path / "file").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.half(), "fc.bias is float16|float16; models are exported in float32"),
        (lambda m: m.to("meta"), "is on meta; models are exported from the CPU"),
    ],
    ids=["half", "meta"],
)
def test_other_dtypes_and_devices_are_refused(
    change: Callable[[nn.Module], nn.Module], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=says):
        export(change(frames()), tmp_path, format="pt2")


def test_an_unknown_format_gets_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"'onx'; did you mean 'onnx'\? the formats"):
        export(frames(), tmp_path, format="onx")  # type: ignore[arg-type]


def test_a_missing_package_is_named_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingPackageError, match=r"'onnxscript'.*refzoo\[export\]"):
        export(frames(), tmp_path, format="onnx")


def test_arguments_that_fit_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_classes cannot change a loaded model"):
        export(frames(), tmp_path, format="pt2", num_classes=3)
    with pytest.raises(ConfigError, match="has no card"):
        export(nn.Linear(2, 2), tmp_path, format="pt2")
    with pytest.raises(ConfigError, match="tolerance is -1"):
        export(frames(), tmp_path, format="pt2", tolerance=-1)


@pytest.mark.parametrize(
    ("inputs", "outputs", "says"),
    [
        ({"xs": FLAT["x"]}, SAME, "an input 'xs'; did you mean 'x'"),
        ({}, SAME, "lacks the input 'x'"),
        (FLAT, {**SAME, "z": SAME["y"]}, "lists the outputs y, z; the model gives 1"),
        (FLAT, {"y": {"dtype": "float32", "shape": ["batch", 6]}}, r"\['batch', 6\].*\[2, 5\]"),
        (FLAT, {"y": {"dtype": "float32", "shape": ["batch"]}}, r"\['batch'\].*\[2, 5\]"),
        (FLAT, {"y": {"dtype": "int64", "shape": ["batch", 5]}}, "int64.*gives float32"),
    ],
    ids=["name", "missing", "count", "size", "rank", "dtype"],
)
def test_a_card_that_does_not_fit_its_model_is_refused(
    inputs: dict[str, Any], outputs: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(CardError, match=says):
        export(carded(Apply(lambda x: x), inputs, outputs), tmp_path, format="pt2")


def test_a_model_that_fails_near_its_example_is_named_as_the_cause(tmp_path: Path) -> None:
    model = words()
    ids = replace(model.card.inputs["input_ids"], example={"batch": 2, "tokens": 20})
    model.card = replace(model.card, inputs={**model.card.inputs, "input_ids": ids})
    with pytest.raises(ExportError, match="the model itself fails at batch 5, tokens 29"):
        export(model, tmp_path, format="pt2")


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="forward gives a dict"):
        export(apply(lambda x: {"y": x}), tmp_path, format="pt2")


def test_a_name_means_its_trained_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = []

    def load(name: Any, **config: Any) -> nn.Module:
        calls.append((name, config))
        return frames()

    package = importlib.import_module("zoo.export")
    monkeypatch.setattr(package, "load", load)
    export("frames", tmp_path, format="pt2")
    export("frames", tmp_path, format="pt2", pretrained=False, num_classes=2)
    export(Path("mine"), tmp_path, format="pt2")
    assert calls == [
        ("frames", {"pretrained": True}),
        ("frames", {"pretrained": False, "num_classes": 2}),
        (Path("mine"), {}),
    ]


@BOTH
def test_a_model_of_the_zoo_is_exported_by_name(format: Any, tmp_path: Path) -> None:
    small = {"depths": (1, 1, 1, 1), "width": 8, "num_classes": 10}
    report = zoo.export("resnet18", tmp_path, format=format, pretrained=False, **small)
    assert report.path == tmp_path / f"resnet18.{format}"
    assert report.max_rel_diff <= 1e-5
    held = describe(zoo.load("resnet18", pretrained=False, **small))
    assert held["config"]["num_classes"] == 10
    assert "weights_sha256" not in held


def external(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Linear(64, 64) whose weights lie beside the model."""
    inputs = {"x": {"dtype": "float32", "shape": ["batch", 64], "example": {"batch": 2}}}
    outputs = {"y": {"dtype": "float32", "shape": ["batch", 64]}}

    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    monkeypatch.setattr(onnx_format, "LARGEST", 0)
    report = export(carded(Big(), inputs, outputs, "big"), folder, format="onnx")
    assert report.external_files == (folder / "big.onnx.data",)
    assert sorted(p.name for p in folder.iterdir()) == ["big.onnx", "big.onnx.data"]
    assert report.size_bytes == sum(p.stat().st_size for p in folder.iterdir()) > 64 * 64 * 4
    return report.path


def locations(path: Path) -> set[str]:
    tensors = onnx.load(str(path), load_external_data=False).graph.initializer
    return {e.value for t in tensors for e in t.external_data if e.key == "location"}


def test_weights_beside_a_file_move_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case EXP-03, microsoft/onnxruntime#6696: external data lost when the folder moves."""
    path = external(tmp_path / "first", monkeypatch)
    assert locations(path) == {"big.onnx.data"}
    x = {"x": torch.randn(3, 64)}
    expected = onnx_format.run(path)(x)[0]
    shutil.move(tmp_path / "first", tmp_path / "second")
    monkeypatch.chdir("/")
    moved = tmp_path / "second" / "big.onnx"
    assert torch.equal(onnx_format.run(moved)(x)[0], expected)
    assert onnxruntime.InferenceSession(str(moved)).get_inputs()[0].shape == ["batch", 64]
    (tmp_path / "second" / "big.onnx.data").unlink()
    with pytest.raises(ExportError, match=r"big\.onnx needs its weights in big\.onnx\.data"):
        onnx_format.run(moved)


@pytest.mark.parametrize("location", ["../x", "/x", "a/../x", "..", "a\\x"])
def test_weights_outside_the_folder_are_refused(
    location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case EXP-03, onnx/onnx#5566: an absolute or climbing location of external data."""
    path = external(tmp_path, monkeypatch)
    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ExportError, match="only a bare file name"):
        onnx_format.run(path)


def test_an_old_pair_of_files_is_replaced_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = external(tmp_path, monkeypatch)
    first = hashlib.sha256(path.read_bytes()).hexdigest()
    external(tmp_path, monkeypatch)  # other random weights
    assert hashlib.sha256(path.read_bytes()).hexdigest() != first
    onnx_format.run(path)


@pytest.mark.parametrize(
    ("expected", "given", "gap"),
    [
        ([1.0, 4.0], [1.0, 4.0], (0, 0)),
        ([1.0, 4.0], [1.5, 4.0], (0.5, 0.125)),
        ([0.0, 1e-9], [0.0, 1e-6], (1e-6, 1e-3)),
        ([float("inf"), 2.0], [float("inf"), 1.0], (1, 0.5)),
        ([float("inf"), 2.0], [2.0, 2.0], (float("inf"),) * 2),
        ([1.0, 2.0], [float("nan"), 2.0], (float("inf"),) * 2),
        ([float("-inf")], [float("-inf")], (0, 0)),
        ([float("-inf")], [float("inf")], (float("inf"),) * 2),
        ([1, 2], [1, 3], (1, 0.5)),
        ([True, False], [True, True], (1, 1)),
    ],
)
def test_differences_are_measured_against_the_largest_value(
    expected: list[Any], given: list[Any], gap: tuple[float, float]
) -> None:
    found = difference(torch.tensor(expected), torch.tensor(given), "y")
    assert found == pytest.approx(gap, rel=2e-3)


@pytest.mark.parametrize(
    ("expected", "given", "says"),
    [
        (torch.zeros(2), torch.zeros(3), r"y is float32 \[3\] from the file and float32 \[2\]"),
        (torch.zeros(2), torch.zeros(2).long(), "int64"),
        (torch.tensor([float("nan")]), torch.zeros(1), "NaN in the model itself"),
    ],
)
def test_outputs_that_cannot_be_compared_are_refused(
    expected: Tensor, given: Tensor, says: str
) -> None:
    with pytest.raises(ExportError, match=says):
        difference(expected, given, "y")
