"""From a name to a model: card, class, configuration, weights."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from zoo import cards
from zoo.cards import Card, TensorSpec
from zoo.config import build, default_of, field_types
from zoo.errors import (
    CardError,
    ConfigError,
    UnknownModelError,
    WeightsError,
    WeightsUnavailableError,
    ZooError,
    nearest,
    shown,
)
from zoo.pull import open_or_pull
from zoo.signing import signed_by
from zoo.weights import Verify, find_file, installed, open_path, open_weights

if TYPE_CHECKING:
    import torch
    from torch import nn

T = TypeVar("T")
REREADS = 8  # of a saved model that another process replaces again and again


def load(
    name: str | Path,
    *,
    pretrained: bool | str | Path | None = None,
    task: str | None = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    verify: Verify = "auto",
    **config: Any,
) -> nn.Module:
    """A model by its name, in eval mode.

    Args:
        name: Name of a card, with or without a tag; or the path of a folder that `save` wrote.
        pretrained: None: trained if and only if the name has a tag. False: random weights, with the
            tag's configuration. True: the tag in the name, else the card's default. A string is a
            tag, a path a safetensors file.
        task: Another task of the same family, for example "text-classification" for a BERT: a fresh
            head on the trained body.
        device: Where the model is put in the end.
        dtype: Of all floating-point tensors; by default float32, whatever the file holds.
        verify: "auto" or "always", see `zoo.weights.open_weights`.
        **config: Fields of the family's configuration that differ from the card's.

    Returns:
        The module. Its `card` says what it is, its `load_report` where every tensor came from.

    Raises:
        UnknownModelError: No such name or tag.
        ConfigError: No such field, a value of the wrong type, or two different tags.
        WeightsUnavailableError: The weights are not installed, and were not called by their tag or
            cannot be fetched; nothing else is loaded in their place.
        WeightsError: A file is damaged or does not fit.
    """
    if verify not in ("auto", "always"):
        raise ConfigError(f"verify is {shown(verify)}; it takes 'auto' or 'always'")
    return steadily(name, lambda: _load(name, pretrained, task, device, dtype, verify, config))


def _load(
    name: str | Path,
    pretrained: bool | str | Path | None,
    task: str | None,
    device: str | torch.device,
    dtype: str | torch.dtype | None,
    verify: Verify,
    config: dict[str, Any],
) -> nn.Module:
    from zoo.loading import LoadReport, load_into, skeleton_of

    wanted_dtype, wanted_device = _dtype(dtype), _device(device)
    card, path = resolve(name, pretrained)
    trained = path is not None or (card.tag is not None and pretrained is not False)
    cls = symbol(card.model, card)
    base = config_class(cls, card)
    stored_config: Any = build(
        base, card.config, where=f"the config of {card.full_name}", error=CardError
    )
    if task is not None:
        config = {**config, **_task_field(card, base, task)}
    changes = {k: v for k, v in config.items() if getattr(stored_config, k, None) != v}
    final: Any = build(base, {**card.config, **config}, where=card.name)

    if "num_classes" in changes and not _has_head(cls, final, card, changes):
        raise ConfigError(
            f"{card.full_name} has no classes as it is; give task= too, one of "
            f"{', '.join(tasks_beside(card))}"
        )
    if not trained:
        model: Any = _built(cls, final, card, changes)
        report = LoadReport(card.name, "random", tensors=dict.fromkeys(model.state_dict(), "fresh"))
        report = replace(report, fresh=tuple(report.tensors))
        if wanted_dtype is not None:
            model.to(wanted_dtype)
    else:
        # Only weights that the caller called by their tag may be fetched.
        by_tag = isinstance(name, str) and ("." in name or isinstance(pretrained, str))
        open_card = open_or_pull if by_tag else open_weights
        with skeleton_of():
            model = _built(cls, final, card, changes)
        channels = stored_config.in_channels if "in_channels" in changes else None
        with open_path(path) if path else open_card(card, verify=verify) as stored:
            report = load_into(
                model,
                stored,
                name=card.full_name,
                head=card.head,
                new_head="num_classes" in changes or "task" in changes,
                stored_channels=channels,
                dtype=wanted_dtype,
            )
    if isinstance(name, Path) and (signature := signed_by(card_file(name))):
        report = replace(report, notes=(*report.notes, f"the card is {signature}"))
    model.card = _own_card(card, final, changes, trained)
    model.load_report = report
    loaded: nn.Module = model.to(wanted_device).eval()
    return loaded


def resolve(name: str | Path, pretrained: bool | str | Path | None) -> tuple[Card, Path | None]:
    """The card that a call means, narrowed to its tag, and the file that replaces the card's own.

    Without a tag written by the caller the network is never touched: the default weights of a card
    are installed with the zoo.
    """
    name = located(name)
    untrained = pretrained is False
    card = saved_card(name) if isinstance(name, Path) else cards.card(name, to_train=untrained)
    tags = [card.tag] if card.tag else []
    if isinstance(pretrained, str):
        if not pretrained or not pretrained.replace("_", "a").replace("-", "a").isalnum():
            raise UnknownModelError(
                f"pretrained={shown(pretrained)} is not a tag; a file is given as pathlib.Path(…)"
            )
        if tags and tags != [pretrained]:
            raise ConfigError(
                f"{card.full_name} names the tag {card.tag!r} and pretrained={pretrained!r} "
                "another; give one"
            )
        return card.with_tag(pretrained), None
    if isinstance(pretrained, Path):
        return card, pretrained
    if pretrained is not None and not isinstance(pretrained, bool):
        raise ConfigError(
            f"pretrained is {shown(pretrained)}; it takes True, False, a tag or a pathlib.Path"
        )
    if isinstance(name, Path) and not card.tag and pretrained is not False:
        raise WeightsUnavailableError(
            f"the card in {shown(str(name))} lists no weights; pretrained=False builds it anew"
        )
    if card.tag or not pretrained:
        return card, None
    if card.default_tag:
        return card.with_tag(card.default_tag), None
    pullable = ", ".join(cards.list_weights(card.name)) or "none"
    raise WeightsUnavailableError(
        f"{card.name} has no weights installed with the zoo; zoo pull fetches these: {pullable}"
    )


def located(name: str | Path) -> str | Path:
    """A name stays a name; the path of a folder that is no model's name is a saved model."""
    if not isinstance(name, str) or not os.path.isdir(name):
        return name
    is_name = cards.NAME.fullmatch(name) and name.partition(".")[0] in cards.list_models()
    return name if is_name else Path(name)


def saved_card(folder: Path) -> Card:
    """The card in a folder that `zoo.save` wrote, narrowed to its weights, with its labels.

    Raises:
        UnknownModelError: It is no such folder.
        CardError: The card is damaged or names code that is not installed as a domain or a plug-in;
            or keys are trusted and its signature does not hold.
    """
    path = card_file(folder)
    signed_by(path)
    card = cards.read_card(path)
    if unknown := sorted(cards.unknown_packages(card)):
        raise CardError(
            f"card {card.name} takes its code from {unknown[0]!r}, which is neither a domain of "
            "the zoo nor a plug-in (entry-point group zoo.cards)"
        )
    card = card.with_tag(next(iter(card.weights), None))
    labels = card.weights[card.tag].labels if card.tag else None
    return replace(card, held={labels: found}) if labels and (found := card.labels) else card


def steadily(name: str | Path, read: Callable[[], T]) -> T:
    """What `read` gives of a model; asked again where a saved one was replaced meanwhile.

    The files of a saved model go with the card that names them, so that whoever read the old card
    and not yet its files finds them missing.
    """
    place = located(name)
    if not isinstance(place, Path):
        return read()
    for _ in range(REREADS):
        before = _card_text(place)
        try:
            return read()
        except (CardError, WeightsError):
            if _card_text(place) == before:
                raise
    return read()


def _card_text(folder: Path) -> bytes | None:
    try:
        return card_file(folder).read_bytes()
    except (OSError, UnknownModelError):
        return None


def card_file(folder: Path) -> Path:
    """Path of the one card in a folder that `zoo.save` wrote."""
    if folder.is_file():
        raise UnknownModelError(
            f"{shown(str(folder))} is a file; give the folder that zoo.save wrote, or "
            "zoo.load(name, pretrained=Path(file))"
        )
    folder = folder.absolute()
    found = sorted(folder.glob("*.toml"))
    if len(found) != 1:
        held = f"{len(found)} cards" if found else ("no card" if folder.is_dir() else "nothing")
        raise UnknownModelError(
            f"{shown(str(folder))} holds {held}; a saved model is a folder with one card "
            "(zoo.save writes it)"
        )
    return found[0]


def symbol(target: str, card: Card) -> Any:
    """The class that a card names as ``package.module:Class``."""
    module_name, _, attribute = target.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        top = module_name.partition(".")[0]
        where = getattr(import_module(top), "__file__", None) if error.name != top else None
        reason = (
            f"{top} was imported from {where}" if where else f"there is no module {error.name!r}"
        )
        raise CardError(f"card {card.name} names {target!r}, but {reason}") from error
    if not hasattr(module, attribute):
        close = nearest(attribute, vars(module))
        raise CardError(
            f"card {card.name} names {target!r}, but {module.__file__} has no {attribute!r}"
            + (close and f";{close}")
        )
    return getattr(module, attribute)


def config_class(cls: type, card: Card) -> type:
    """Dataclass that a family's constructor takes: the annotation of its parameter `config`."""
    hints = get_type_hints(cls.__init__) if isinstance(cls, type) else {}  # type: ignore[misc]
    if "config" not in hints:
        raise CardError(
            f"card {card.name}: {shown(card.model)} is no class whose __init__ takes a 'config'"
        )
    found: type = hints["config"]
    return found


def _built(cls: Any, config: Any, card: Card, changes: Mapping[str, Any]) -> Any:
    """A model of this configuration, or why there is none: sizes beyond all memory, for example."""
    try:
        return cls(config)
    except ZooError:
        raise
    except Exception as error:  # whatever a constructor makes of a value that has the right type
        reason = f"{type(error).__name__}: {error}"
        raise (ConfigError if changes else CardError)(
            f"{card.full_name}: no {cls.__name__} of this configuration can be built: {reason}"
        ) from error


def make_task(model: nn.Module) -> Any:
    """The task of a loaded model, with the preprocessing, labels and files of its weights."""
    return task_of(card_of(model))


def task_of(card: Card) -> Any:
    """The task of a card that is narrowed to its weights.

    Raises:
        CardError: The card names something else, or values that its task does not take.
    """
    cls = task_class(card)
    try:
        return cls(card, partial(find_file, card))
    except ZooError:
        raise
    except Exception as error:  # as in `_built`
        reason = f"{type(error).__name__}: {error}"
        raise CardError(f"card {card.name}: its task cannot be made: {reason}") from error


def task_class(card: Card) -> Any:
    """The class that a card names as its task."""
    cls = symbol(card.task, card)
    if not isinstance(getattr(cls, "name", None), str) or not hasattr(cls, "collate"):
        raise CardError(f"card {card.name}: {shown(card.task)} is no task: a class with a name")
    return cls


def card_of(model: nn.Module) -> Card:
    """The card of a model that `load` returned."""
    found = getattr(model, "card", None)
    if not isinstance(found, Card):
        raise ConfigError(
            f"this {type(model).__name__} has no card; zoo.load gives models that have one"
        )
    return found


_modes_lock = threading.Lock()
_modes: dict[nn.Module, tuple[int, dict[nn.Module, bool]]] = {}  # callers, and the modes before


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for a while; every submodule gets its own mode back.

    Threads may evaluate one model at once: the first puts it into eval mode, the last gives the
    modes back.
    """
    with _modes_lock:
        count, modes = _modes.get(model, (0, {}))
        if not count:
            modes = {module: module.training for module in model.modules()}
            model.eval()
        _modes[model] = count + 1, modes
    try:
        yield
    finally:
        with _modes_lock:
            count, modes = _modes.pop(model)
            if count > 1:
                _modes[model] = count - 1, modes
            else:
                for module, mode in modes.items():
                    module.training = mode


def installed_tags(card: Card) -> list[str]:
    """Tags whose files are all present."""
    return [tag for tag in card.weights if installed(card.with_tag(tag))]


def _task_field(card: Card, base: type, task: str) -> dict[str, Any]:
    """The configuration that makes a family do another task."""
    if task_class(card).name == task and "task" not in field_types(base):
        return {}
    names = tasks_beside(card)
    if task not in names or "task" not in field_types(base):
        able = ", ".join(sorted(names)) if "task" in field_types(base) else task_class(card).name
        raise ConfigError(
            f"{card.name} does not do {shown(task)};{nearest(task, names)} it does {able}"
        )
    return {"task": task}


def tasks_beside(card: Card) -> dict[str, str]:
    """Tasks that the module of the card's own task holds or imports: name → ``module:Class``."""
    module_name = card.task.partition(":")[0]
    module, package = import_module(module_name), module_name.partition(".")[0]
    return {
        name: f"{module_name}:{key}"
        for key, cls in vars(module).items()
        if isinstance(cls, type) and cls.__module__.partition(".")[0] == package
        if isinstance(name := getattr(cls, "name", None), str)
    }


def _own_card(card: Card, final: Any, changes: dict[str, Any], trained: bool) -> Card:
    """The card of this very model: its configuration, its task, and its weights if it has any.

    Other classes or another task keep the preprocessing, which belongs to the body, and lose labels
    and numbers; so do random weights, and neither is called by the tag any more.
    """
    other = "num_classes" in changes or "task" in changes
    if card.tag and (other or not trained):
        old = card.weights[card.tag]
        labels = None if other else old.labels
        tag = "custom" if trained else "untrained"
        origin = {"derived_from" if trained else "configured_like": card.full_name}
        kept = replace(old, metrics=(), golden=None, labels=labels, default=False, origin=origin)
        card = replace(card, tag=tag, weights={tag: kept})
    if "task" in changes:
        target = tasks_beside(card)[changes["task"]]
        task = symbol(target, card)
        card = replace(
            card,
            task=target,
            summary=f"{card.name} with a head for {task.name}.",
            inputs=card.inputs | task.inputs,
            outputs=task.outputs,
        )
    if "in_channels" in changes:
        inputs = {n: _with_channels(spec, final) for n, spec in card.inputs.items()}
        card = replace(card, inputs=inputs)
    values = {
        f.name: getattr(final, f.name)
        for f in fields(final)
        if f.name in card.config or getattr(final, f.name) != default_of(f)
    }
    return replace(card, config=values)


def _with_channels(spec: TensorSpec, final: Any) -> TensorSpec:
    """The input of a card for the channels of this model; they are the second axis."""
    if len(spec.shape) < 3 or not isinstance(spec.shape[1], int):
        return spec
    return replace(spec, shape=(spec.shape[0], final.in_channels, *spec.shape[2:]))


def _has_head(cls: Any, final: Any, card: Card, changes: Mapping[str, Any]) -> bool:
    """True if this configuration builds a layer under one of the card's head prefixes."""
    from zoo.loading import skeleton_of, under

    with skeleton_of():
        names = _built(cls, final, card, changes).state_dict()
    return any(under(name, card.head) for name in names)


def _dtype(dtype: Any) -> torch.dtype | None:
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(
            f"dtype is {shown(dtype)}; it takes a floating-point dtype such as torch.bfloat16"
        )
    return found


def _device(device: Any) -> torch.device:
    import torch

    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"device {shown(device)} cannot be used here: {str(error).splitlines()[0]}"
        ) from error
