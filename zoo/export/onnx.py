"""ONNX, for onnxruntime and whatever else reads it.

Inputs are named as forward's arguments, outputs and dynamic axes as on the card; the properties of
the model hold what else the card says, texts as they are and everything else as JSON. Weights that
one file cannot hold lie beside it in ``<name>.onnx.data``, to which it refers by the bare name, so
that both can move together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.errors import ExportError, require, shown
from zoo.examples import axes
from zoo.export.parity import Run
from zoo.export.program import Program, dynamic_axes

SUFFIX = ".onnx"
PACKAGES: tuple[str, ...] = ("onnx", "onnxscript", "onnxruntime")
OPSET = 20
# Bytes of weights in one file: torch's writer ends at 1.6e9, protobuf at 2^31.
LARGEST = 1_500_000_000


def write(program: Program, path: Path, metadata: Mapping[str, Any]) -> int:
    """Convert and save the program; returns the operator set that the file needs."""
    converted = torch.onnx.export(
        program.exported,
        dynamo=True,
        verbose=False,
        opset_version=OPSET,
        input_names=list(program.inputs),
        output_names=list(program.outputs),
        dynamic_shapes=program.dynamic,
    )
    assert converted is not None  # None comes from the older exporter only
    _check_axes(program, converted.model.graph)
    for key, value in metadata.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        converted.model.metadata_props[key] = text
    weights = sum(tensor.nbytes for tensor in program.exported.state_dict.values())
    converted.save(path, external_data=weights > LARGEST)
    return int(converted.model.opset_imports[""])


def run(path: Path) -> Run:
    """The file in onnxruntime on the CPU: named inputs to a tuple of outputs.

    Raises:
        ExportError: A file of weights is missing, or is looked for outside the folder of the model.
    """
    onnx, onnxruntime = require("onnx", "export"), require("onnxruntime", "export")
    external_files(path)
    onnx.checker.check_model(str(path))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def call(inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        given = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        return tuple(map(torch.from_numpy, given))

    return call


def external_files(path: Path) -> tuple[Path, ...]:
    """Files beside the model that hold weights of it.

    Raises:
        ExportError: One is missing, or the model refers to it by more than a bare file name.
    """
    onnx = require("onnx", "export")
    model = onnx.load(str(path), load_external_data=False)
    found = {}
    for tensor in model.graph.initializer:
        location = next((e.value for e in tensor.external_data if e.key == "location"), None)
        if location is not None:
            found[location] = path.parent / location
    for location, file in found.items():
        if location in ("", ".", "..") or Path(location).name != location or "\\" in location:
            raise ExportError(
                f"{path.name} looks for weights in {shown(location)}; only a bare file name in "
                "its own folder is read"
            )
        if not file.is_file():
            raise ExportError(
                f"{path.name} needs its weights in {location}, which is missing; put it into "
                f"{shown(str(path.parent))}"
            )
    return tuple(found.values())


def _check_axes(program: Program, graph: Any) -> None:
    """The converter has to keep every name and every open axis."""
    for tensors, specs in ((graph.inputs, program.inputs), (graph.outputs, program.outputs)):
        names = [tensor.name for tensor in tensors]
        if names != list(specs):
            raise ExportError(f"the ONNX converter gives the names {names} for {list(specs)}")
        for tensor, (name, spec) in zip(tensors, specs.items(), strict=True):
            for place, axis in dynamic_axes(spec).items():
                if axis in axes(program.inputs) and isinstance(tensor.shape[place], int):
                    raise ExportError(
                        f"the ONNX converter fixes the axis {axis!r} of {name!r} "
                        f"to {tensor.shape[place]}"
                    )
