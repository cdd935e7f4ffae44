"""A trained model as one file for other programs, compared with the model before it exists.

`FORMATS` is the list of formats: each is a module with ``SUFFIX``, ``PACKAGES`` (imported when the
format is used), ``write(program, path, metadata)`` and ``run(path)``.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from zoo.cards import Card
from zoo.config import plain
from zoo.errors import ConfigError, ExportError, ZooError, nearest, require, shown
from zoo.export import onnx, pt2, transformers
from zoo.export.parity import Case, Run, compare
from zoo.export.program import Program, failure, trace
from zoo.registry import card_of, evaluating, load, make_task

__all__ = ["FORMATS", "Case", "ExportReport", "Format", "describe", "export"]


class Format(Protocol):
    """What a module of a format has."""

    SUFFIX: str  # of its files, with the dot
    PACKAGES: tuple[str, ...]  # modules that the extra "export" brings

    def write(self, program: Program, path: Path, metadata: Mapping[str, Any]) -> int | None:
        """Write a file, and beside it what it needs; returns its operator set, if it has one."""

    def run(self, path: Path) -> Run:
        """The file, read back."""


FORMATS: dict[str, Format] = {"pt2": pt2, "onnx": onnx}


@dataclass(frozen=True)
class ExportReport:
    """What was written, and how it compares with the model."""

    path: Path
    format: str
    size_bytes: int  # with the external files
    cases: tuple[Case, ...]  # the card's example first, then sizes that the exporter had not seen
    seconds: float
    opset: int | None = None
    external_files: tuple[Path, ...] = ()

    @property
    def max_abs_diff(self) -> float:
        """Largest difference of any output at any size."""
        return max(case.max_abs_diff for case in self.cases)

    @property
    def max_rel_diff(self) -> float:
        """The same, relative to the largest value of that output."""
        return max(case.max_rel_diff for case in self.cases)

    def __str__(self) -> str:
        """The report in a few lines."""
        opset = f" opset {self.opset}" if self.opset else ""
        lines = [
            f"{self.path}: {self.format}{opset}, {self.size_bytes / 1e6:.1f} MB, "
            f"{self.seconds:.1f} s",
            f"largest difference {self.max_abs_diff:.1e}, at {len(self.cases)} sizes",
            *(f"  {case}" for case in self.cases),
        ]
        return "\n".join([*lines, *(f"weights in {file.name}" for file in self.external_files)])


def export(
    target: str | Path | nn.Module,
    out: str | Path,
    *,
    format: Literal["pt2", "onnx", "transformers"] = "onnx",
    tolerance: float = 1e-4,
    raw: bool = False,
    **config: Any,
) -> ExportReport:
    """Write a model as a file that runs without this project.

    The file is read back and run at the example sizes of the card and at several others; it takes
    its name only if it gives what the model gives. Until then an older file of that name stays.

    Args:
        target: A model that `zoo.load` returned, or what `zoo.load` takes: a name then means its
            trained weights unless ``pretrained=False`` is given.
        out: Folder of the file, made if needed; or the file, ending with the format's suffix.
        format: "pt2" for PyTorch, "onnx" for onnxruntime and others; "transformers" writes a folder
            that Hugging Face transformers opens, of the models that it has.
        tolerance: Largest difference allowed, relative to the largest value of the same output.
        raw: Write what the task makes of the model: from raw inputs to answers, for example from an
            observation to the action for `env.step`.
        **config: Passed to `zoo.load`.

    Raises:
        ExportError: The model cannot be exported, its file differs from it, or cannot be written.
        CardError: The card's inputs or outputs are not those of the model.
        MissingPackageError: The format needs a package that is not installed.

    Example:
        >>> report = zoo.export("resnet50.cifar10", "out/", format="onnx")  # doctest: +SKIP
    """
    started = time.perf_counter()
    writer = _format(format) if format != "transformers" else None
    if not 0 <= tolerance < 1:
        raise ConfigError(f"tolerance is {shown(tolerance)}; it takes 0 or more, below 1")
    model = _model(target, config)
    model = _graph(model) if raw else model
    card = card_of(model)
    if writer is None:
        return _as_folder(model, card, Path(out), tolerance, started)
    path = _destination(Path(out), card, writer.SUFFIX)
    where = f"{card.full_name} as {format}"
    with _staging(path.parent) as staging:
        with evaluating(model), _quiet(), torch.no_grad():
            program = trace(model, card)
            staged = staging / path.name
            try:
                opset = writer.write(program, staged, describe(model))
                run = writer.run(staged)
            except ZooError:
                raise
            except Exception as error:
                raise failure(f"{where} cannot be written", error) from error
            cases = compare(model, card, program.inputs, run, tolerance=tolerance, where=where)
        files = _publish(staging, path)
    return ExportReport(
        path=path,
        format=format,
        size_bytes=sum(file.stat().st_size for file in files),
        cases=cases,
        seconds=time.perf_counter() - started,
        opset=opset,
        external_files=tuple(file for file in files if file != path),
    )


def _as_folder(
    model: nn.Module, card: Card, out: Path, tolerance: float, started: float
) -> ExportReport:
    """What `export` does for a format that is a folder."""
    if out.exists() and not out.is_dir():
        raise ExportError(f"{shown(str(out))} is a file; transformers opens a folder")
    where = f"{card.full_name} as transformers"
    with _staging(out) as staging:
        with evaluating(model), torch.no_grad():
            transformers.write(model, staging)
            run = transformers.run(model, staging)
            cases = compare(model, card, card.inputs, run, tolerance=tolerance, where=where)
        files = _publish(staging, out / transformers.CONFIG)
    return ExportReport(
        path=out,
        format="transformers",
        size_bytes=sum(file.stat().st_size for file in files),
        cases=cases,
        seconds=time.perf_counter() - started,
    )


def describe(model: nn.Module) -> dict[str, Any]:
    """What a file says about its model, as plain values: the card, and which tensors it holds.

    ``weights_sha256`` is that of the file that was loaded, ``tensors_sha256`` that of the tensors
    as they are now, also after training: the same names, shapes, dtypes and bytes give the same.
    """
    card = card_of(model)
    weights = card.weights[card.tag] if card.tag else None
    report = getattr(model, "load_report", None)
    loaded = report.sha256 if report else weights.files[0].sha256 if weights else None
    return plain(  # type: ignore[no-any-return]
        {
            "name": card.name,
            "tag": card.tag,
            "task": card.task,
            "summary": card.summary,
            "licence": weights.licence if weights else None,
            "labels": card.labels,
            "preprocessing": card.preprocessing,
            "config": card.config,
            "inputs": card.inputs,
            "outputs": card.outputs,
            "weights_sha256": loaded,
            "tensors_sha256": _tensors_sha256(model),
            "zoo_version": sys.modules["zoo"].__version__,  # the package imports this layer
        }
    )


def _tensors_sha256(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise ExportError(
            f"no format is named {shown(name)};{nearest(str(name), FORMATS)} "
            f"the formats are {', '.join(FORMATS)}, transformers"
        )
    writer = FORMATS[name]
    for package in writer.PACKAGES:
        require(package, "export")
    return writer


def _model(target: str | Path | nn.Module, config: dict[str, Any]) -> nn.Module:
    """The model to export: all of it on the CPU, in float32."""
    if isinstance(target, nn.Module):
        if config:
            raise ConfigError(
                f"{', '.join(config)} cannot change a loaded model; give its name instead"
            )
        model = target
    else:
        if isinstance(target, str):
            config = {"pretrained": True, **config}
        model = load(target, **config)
    name = card_of(model).full_name
    parameters = {key for key, _ in model.named_parameters()}
    for key, tensor in model.state_dict().items():
        if tensor.device.type != "cpu":
            raise ExportError(
                f"{name}: {key} is on {tensor.device}; models are exported from the CPU, "
                "call model.cpu()"
            )
        # Statistics of float64 are buffers that stay what they are.
        statistics = tensor.dtype == torch.float64 and key not in parameters
        if tensor.is_floating_point() and tensor.dtype != torch.float32 and not statistics:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ExportError(
                f"{name}: {key} is {kind}; models are exported in float32, call model.float()"
            )
    return model


def _graph(model: nn.Module) -> nn.Module:
    """From raw inputs to answers, as the task of the model has it."""
    task = make_task(model)
    graph: nn.Module = task.graph(model)
    if not isinstance(getattr(graph, "card", None), Card):
        raise ExportError(
            f"{task.name} has no card of its raw inputs; leave raw out, and prepare inputs as "
            "zoo.preprocess does"
        )
    return graph


def _destination(out: Path, card: Card, suffix: str) -> Path:
    """The file to write."""
    if out.suffix in {f.SUFFIX for f in FORMATS.values()} - {suffix}:
        raise ExportError(f"out is {shown(str(out))}; this format writes {suffix} files")
    name = card.full_name.replace("/", "-") + suffix
    path = out if out.suffix == suffix else out / name
    if path.is_dir():
        raise ExportError(f"{shown(str(path))} is a folder; choose another place for the file")
    return path


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A new folder in `folder`, gone afterwards; so is `folder`, if it was made and stays empty."""
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".export-", dir=folder))
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        for parent in made:
            try:
                parent.rmdir()
            except OSError:  # it holds the file
                break


def _publish(staging: Path, path: Path) -> list[Path]:
    """Move the verified files to their place, the one that refers to the others last."""
    staged = sorted(staging.iterdir(), key=lambda file: file.name == path.name)
    try:
        for file in staged:
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        for file in staged:
            os.replace(file, path.parent / file.name)
        if os.name == "posix":  # elsewhere a folder cannot be opened
            descriptor = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise _unwritable(path, error) from error
    return [path.parent / file.name for file in staged]


def _unwritable(path: Path, error: OSError) -> ExportError:
    return ExportError(f"cannot write to {shown(str(path))}: {error.strerror}; choose another out")


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing printed, warned or logged below an error; exceptions pass.

    The exporters print graphs to both streams when they fail, and warn about their own internals.
    """
    disabled = logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(max(disabled, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(disabled)
