"""Raw input in, answers out; nothing depends on the rest of the batch."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo import registry
from zoo.errors import ConfigError, DataError, nearest, shown

if TYPE_CHECKING:
    from torch import Tensor, nn

BATCH_SIZE = 32
WINDOW = 16  # batches read ahead, so that items of one size can share a batch


class Pipeline:
    """A callable from raw inputs to answers.

    One item gives one answer, a list gives a list (for embeddings an array with one row an item). A
    pair is a tuple. An item's answer is the same alone and in any list, up to float32's rounding.
    The model answers in eval mode and is in its own mode again afterwards.
    """

    def __init__(self, model: nn.Module, *, batch_size: int | None = None) -> None:
        if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
            raise ConfigError(f"batch_size is {shown(batch_size)}; it takes a whole number from 1")
        self.model = model
        self.card = registry.card_of(model)
        self.task = registry.make_task(model)
        # Items of like length share a batch; a task may say how much a batch holds instead.
        self.budget: int | None = None if batch_size else getattr(self.task, "budget", None)
        own: int = getattr(self.task, "batch_size", BATCH_SIZE)
        self.batch_size = batch_size or own
        # A task whose answer takes more than one call of the model says how, in `run`.
        self._run = getattr(self.task, "run", _forward)
        self._decodes_samples = "samples" in inspect.signature(self.task.decode).parameters

    def __call__(self, inputs: Any, **options: Any) -> Any:
        """Answers for one item or for a list of items.

        Args:
            inputs: What the task takes (the table in the README), or a list of such.
            **options: The task's own, for example ``top_k=3`` or ``layout="CHW"``.

        Raises:
            DataError: An item cannot be read, or the list is empty.
            ConfigError: The task has no such option.
        """
        whole = isinstance(inputs, list)
        if whole and not inputs:
            raise DataError("the list of inputs is empty; give at least one item")
        for name in getattr(self.task, "each", ()):
            if name in options and whole:
                options[name] = _one_each(name, options[name], inputs)
            elif name in options:
                options[name] = [options[name]]
        split = self._split(options)
        if not whole:
            return self._answers([inputs], *split)[0]
        answers = self._answers(inputs, *split)
        gather = getattr(self.task, "gather", None)
        return gather(answers) if gather else answers

    def __getattr__(self, name: str) -> Any:
        """What a task offers beside answers, as a policy's ``play``."""
        task = self.__dict__.get("task")
        if name not in getattr(task, "offers", ()):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return partial(getattr(task, name), self.model)

    def _split(self, options: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """Options of reading, of running the model and of decoding."""
        steps = [_keywords(s) for s in (self.task.read, self._run, self.task.decode)]
        known = set().union(*steps)
        for name in options:
            if name not in known:
                able = ", ".join(sorted(known)) or "none"
                raise ConfigError(
                    f"{self.task.name} has no option {shown(name)};{nearest(name, known)} "
                    f"it has {able}"
                )
        return tuple({k: v for k, v in options.items() if k in step} for step in steps)

    def _answers(
        self,
        inputs: Sequence[Any],
        reading: dict[str, Any],
        running: dict[str, Any],
        decoding: dict[str, Any],
    ) -> list[Any]:
        import torch

        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        answers: list[Any] = [None] * len(inputs)
        with registry.evaluating(self.model), torch.inference_mode():
            for indices, samples in self._batches(inputs, reading):
                batch = self.task.collate(samples)
                batch = {name: tensor.to(device) for name, tensor in batch.items()}
                outputs = self._run(self.model, _as_model(batch, self.model), **running)
                if self._decodes_samples:
                    decoding = {**decoding, "samples": samples}
                decoded = self.task.decode(outputs, **decoding)
                for index, answer in zip(indices, decoded, strict=True):
                    answers[index] = answer
        return answers

    def _own(self, options: dict[str, Any], index: int) -> dict[str, Any]:
        """Options of one item, where the task has some that each item has by itself."""
        each = getattr(self.task, "each", ())
        return {name: v[index] if name in each else v for name, v in options.items()}

    def _batches(
        self, inputs: Sequence[Any], reading: dict[str, Any]
    ) -> Iterator[tuple[list[int], list[dict[str, Tensor]]]]:
        """Prepared samples with their positions, near sizes together, a window at a time."""
        window = WINDOW * self.batch_size if self.batch_size > 1 else 1
        for start in range(0, len(inputs), window):
            samples = [
                (index, _read(self.task, inputs, index, self._own(reading, index)))
                for index in range(start, min(start + window, len(inputs)))
            ]
            samples.sort(key=lambda item: _size(item[1]))
            while samples:
                count = self._fitting([_size(sample) for _, sample in samples])
                part, samples = samples[:count], samples[count:]
                yield [index for index, _ in part], [sample for _, sample in part]

    def _fitting(self, sizes: list[int]) -> int:
        """How many of some items, the smallest first, are one batch."""
        if self.budget is None:
            return self.batch_size
        whole = itertools.accumulate(sizes)
        return max(1, sum(1 for size in whole if size <= self.budget))


def pipeline(
    target: str | Path | nn.Module, *, batch_size: int | None = None, **options: Any
) -> Pipeline:
    """A pipeline for a name, a loaded model, or the folder of a saved one.

    Args:
        target: A name means its trained weights, with or without a tag; random ones are never run
            unless ``pretrained=False`` asks for them.
        batch_size: Items that the model sees at a time; by default the task's own or `BATCH_SIZE`,
            of texts as many as have `budget` tokens.
        **options: Passed to `zoo.load`.
    """
    if isinstance(target, str | Path):
        target = registry.located(target)
        if isinstance(target, str):
            options.setdefault("pretrained", True)
        name = target
        return registry.steadily(
            name, lambda: Pipeline(registry.load(name, **options), batch_size=batch_size)
        )
    if options:
        raise ConfigError(
            f"{shown(next(iter(options)))} belongs to zoo.load; this model is loaded already"
        )
    return Pipeline(target, batch_size=batch_size)


def preprocess(target: str | Path | nn.Module) -> Callable[..., Any]:
    """The function from raw input to model input that a card describes.

    One raw item gives one sample without a batch axis: a tensor, or a dict by input name where the
    model takes several. A list gives the batch, ready for the model.
    """
    if isinstance(target, str | Path):
        target = registry.located(target)
        name, trained = target, True if isinstance(target, str) else None
        task = registry.steadily(name, lambda: registry.task_of(registry.resolve(name, trained)[0]))
    else:
        task = registry.make_task(target)

    def prepare(raw: Any, **options: Any) -> Any:
        items = raw if isinstance(raw, list) else [raw]
        if not items:
            raise DataError("the list of inputs is empty; give at least one item")
        able = _keywords(task.read)
        for name in options:
            if name not in able:
                raise ConfigError(
                    f"reading for {task.name} has no option {shown(name)};{nearest(name, able)} "
                    f"it has {', '.join(sorted(able)) or 'none'}"
                )
        batch = task.collate([_read(task, items, index, options) for index in range(len(items))])
        if not isinstance(raw, list):
            batch = {name: tensor[0] for name, tensor in batch.items()}
        return next(iter(batch.values())) if len(batch) == 1 else batch

    return prepare


def _read(
    task: Any, inputs: Sequence[Any], index: int, options: dict[str, Any]
) -> dict[str, Tensor]:
    """One prepared sample; in a list, an error says which item it is."""
    try:
        sample: dict[str, Tensor] = task.read(inputs[index], **options)
    except DataError as error:
        if len(inputs) == 1:
            raise
        raise DataError(f"item {index}: {error.line}", *error.details) from error
    return sample


def _size(sample: dict[str, Tensor]) -> int:
    return max(tensor.numel() for tensor in sample.values())


def _one_each(name: str, values: Any, inputs: Sequence[Any]) -> list[Any]:
    """The values of an option that every item has by itself.

    Raises:
        ConfigError: They are not as many as the items.
    """
    if not isinstance(values, list) or len(values) != len(inputs):
        raise ConfigError(
            f"{name} is {shown(values)}; a list of {len(inputs)} inputs takes a list of as many"
        )
    return values


def _forward(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(**batch)


def _keywords(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _as_model(batch: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Floating-point inputs in the dtype of the model's parameters."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() and dtype else tensor
        for name, tensor in batch.items()
    }
