"""Write a model as a folder that `zoo.load` and `zoo.pipeline` open."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zoo import __version__, files, registry, tensorfile
from zoo.cards import Card, Check, File, Weights
from zoo.config import build, plain
from zoo.errors import ConfigError, shown
from zoo.loading import skeleton_of
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

    Files are called by their hash and the card that names them comes last: whenever the process
    ends, the folder holds the old model or the new one, whole. What the replaced card named is
    removed afterwards.

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
    origin = {
        "saved_from": (old.origin.get("derived_from") if old else None) or card.full_name,
        "zoo_version": __version__,
    }
    return write_folder(
        model,
        Path(folder),
        tag="saved",
        labels=labels if labels is not None else card.labels,
        licence=licence or (old.licence if old else "not stated"),
        origin=origin,
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
        auxiliary: Further files by the names that the preprocessing calls them by.

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
    names = _labels(card, labels)
    _check_config(model, card)
    folder.mkdir(parents=True, exist_ok=True)
    with files.locked(folder):
        state, preprocessing = state_of(model), dict(card.preprocessing)
        digest = hashlib.sha256()
        for piece in tensorfile.encoded(state, origin, name=stem):
            digest.update(piece)
        main = folder / f"{stem}.{digest.hexdigest()[:12]}.safetensors"
        tensorfile.write(main, state, origin)
        written = [_described(main)]
        for name, source in auxiliary.items():
            suffix = "".join(Path(name).suffixes[-2:])
            copy = _write_hashed(folder, stem, source.read_bytes(), suffix)
            written.append(_described(copy))
            preprocessing = {k: copy.name if v == name else v for k, v in preprocessing.items()}
        listed = None
        if names:
            (folder / "labels").mkdir(exist_ok=True)
            text = "\n".join((*names, "")).encode()
            listed = _write_hashed(folder / "labels", stem, text, ".txt").stem
        weights = Weights(
            files=tuple(written),
            licence=licence,
            origin=dict(origin),
            default=True,
            labels=listed,
            preprocessing=preprocessing,
        )
        count = sum(p.numel() for p in model.parameters())
        saved = replace(card, parameters=count, weights={tag: weights}, check=Check())
        path = folder / f"{stem}.toml"
        signature_path(path).unlink(missing_ok=True)  # of what is replaced now
        files.write_atomically(path, card_text(saved).encode())
        _remove_others(folder, stem, weights)
    return folder


def _write_hashed(folder: Path, stem: str, content: bytes, suffix: str) -> Path:
    """Write a file under a name that no other content has."""
    path = folder / f"{stem}.{hashlib.sha256(content).hexdigest()[:12]}{suffix}"
    files.write_atomically(path, content)
    return path


def _remove_others(folder: Path, stem: str, weights: Weights) -> None:
    """Remove what earlier saves left: files of this model that its card does not name."""
    kept = {file.name for file in weights.files} | {f"{weights.labels}.txt"}
    ours = re.compile(rf"{re.escape(stem)}\.[0-9a-f]{{12}}\.[a-z.]+")
    for path in (*folder.iterdir(), *(folder / "labels").glob("*")):
        if path.name not in kept and ours.fullmatch(path.name):
            path.unlink(missing_ok=True)


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
    for name in names or ():
        if not name.strip() or not name.isprintable():
            raise ConfigError(
                f"label {shown(name)} is empty or unprintable; labels are written one line each"
            )
    return names


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of a model by name; one that has two names stands under the first."""
    first: dict[int, str] = {}
    return {
        name: tensor.detach()
        for name, tensor in model.state_dict(keep_vars=True).items()
        if first.setdefault(id(tensor), name) == name
    }


def _described(path: Path) -> File:
    return File(name=path.name, size=path.stat().st_size, sha256=files.sha256_of(path))
