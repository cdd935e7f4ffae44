"""From a model to the exported program that every format is written from."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from zoo.cards import Card, TensorSpec
from zoo.errors import CardError, ExportError, nearest
from zoo.examples import axes, example_inputs, example_sizes, spelled

TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Program:
    """A traced model with the names of its inputs and outputs."""

    exported: ExportedProgram
    inputs: dict[str, TensorSpec]  # in the order of forward's arguments
    outputs: dict[str, TensorSpec]

    @property
    def dynamic(self) -> dict[str, dict[int, str]]:
        """Name of every dynamic axis, by input and position."""
        return {name: dynamic_axes(spec) for name, spec in self.inputs.items()}


def dynamic_axes(spec: TensorSpec) -> dict[int, str]:
    """Position → name of the axes whose size is not fixed."""
    return {i: axis for i, axis in enumerate(spec.shape) if isinstance(axis, str)}


def trace(model: nn.Module, card: Card) -> Program:
    """Trace a model with the axes of its card dynamic.

    Args:
        model: In eval mode; the caller switches gradients off.
        card: Names forward's arguments, the outputs, and the dynamic axes of both.

    Raises:
        ExportError: The model cannot be traced, or the trace fixes an axis that the card names.
        CardError: The card's inputs or outputs are not those of the model.
    """
    inputs = _in_order(model, card)
    sizes = trace_sizes(inputs)
    example = example_inputs(inputs, sizes)
    _check_outputs(model, card, example, sizes)
    # AUTO also takes what a named Dim refuses: lengths that a position table bounds, images that a
    # stack of convolutions bounds from below. What it takes in silence, _check_axes refuses.
    dynamic = {name: dict.fromkeys(dynamic_axes(spec), Dim.AUTO) for name, spec in inputs.items()}
    try:
        exported = torch.export.export(model, (), kwargs=example, dynamic_shapes=dynamic)
    except Exception as error:
        raise failure(f"{card.full_name} cannot be traced", error) from error
    program = Program(exported, inputs, dict(card.outputs))
    _check_axes(program, card)
    _forget_places(exported)
    return program


def trace_sizes(specs: Mapping[str, TensorSpec]) -> dict[str, int]:
    """The example's sizes, raised where needed so that all are at least 2 and no two are equal.

    Tracing takes an axis of size 1 for a broadcast, and two equal sizes may be taken for one.
    """
    found: dict[str, int] = {}
    fixed = {axis for spec in specs.values() for axis in spec.shape if isinstance(axis, int)}
    for axis, example in example_sizes(specs).items():
        size = max(example, 2)
        while size in fixed or size in found.values():
            size += 1
        found[axis] = size
    return found


def flat(outputs: Any) -> tuple[Tensor, ...]:
    """What forward returns, as a tuple of tensors."""
    found = tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
    for output in found:
        if not isinstance(output, Tensor):
            raise ExportError(
                f"forward gives a {type(output).__name__}; tensors and tuples of them are exported"
            )
    return found


def failure(what: str, error: Exception) -> ExportError:
    """The error of an exporter or a runtime in one line; its own text follows as details.

    Args:
        what: What failed.
        error: Chained exceptions are followed to the first cause, which says most.
    """
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    text = _plain_text(str(root))
    reason = next(filter(None, map(str.strip, text.splitlines())), type(root).__name__)
    if type(root).__name__ == "GuardOnDataDependentSymNode":
        reason = "it branches in Python on the value of a tensor"
    elif isinstance(root, KeyError):  # its text is the key alone
        reason = f"KeyError: {reason}"
    details = [*text.splitlines(), *([] if root is error else _plain_text(str(error)).splitlines())]
    return ExportError(f"{what}: {reason}{_place(root)}", *details)


def _place(error: BaseException) -> str:
    """Where in the model an error arose: `` (net.py:7: if x.sum() > 0:)``."""
    own = (TORCH, str(Path(__file__).parent))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.line and not frame.filename.startswith(own) and Path(frame.filename).is_file()
    ]
    if not frames or "site-packages" in frames[-1].filename:
        return ""
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})"


def _plain_text(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)  # without terminal colours


def _in_order(model: nn.Module, card: Card) -> dict[str, TensorSpec]:
    """The card's inputs in the order of forward's arguments; optional ones may be left out."""
    parameters = inspect.signature(model.forward).parameters
    for name in card.inputs:
        if name not in parameters:
            raise CardError(
                f"card {card.full_name} has an input {name!r};{nearest(name, parameters)} "
                f"forward takes {', '.join(parameters)}"
            )
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if required and name not in card.inputs:
            raise CardError(f"card {card.full_name} lacks the input {name!r} that forward needs")
    return {name: card.inputs[name] for name in parameters if name in card.inputs}


def _check_outputs(
    model: nn.Module, card: Card, example: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> None:
    """Outputs as the card says: how many, dtype, fixed axes, and axes shared with an input."""
    try:
        outputs = flat(model(**example))
    except ExportError:
        raise
    except Exception as error:
        raise failure(f"{card.full_name} fails at {spelled(sizes)}", error) from error
    if len(outputs) != len(card.outputs):
        raise CardError(
            f"card {card.full_name} lists the outputs {', '.join(card.outputs)}; the model gives "
            f"{len(outputs)}"
        )
    for (name, spec), output in zip(card.outputs.items(), outputs, strict=True):
        wanted = [sizes.get(axis) if isinstance(axis, str) else axis for axis in spec.shape]
        fits = output.ndim == len(wanted) and all(
            w in (None, size) for w, size in zip(wanted, output.shape, strict=True)
        )
        if not fits or output.dtype != getattr(torch, spec.dtype):
            raise CardError(
                f"card {card.full_name}: output {name!r} is {spec.dtype} {list(spec.shape)}; the "
                f"model gives {str(output.dtype).removeprefix('torch.')} {list(output.shape)}"
            )


def _check_axes(program: Program, card: Card) -> None:
    """Refuse a program in which an open axis became a constant."""
    *_, result = program.exported.graph.nodes
    nodes = {node.name: node for node in program.exported.graph.nodes}
    signature = program.exported.graph_signature
    for (name, spec), node in zip(program.inputs.items(), signature.user_inputs, strict=True):
        for place, axis in dynamic_axes(spec).items():
            size = str(nodes[str(node)].meta["val"].shape[place])
            if size.isdigit():
                raise ExportError(
                    f"{card.full_name}: tracing fixes the axis {axis!r} of {name!r} to {size}, so "
                    "other sizes would fail; forward uses it as a Python number: int(x.shape[0])"
                )
    open_axes = axes(program.inputs)
    results = result.args[0][-len(program.outputs) :]
    for (name, spec), node in zip(program.outputs.items(), results, strict=True):
        for place, axis in dynamic_axes(spec).items():
            size = str(node.meta["val"].shape[place])
            if axis in open_axes and size.isdigit():
                raise ExportError(
                    f"{card.full_name}: tracing fixes the axis {axis!r} of the output {name!r} "
                    f"to {size}"
                )


def _forget_places(exported: ExportedProgram) -> None:
    """Drop the stack traces of the nodes: the folders of this machine do not belong in a file."""
    for module in exported.graph_module.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)
