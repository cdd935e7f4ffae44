"""Whether a file computes what its model computes, also at sizes the exporter has not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.cards import Card
from zoo.errors import ExportError, shown
from zoo.examples import example_inputs, example_sizes, spelled, unseen_sizes
from zoo.export.program import failure, flat

Run = Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]

# Outputs smaller than this are compared as if they were this large: the float32 rounding of the
# terms that cancelled in them would otherwise count as a difference.
LEAST = 1e-3


@dataclass(frozen=True)
class Case:
    """One comparison of a file with its model."""

    sizes: dict[str, int]
    max_abs_diff: float
    max_rel_diff: float  # relative to the largest value of the same output

    def __str__(self) -> str:
        """The comparison in one line."""
        return (
            f"{spelled(self.sizes)}: largest difference {self.max_abs_diff:.1e}, "
            f"{self.max_rel_diff:.1e} of the largest output"
        )


def compare(
    model: nn.Module, card: Card, inputs: Iterable[str], run: Run, *, tolerance: float, where: str
) -> tuple[Case, ...]:
    """Run both at the card's example and at sizes unlike it.

    Args:
        model: In eval mode; the caller switches gradients off.
        card: Its inputs give the sizes, its outputs the names.
        inputs: Names of the inputs that the file takes.
        run: The file, read back.
        tolerance: Largest difference allowed, relative to the largest value of the same output.
        where: What to call the file in messages.

    Raises:
        ExportError: The file fails, gives other shapes, or differs by more than `tolerance`.
    """
    specs = {name: card.inputs[name] for name in inputs}
    all_sizes = [example_sizes(specs), *unseen_sizes(specs)]
    cases = tuple(
        _case(model, card, example_inputs(specs, sizes, seed=seed), sizes, run, where)
        for seed, sizes in enumerate(all_sizes)
    )
    worst = max(cases, key=lambda case: case.max_rel_diff)
    if not worst.max_rel_diff <= tolerance:
        raise ExportError(
            f"{where}: the file and the model differ by {worst.max_abs_diff:.1e}, "
            f"{worst.max_rel_diff:.1e} of the largest output (allowed: {tolerance:.0e}), at "
            f"{spelled(worst.sizes)}; nothing was written",
            *map(str, cases),
        )
    return cases


def _case(
    model: nn.Module,
    card: Card,
    inputs: dict[str, Tensor],
    sizes: dict[str, int],
    run: Run,
    where: str,
) -> Case:
    try:
        expected = flat(model(**inputs))
    except Exception as error:
        raise failure(
            f"{where}: the model itself fails at {spelled(sizes)}, near the examples of its card",
            error,
        ) from error
    try:
        given = run(inputs)
    except Exception as error:
        raise failure(f"{where}: the file fails at {spelled(sizes)}", error) from error
    if len(given) != len(expected):
        raise ExportError(
            f"{where}: the file gives {len(given)} outputs, the model {len(expected)}"
        )
    found = [
        difference(e, g, f"{where}: {name!r} at {spelled(sizes)}")
        for name, e, g in zip(card.outputs, expected, given, strict=True)
    ]
    return Case(sizes, max(a for a, _ in found), max(r for _, r in found))


def difference(expected: Tensor, given: Tensor, where: str) -> tuple[float, float]:
    """Largest difference, absolute and relative to the largest expected value.

    Infinities have to stand in the same places; integers and booleans count as numbers.

    Raises:
        ExportError: Shapes or dtypes differ, or the expected values are not numbers.
    """
    if given.shape != expected.shape or given.dtype != expected.dtype:
        raise ExportError(
            f"{where} is {_form(given)} from the file and {_form(expected)} from the model"
        )
    expected, given = expected.double(), given.double()
    if expected.isnan().any():
        raise ExportError(f"{where} is NaN in the model itself, so nothing can be compared")
    finite = expected.isfinite()
    if not torch.equal(torch.where(finite, 0.0, expected), torch.where(finite, 0.0, given)):
        return float("inf"), float("inf")
    if not finite.any():
        return 0.0, 0.0
    gap = (expected[finite] - given[finite]).abs().max().item()
    if gap != gap:  # NaN in the file only
        return float("inf"), float("inf")
    return gap, gap / max(expected[finite].abs().max().item(), LEAST)


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {shown(list(tensor.shape))}"
