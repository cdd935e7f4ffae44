"""Example inputs of a model, made from the inputs of its card.

The contract suite and the exporters run models on these; a card therefore says of every dynamic
axis how large an example is, and of every integer which values it may have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from zoo.cards import TensorSpec
from zoo.errors import CardError, ConfigError, nearest, shown

# What `unseen_sizes` gives: the batch, then the axes at even and at odd places. The batch is 1
# twice, since that is where tracing fixes an axis first.
UNSEEN = (
    (1, "example", "example"),
    (3, "least", "large"),
    (5, "large", "small"),
    (1, "least", "least"),
    (7, "small", "large"),
)


def example_inputs(
    specs: Mapping[str, TensorSpec], sizes: Mapping[str, int] | None = None, *, seed: int = 0
) -> dict[str, Tensor]:
    """One batch of random inputs.

    Numbers are standard normal, integers uniform in their range. Rows of a mask have random lengths
    of at least 1; the first row is full.

    Args:
        specs: The card's inputs.
        sizes: Sizes of dynamic axes that differ from the examples on the card.
        seed: The same seed gives the same tensors; the global generator is left alone.

    Raises:
        CardError: A dynamic axis without an example or with two, integers without a range.
        ConfigError: `sizes` names an axis that no input has, or is not at least 1.
    """
    known = axes(specs)
    for axis, size in (sizes or {}).items():
        if axis not in known:
            raise ConfigError(
                f"no input has an axis {shown(axis)};{nearest(axis, known)} "
                f"the dynamic axes are {', '.join(known) or 'none'}"
            )
        if type(size) is not int or size < 1:
            raise ConfigError(f"the size of axis {axis!r} is {shown(size)}; it takes at least 1")
    final = example_sizes(specs, sizes)
    generator = torch.Generator().manual_seed(seed)
    return {name: _tensor(name, spec, final, generator) for name, spec in specs.items()}


def axes(specs: Mapping[str, TensorSpec]) -> tuple[str, ...]:
    """Names of the dynamic axes, in the order in which they first appear."""
    return tuple(dict.fromkeys(a for s in specs.values() for a in s.shape if isinstance(a, str)))


def example_sizes(
    specs: Mapping[str, TensorSpec], sizes: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Size of every dynamic axis: the one in `sizes`, else the example on the card.

    Raises:
        CardError: An axis has no example, or inputs disagree about it.
    """
    found: dict[str, int] = {}
    for name, spec in specs.items():
        for axis, size in spec.example.items():
            if axis not in spec.shape:
                raise CardError(
                    f"input {name!r}: example names the axis {axis!r};"
                    f"{nearest(axis, axes({name: spec}))} its shape is {list(spec.shape)}"
                )
            if size < 1 or found.setdefault(axis, size) != size:
                raise CardError(
                    f"input {name!r}: the example size of {axis!r} is {size}; it takes at least 1, "
                    "and the same for every input"
                )
    found |= sizes or {}
    for axis in axes(specs):
        if axis not in found:
            raise CardError(
                f"no input gives an example for the dynamic axis {axis!r}; write "
                f"example = {{ {axis} = … }} beside its shape"
            )
    return {axis: found[axis] for axis in axes(specs)}


def unseen_sizes(specs: Mapping[str, TensorSpec]) -> list[dict[str, int]]:
    """Sizes that differ from the example: single items, single tokens, odd lengths and odd images.

    The batch and the axes of integers (tokens) go down to 1; other axes stay above 0.9 of the
    example, which so decides how small an image the model has to take. No axis but the batch passes
    1.5 of it: an example keeps that distance from a limit on tokens.

    Raises:
        CardError: As `example_sizes`.
    """
    base = example_sizes(specs)
    single = {a for s in specs.values() if s.dtype != "float32" for a in s.shape}
    found: list[dict[str, int]] = []
    for batch, *choices in UNSEEN:
        sizes = {"batch": batch} if "batch" in base else {}
        for place, axis in enumerate(a for a in base if a != "batch"):
            n = base[axis]
            small = int(0.9 * n) | 1
            options = {
                "example": n,
                "least": 1 if axis in single else small,
                "small": small,
                "large": int(1.42 * n) | 1,
            }
            sizes[axis] = options[choices[place % 2]]
        sizes = {axis: sizes[axis] for axis in base}
        if sizes != base and sizes not in found:
            found.append(sizes)
    return found


def spelled(sizes: Mapping[str, int]) -> str:
    """Sizes as they are written in a message: ``batch 1, height 57``."""
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items()) or "fixed sizes"


def _tensor(
    name: str, spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator
) -> Tensor:
    shape = [sizes[axis] if isinstance(axis, str) else axis for axis in spec.shape]
    if spec.mask:
        return _mask(shape, generator).to(getattr(torch, spec.dtype))
    if spec.dtype == "float32":
        return torch.randn(shape, generator=generator)
    if spec.dtype == "bool":
        return torch.rand(shape, generator=generator) < 0.5
    if spec.range is None or spec.range[0] >= spec.range[1]:
        raise CardError(
            f"input {name!r} holds integers and its range is {shown(spec.range)}; "
            "it takes [first, one after the last]"
        )
    return torch.randint(*spec.range, shape, generator=generator)


def _mask(shape: Iterable[int], generator: torch.Generator) -> Tensor:
    """True at the first positions of every row, along the last axis."""
    *rows, length = shape
    lengths = torch.randint(1, length + 1, (math.prod(rows),), generator=generator)
    lengths[0] = length
    return (torch.arange(length) < lengths[:, None]).reshape(*rows, length)
