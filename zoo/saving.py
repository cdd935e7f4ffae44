"""Write a model as a folder that `zoo.load` and `zoo.pipeline` open."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zoo import __version__, files, registry, tensorfile
from zoo.cards import Card, File, Weights, read_card
from zoo.config import plain
from zoo.errors import ConfigError, shown
from zoo.signing import signature_path
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
    old = card.weights[card.tag] if card.tag else None
    return write_folder(
        model,
        Path(folder),
        tag=card.tag or "saved",
        labels=labels if labels is not None else card.labels,
        licence=licence or (old.licence if old else "not stated"),
        origin={"saved_from": card.full_name, "zoo_version": __version__},
        auxiliary={f.name: find_file(card, f.name) for f in old.files[1:]} if old else {},
    )


def write_folder(
    model: nn.Module,
    folder: Path,
    *,
    tag: str,
    labels: Sequence[str] | None,
    licence: str,
    origin: Mapping[str, str],
    auxiliary: Mapping[str, Path],
) -> Path:
    """What `save` does, with all that the card says of the weights given.

    Args:
        model: A model with a card; its tensors are written in the types that they have.
        folder: As in `save`.
        tag: Of the weights.
        labels: As in `save`; None for none.
        licence: Of the weights.
        origin: Where they come from; also written into their file.
        auxiliary: Further files, copied under these names.

    Raises:
        ConfigError: As in `save`.
    """
    card = registry.card_of(model)
    stem = card.name.rpartition("/")[2]
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{shown(str(folder))} is a file; give a folder to save into")
    others = [path.name for path in folder.glob("*.toml") if path.stem != stem]
    if others:
        raise ConfigError(
            f"{shown(str(folder))} already holds {others[0]}; give another folder for {stem}"
        )
    if (folder / "labels").is_symlink():
        raise ConfigError(f"{shown(str(folder / 'labels'))} is a link; nothing is written there")
    _check_labels(card, labels)
    folder.mkdir(parents=True, exist_ok=True)

    written = [write_model(folder / f"{stem}.{tag}.safetensors", model, origin)]
    written += [_copy(source, folder / name) for name, source in auxiliary.items()]
    if labels:
        (folder / "labels").mkdir(exist_ok=True)
        files.write_atomically(
            folder / "labels" / f"{stem}.{tag}.txt", "\n".join((*labels, "")).encode()
        )
    weights = Weights(
        files=tuple(written),
        licence=licence,
        origin=dict(origin),
        default=True,
        labels=f"{stem}.{tag}" if labels else None,
        preprocessing=dict(card.preprocessing),
    )
    saved = replace(
        card,
        parameters=sum(p.numel() for p in model.parameters()),
        weights={tag: weights},
        check=type(card.check)(),
    )
    path = folder / f"{stem}.toml"
    signature_path(path).unlink(missing_ok=True)  # of what is replaced now
    files.write_atomically(path, card_text(saved).encode())
    read_card(path)
    return folder


def card_text(card: Card) -> str:
    """A card as TOML; values equal to their defaults are left out."""
    import tomlkit

    table = {key: value for key, value in plain(card).items() if value != {}}
    return tomlkit.dumps(table)


def _check_labels(card: Card, names: Sequence[str] | None) -> None:
    classes = card.config.get("num_classes")
    if names is not None and classes is not None and len(names) != classes:
        raise ConfigError(f"{len(names)} labels for {classes} classes; give one a class")
    if names is not None and any("\n" in name or not name for name in names):
        raise ConfigError("a label is empty or holds a line break; labels are written one a line")


def write_model(path: Path, model: nn.Module, origin: Mapping[str, str]) -> File:
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
