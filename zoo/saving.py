"""Write a model as a folder that `zoo.load` and `zoo.pipeline` open."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zoo import __version__, files, registry, tensorfile
from zoo.cards import Card, File, Weights, read_card
from zoo.config import build, plain
from zoo.errors import ConfigError, shown
from zoo.loading import skeleton_of
from zoo.weights import find_file

if TYPE_CHECKING:
    from torch import Tensor, nn


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    labels: Sequence[str] | None = None,
    licence: str | None = None,
) -> Path:
    """Save a model that `zoo.load` gave, trained further or not.

    Every file is written beside its place and renamed, the card last, so that a folder with a card
    is complete.

    Args:
        model: The bare module; its mode and device do not matter.
        folder: Made if it is not there. A folder that holds another model's card is refused.
        labels: Names of the classes, in the order of their indices.
        licence: Of the new weights; by default that of the weights they come from.

    Returns:
        Path of the folder.

    Raises:
        ConfigError: The model has no card, the labels do not fit, or the folder is taken.
    """
    card = registry.card_of(model)
    folder = Path(folder)
    stem, tag = card.name.rpartition("/")[2], "saved"
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{shown(str(folder))} is a file; give a folder to save into")
    others = [path.name for path in folder.glob("*.toml") if path.stem != stem]
    if others:
        raise ConfigError(
            f"{shown(str(folder))} already holds {others[0]}; give another folder for {stem}"
        )
    names = _labels(card, labels)
    _check_config(model, card)
    folder.mkdir(parents=True, exist_ok=True)

    old = card.weights[card.tag] if card.tag else None
    origin = {
        "saved_from": (old.origin.get("derived_from") if old else None) or card.full_name,
        "zoo_version": __version__,
    }
    main = write_state(folder / f"{stem}.{tag}.safetensors", model, origin)
    written = [main]
    preprocessing = dict(old.preprocessing) if old else {}
    for file in old.files[1:] if old else ():
        written.append(_copy(find_file(card, file.name), folder / file.name))
    if names:
        (folder / "labels").mkdir(exist_ok=True)
        files.write_atomically(
            folder / "labels" / f"{stem}.{tag}.txt", "\n".join((*names, "")).encode()
        )
    weights = Weights(
        files=tuple(written),
        licence=licence or (old.licence if old else "not stated"),
        origin=origin,
        default=True,
        labels=f"{stem}.{tag}" if names else None,
        preprocessing=preprocessing,
    )
    saved = replace(
        card,
        parameters=sum(p.numel() for p in model.parameters()),
        weights={tag: weights},
        check=type(card.check)(),
    )
    files.write_atomically(folder / f"{stem}.toml", card_text(saved).encode())
    read_card(folder / f"{stem}.toml")
    return folder


def card_text(card: Card) -> str:
    """A card as TOML; values equal to their defaults are left out."""
    import tomlkit

    table = {key: value for key, value in plain(card).items() if value != {}}
    return tomlkit.dumps(table)


def _check_config(model: nn.Module, card: Card) -> None:
    """Refuse a model whose layers were exchanged: its card would not build it again."""
    cls = registry.symbol(card.model, card)
    with skeleton_of():
        built = cls(
            build(registry.config_class(cls, card), card.config, where=card.name)
        ).state_dict()
    own = model.state_dict()
    for name in dict.fromkeys((*own, *built)):
        shapes = [tuple(state[name].shape) if name in state else None for state in (own, built)]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"{name} is {shapes[0] or 'absent'} here and {shapes[1] or 'absent'} in the "
                f"configuration of {card.name}; change models by zoo.load(…, num_classes=…)"
            )


def _labels(card: Card, labels: Sequence[str] | None) -> tuple[str, ...] | None:
    if isinstance(labels, str | dict) or not all(isinstance(n, str) for n in labels or ()):
        raise ConfigError(f"labels is {shown(labels)}; it takes a list of names, one a class")
    names = tuple(labels) if labels is not None else card.labels
    classes = card.config.get("num_classes")
    if names is not None and classes is not None and len(names) != classes:
        raise ConfigError(f"{len(names)} labels for {classes} classes; give one a class")
    if names is not None and any("\n" in name or not name for name in names):
        raise ConfigError("a label is empty or holds a line break; labels are written one a line")
    return names


def write_state(path: Path, model: nn.Module, origin: dict[str, str]) -> File:
    """Write the state of a model; a tensor with two names is written under the first."""
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(tensor), name) == name:
            tensors[name] = tensor.detach()
    tensorfile.write(path, tensors, origin)
    return _described(path)


def _copy(source: Path, target: Path) -> File:
    if not (target.exists() and os.path.samefile(source, target)):
        files.write_atomically(target, source.read_bytes())
    return _described(target)


def _described(path: Path) -> File:
    return File(name=path.name, size=path.stat().st_size, sha256=files.sha256_of(path))
