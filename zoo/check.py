"""The contract: one function a promise, run over every card, and open to third parties.

``check_model("acme/their-net")`` runs them all on a plug-in's model. The suite builds the small
configuration of the card's ``[check]`` table, and nothing over 30 million parameters except on the
meta device. A known exception stands in the card, ``xfail = { check_bf16 = "why, since which
version" }``, and must then really fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from zoo import cards, files, registry, tensorfile
from zoo.cards import Card, TensorSpec
from zoo.config import build, field_types
from zoo.errors import ConfigError, ZooError, nearest, shown
from zoo.examples import example_inputs, unseen_sizes
from zoo.loading import make_plan, skeleton_of, under
from zoo.saving import save
from zoo.weights import open_weights

BATCH_TOLERANCE = 2e-5  # of the largest output: what another order of the same additions may change
GRADIENT_TOLERANCE = 1e-5  # of what two processes added up
BF16_TOLERANCE = 0.05  # of the largest output: 8 bits of mantissa through a few layers
FAR = {  # packages and domains that loading a model must not import
    "torchvision", "torchaudio", "transformers", "vision", "nlp", "rl", "audio",
}  # fmt: skip


def check_card(name: str) -> None:
    """The card reads; model, task, configurations, labels and exceptions are sound."""
    card = _card(name)
    cls = registry.symbol(card.model, card)
    base = registry.config_class(cls, card)
    build(base, card.config | card.check.config, where=f"{name}: [check]")
    task = registry.symbol(card.task, card)
    _require(isinstance(task.name, str), f"{card.task} has no name")
    _require(callable(getattr(cls, "init_weights", None)), f"{card.model} has no init_weights")
    for promise in card.check.xfail:
        _require(promise in CHECKS, f"xfail names {shown(promise)};{nearest(promise, CHECKS)}")
    for tag in card.weights:
        narrow = card.with_tag(tag)
        config: Any = build(base, narrow.config, where=f"{name}.{tag}")
        _require(
            narrow.labels is None or len(narrow.labels) == config.num_classes, f"labels of {tag}"
        )
        for metric in narrow.weights[tag].metrics:
            _require(metric.name.count("/") == 2, f"{metric.name!r} is not data/split/metric")
            _require(
                (metric.command is None) != (metric.source is None),
                f"{metric.name}: command or source",
            )


def check_parameters(name: str) -> None:
    """The card's number of parameters is that of the model."""
    card = _card(name)
    found = sum(p.numel() for p in _on_meta(card).parameters())
    _require(
        found == card.parameters, f"{found:,} parameters, and the card says {card.parameters:,}"
    )


def check_stored_shapes(name: str) -> None:
    """Names, shapes and dtypes in every installed file fit the model; no tensor is read."""
    card = _card(name)
    for tag in registry.installed_tags(card):
        narrow = card.with_tag(tag)
        with open_weights(narrow) as stored:
            make_plan(_on_meta(narrow), stored.header.tensors, name=narrow.full_name)


def check_outputs(name: str) -> None:
    """Outputs are finite and have the card's shapes and dtypes, at odd sizes too."""
    model = _small(name)
    card = registry.card_of(model)
    for sizes in ({}, *unseen_sizes(card.inputs)):
        inputs = example_inputs(card.inputs, sizes)
        outputs = _forward(model, inputs)
        _require(
            len(outputs) == len(card.outputs),
            f"{len(outputs)} outputs, {len(card.outputs)} on the card",
        )
        bound = _bound(card.inputs, inputs)
        for (label, spec), output in zip(card.outputs.items(), outputs, strict=True):
            expected = tuple(_size(axis, bound, model) for axis in spec.shape)
            _require(
                tuple(output.shape) == expected, f"{label} is {tuple(output.shape)}, not {expected}"
            )
            _require(str(output.dtype) == f"torch.{spec.dtype}", f"{label} is {output.dtype}")
            _require(
                bool(output.isfinite().all()), f"{label} is not finite at {sizes or 'the example'}"
            )


def check_batch_independence(name: str) -> None:
    """A row alone gives what it gives in any batch, whatever pads the others."""
    model = _small(name)
    specs = registry.card_of(model).inputs
    inputs = example_inputs(specs, {"batch": 5})
    together = _forward(model, inputs)
    for row in range(5):
        alone = _forward(model, _row(inputs, specs, row))
        for whole, single in zip(together, alone, strict=True):
            part = _valid(whole, row, single)
            limit = BATCH_TOLERANCE * float(whole.abs().max())
            worst = float((part - single).abs().max())
            _require(worst <= limit, f"row {row} differs by {worst:.1e} alone, limit {limit:.1e}")
            _require(
                torch.equal(part.argmax(-1), single.argmax(-1)),
                f"row {row} decides otherwise alone",
            )


def check_gradients(name: str) -> None:
    """Every parameter gets a finite gradient, and none is all zero."""
    model = _small(name).train()
    _spread(model)
    _probe(model(**example_inputs(registry.card_of(model).inputs))).backward()
    for label, parameter in model.named_parameters():
        if parameter.grad is None:
            raise AssertionError(f"{label} gets no gradient")
        _require(bool(parameter.grad.isfinite().all()), f"the gradient of {label} is not finite")
        _require(bool(parameter.grad.any()), f"the gradient of {label} is all zero")


def check_learns(name: str) -> None:
    """The loss on one fixed batch falls by half within 100 steps of Adam."""
    model = _small(name).train()
    inputs = example_inputs(registry.card_of(model).inputs)
    with torch.no_grad():
        shapes = [output.shape for output in _forward(model, inputs)]
    generator = torch.Generator().manual_seed(1)
    targets = [nn.functional.normalize(torch.randn(s, generator=generator), dim=-1) for s in shapes]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    first = last = 0.0
    for step in range(100):
        outputs = _as_tuple(model(**inputs))
        loss = sum((o - t).square().mean() for o, t in zip(outputs, targets, strict=True))
        first, last = (loss.item() if step == 0 else first), loss.item()  # type: ignore[union-attr]
        if last < first / 2:
            return
        optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
    raise AssertionError(f"the loss went from {first:.3g} to {last:.3g} only")


def check_save_load(name: str) -> None:
    """Saved and loaded, the model is the same to the bit; saved again, so is the file."""
    model = _small(name)
    inputs = example_inputs(registry.card_of(model).inputs)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        save(model, first)
        loaded = registry.load(Path(first))
        _same_state(model, loaded)
        for before, after in zip(_forward(model, inputs), _forward(loaded, inputs), strict=True):
            _require(torch.equal(before, after), "outputs changed by saving and loading")
        save(loaded, second)
        one, two = (next(Path(f).glob("*.safetensors")) for f in (first, second))
        _require(tensorfile_bytes(one) == tensorfile_bytes(two), "saving twice gives two files")


def check_new_head(name: str) -> None:
    """Another number of classes or another task leaves only the card's head fresh."""
    card = _card(name)
    model = _small(name)
    base = registry.config_class(registry.symbol(card.model, card), card)
    config = card.check.config
    with tempfile.TemporaryDirectory() as folder:
        save(model, folder)
        file = next(Path(folder).glob("*.safetensors"))
        changes: list[dict[str, Any]] = []
        if "num_classes" in field_types(base):
            changes.append({"num_classes": 3})
        if "task" in field_types(base):
            classes = {"num_classes": 3}
            changes = [
                {"task": task, **(classes if "classification" in task else {})}
                for task in registry.tasks_beside(card)
            ]
        for change in changes:
            other: Any = registry.load(name, pretrained=file, **{**config, **change})
            head = {k for k in other.state_dict() if under(k, card.head)}
            fresh = set(other.load_report.fresh)
            _require(fresh <= head, f"{change}: {sorted(fresh - head)} fresh outside the head")
            old = model.state_dict()
            for key, tensor in other.state_dict().items():
                _require(bool(tensor.isfinite().all()), f"{change}: {key} is not finite")
                if key not in head:
                    _require(
                        torch.equal(tensor, old[key]), f"{change}: {key} is not the trained one"
                    )


def check_bf16(name: str) -> None:
    """Under bf16 autocast the outputs are finite and near those of fp32."""
    model = _small(name)
    inputs = example_inputs(registry.card_of(model).inputs)
    exact = _forward(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        rough = _forward(model, inputs)
    for one, other in zip(exact, rough, strict=True):
        worst = float((one - other.float()).abs().max() / one.abs().max())
        _require(worst <= BF16_TOLERANCE, f"bf16 differs by {worst:.1%} of the largest output")


def check_two_processes(name: str) -> None:
    """Gradients averaged over two processes are those of one process on the joined batch."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_two_process_worker, (name, folder), nprocs=2)
        model = _frozen(name)
        _gradients(model, example_inputs(registry.card_of(model).inputs, {"batch": 4}))
        with (Path(folder) / "gradients.safetensors").open("rb") as file:
            shared = tensorfile.read_tensors(file, tensorfile.read_header(file, "gradients"))
    whole = {label: parameter.grad for label, parameter in model.named_parameters()}
    for label, gradient in whole.items():
        _require(gradient is not None, f"{label} gets no gradient")
    _same_gradients(whole, shared)  # type: ignore[arg-type]


def check_export(name: str) -> None:
    """pt2 and ONNX files equal the model at sizes they have not seen; the export compares."""
    from zoo.export import export

    model = _small(name)
    with tempfile.TemporaryDirectory() as folder:
        for format_ in ("pt2", "onnx"):
            report = export(model, folder, format=format_)
            _require(report.max_abs_diff <= 1e-4, f"{format_} differs by {report.max_abs_diff:.1e}")


def check_golden(name: str) -> None:
    """Trained weights give the stored outputs for the stored inputs."""
    card = _card(name)
    for tag, golden in golden_tags(name).items():
        with files.open_file(card.folder / golden) as file:
            stored = tensorfile.read_tensors(file, tensorfile.read_header(file, golden))
        model = registry.load(f"{name}.{tag}")
        outputs = _forward(model, {label: stored[f"input.{label}"] for label in card.inputs})
        for label, output in zip(card.outputs, outputs, strict=True):
            expected = stored[f"output.{label}"]
            worst = float((output - expected).abs().max() / expected.abs().max())
            _require(worst <= 1e-4, f"{tag}: {label} differs from the golden one by {worst:.1e}")


def golden_tags(name: str) -> dict[str, str]:
    """Installed weights of a model that have golden outputs: tag -> name of their file."""
    card = _card(name)
    found = {tag: card.weights[tag].golden for tag in registry.installed_tags(card)}
    return {tag: golden for tag, golden in found.items() if golden}


def check_isolation(name: str) -> None:
    """In a fresh interpreter, the model imports no other domain and no big package."""
    card = _card(name)
    code = (
        "import json, sys; sys.path[:0] = json.loads(sys.argv[2]); import zoo\n"
        "from zoo.examples import example_inputs\n"
        "name, config = json.loads(sys.argv[1]); model = zoo.load(name, pretrained=False, "
        "**config)\n"
        "model(**example_inputs(model.card.inputs))\n"
        "print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    )
    arguments = [json.dumps([name, card.check.config]), json.dumps(sys.path)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    _require(done.returncode == 0, f"a fresh interpreter fails: {done.stderr.strip()[-300:]}")
    imported = set(json.loads(done.stdout.splitlines()[-1]))
    _require(not (far := imported & FAR - {card.domain}), f"loading imports {sorted(far)}")


CHECKS: dict[str, Callable[[str], None]] = {
    name: function for name, function in list(globals().items()) if name.startswith("check_")
}


@dataclass(frozen=True)
class Result:
    """Outcome of one promise for one model."""

    model: str
    check: str
    passed: bool
    message: str = ""


def run_check(name: str, check: str) -> Result:
    """Run one promise; an exception on the card is honoured, and must still be one.

    Raises:
        ConfigError: There is no such check.
    """
    if check not in CHECKS:
        raise ConfigError(
            f"no check is named {shown(check)};{nearest(check, CHECKS)} see zoo.check.CHECKS"
        )
    reason = _card(name).check.xfail.get(check)
    try:
        CHECKS[check](name)
    except (
        Exception
    ) as error:  # whatever a model raises is a broken promise, never the end of the suite
        line = error.line if isinstance(error, ZooError) else f"{type(error).__name__}: {error}"
        return Result(name, check, reason is not None, f"expected: {reason}" if reason else line)
    return Result(
        name, check, reason is None, "passes, and the card expects it to fail" if reason else ""
    )


def check_model(name: str) -> Iterator[Result]:
    """Run every promise for one model."""
    for check in CHECKS:
        yield run_check(name, check)


def _card(name: str) -> Card:
    """The card of a name; that of a saved model has the small configuration of its family."""
    place = registry.located(name)
    if not isinstance(place, Path):
        return cards.card(place)
    card = registry.saved_card(place)
    if card.name not in cards.list_models():
        return card
    family = cards.card(card.name).check
    small = {key: value for key, value in family.config.items() if key != "num_classes"}
    return replace(card, check=replace(family, config=small))


def _require(claim: bool, otherwise: str) -> None:
    """An assertion that `python -O` keeps."""
    if not claim:
        raise AssertionError(otherwise)


def _small(name: str) -> nn.Module:
    """The small configuration of a card with random weights, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return registry.load(name, pretrained=False, **_card(name).check.config)


def _frozen(name: str) -> nn.Module:
    """The small model in eval mode: batch statistics would couple the rows of a batch."""
    return _small(name).eval()


def _on_meta(card: Card) -> nn.Module:
    cls = registry.symbol(card.model, card)
    config: Any = build(registry.config_class(cls, card), card.config, where=card.full_name)
    with skeleton_of():
        model: nn.Module = cls(config)
    return model


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _forward(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return _as_tuple(model(**inputs))


def _bound(specs: Mapping[str, TensorSpec], inputs: Mapping[str, Tensor]) -> dict[str, int]:
    return {
        axis: size
        for name, spec in specs.items()
        for axis, size in zip(spec.shape, inputs[name].shape, strict=True)
        if isinstance(axis, str)
    }


def _size(axis: int | str, bound: Mapping[str, int], model: nn.Module) -> int:
    """Size of an output's axis: a number, an input's axis, or a field of the configuration."""
    if isinstance(axis, int):
        return axis
    return bound[axis] if axis in bound else int(getattr(model.config, axis))


def _row(
    inputs: Mapping[str, Tensor], specs: Mapping[str, TensorSpec], row: int
) -> dict[str, Tensor]:
    """One row of a batch without its padding."""
    lengths = [int(inputs[n][row].sum()) for n, s in specs.items() if s.mask]
    if not lengths:
        return {n: t[row : row + 1] for n, t in inputs.items()}
    return {n: t[row : row + 1, : lengths[0]] for n, t in inputs.items()}


def _valid(whole: Tensor, row: int, single: Tensor) -> Tensor:
    """The part of a row of the batch's output that the row alone has too."""
    part = whole[row : row + 1]
    return part[tuple(slice(0, size) for size in single.shape)]


def _probe(outputs: Any) -> Tensor:
    """A scalar that depends on every entry of a row in its own way, and on all rows alike."""
    generator = torch.Generator().manual_seed(2)
    parts = [(o * torch.randn(o.shape[1:], generator=generator)).sum() for o in _as_tuple(outputs)]
    return torch.stack(parts).sum()


def _spread(model: nn.Module) -> None:
    """Move parameters off 0: a norm that starts at zero hides the gradients behind it."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)


def _same_state(one: nn.Module, other: nn.Module) -> None:
    first, second = one.state_dict(), other.state_dict()
    _require(first.keys() == second.keys(), "loading changed the names")
    for key, tensor in first.items():
        _require(torch.equal(tensor, second[key]), f"{key} changed")


def tensorfile_bytes(path: Path) -> bytes:
    """The data part of a tensor file, without its header."""
    with path.open("rb") as file:
        start = tensorfile.read_header(file, path.name).data_start
    return path.read_bytes()[start:]


def _gradients(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    _spread(model)
    _probe(model(**inputs)).backward()


def _same_gradients(whole: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> None:
    """Refuse gradients of two processes that differ by more than the rounding of their sums.

    A sum is rounded in proportion to its terms, however small they leave it, so the tolerance is a
    share of the two processes' magnitudes. Where every term should be zero (BERT's key biases),
    what flowed through the model is rounded: a few units in the last place of its largest gradient.
    """
    largest = max(float(gradient.abs().max()) for gradient in whole.values())
    for label, gradient in whole.items():
        limit = GRADIENT_TOLERANCE * float(shared[f"{label}|magnitude"].max())
        limit += 4 * torch.finfo(gradient.dtype).eps * largest
        worst = float((gradient - shared[label]).abs().max())
        _require(
            worst <= limit,
            f"the gradient of {label} differs by {worst:.1e} on two processes, limit {limit:.1e}",
        )


def _two_process_worker(rank: int, name: str, folder: str) -> None:
    """One of two gloo processes with half of the batch; the first writes the summed gradients.

    Beside each, the sum of the two magnitudes.
    """
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    model = _frozen(name)
    whole = example_inputs(registry.card_of(model).inputs, {"batch": 4})
    _gradients(model, {n: t[2 * rank : 2 * rank + 2] for n, t in whole.items()})
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    gradients |= {f"{n}|magnitude": gradient.abs() for n, gradient in gradients.items()}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    if rank == 0:
        tensorfile.write(Path(folder) / "gradients.safetensors", gradients, {})
    dist.destroy_process_group()
