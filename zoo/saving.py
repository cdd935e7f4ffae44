"""Write a model as a folder that `zoo.load` and `zoo.pipeline` open."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo import __version__, files, registry, tensorfile
from zoo.cards import Card, Check, File, Weights, parse_card
from zoo.config import build, plain
from zoo.errors import CardError, ConfigError, shown
from zoo.loading import skeleton_of, tied
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
        auxiliary={f.name: find_file(card, f.name) for f in old.auxiliary} if old else {},
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
    _check_model(model, card)
    folder.mkdir(parents=True, exist_ok=True)
    with files.locked(folder):
        state, preprocessing = state_of(model), dict(card.preprocessing)
        digest, size = hashlib.sha256(), 0
        for piece in tensorfile.encoded(state, origin, name=stem):
            digest.update(piece)
            size += memoryview(piece).nbytes
        main = File(
            name=f"{stem}.{digest.hexdigest()[:12]}.safetensors",
            size=size,
            sha256=digest.hexdigest(),
        )
        contents: dict[str, bytes] = {}  # of the small files, by their names
        listed = []
        for name, source in auxiliary.items():
            content = source.read_bytes()
            copy = _named(stem, content, "".join(Path(name).suffixes[-2:]))
            contents[copy.name] = content
            listed.append(copy)
            preprocessing = {k: copy.name if v == name else v for k, v in preprocessing.items()}
        if names:
            text = "\n".join((*names, "")).encode()
            contents[f"labels/{(label_file := _named(stem, text, '.txt').name)}"] = text
        weights = Weights(
            files=(main, *listed),
            licence=licence,
            origin=dict(origin),
            default=True,
            labels=label_file.removesuffix(".txt") if names else None,
            preprocessing=preprocessing,
        )
        count = sum(p.numel() for p in model.parameters())
        saved = replace(card, name=stem, parameters=count, weights={tag: weights}, check=Check())
        written = _read_back(saved)

        pieces = tensorfile.encoded(state, origin, name=main.name)
        files.write_atomically(folder / main.name, _unchanged(pieces, main, card))
        if names:
            (folder / "labels").mkdir(exist_ok=True)
        for name, content in contents.items():
            files.write_atomically(folder / name, content)
        path = folder / f"{stem}.toml"
        signature_path(path).unlink(missing_ok=True)  # of what is replaced now
        files.write_atomically(path, written)
        _remove_others(folder, stem, weights)
    return folder


def _named(stem: str, content: bytes, suffix: str) -> File:
    """A file under a name that no other content has."""
    digest = hashlib.sha256(content).hexdigest()
    return File(name=f"{stem}.{digest[:12]}{suffix}", size=len(content), sha256=digest)


def _unchanged(
    pieces: Iterator[bytes | memoryview], file: File, card: Card
) -> Iterator[bytes | memoryview]:
    """The pieces of a file, and an error in the end if they are not those that were hashed."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
        yield piece
    if digest.hexdigest() != file.sha256:
        raise ConfigError(f"{card.full_name} changed while it was saved; save it again")


def _read_back(card: Card) -> bytes:
    """The card's text, which gives this very card when it is read.

    Raises:
        ConfigError: It does not, whatever the reason.
    """
    try:
        text = card_text(card).encode()
        found = parse_card(text, card.name)
    except (TypeError, ValueError) as error:  # no TOML, or no card: CardError is a ValueError
        reason = error.line if isinstance(error, CardError) else str(error)
        raise ConfigError(f"this cannot be saved: {reason}") from error
    one, other = plain(found), plain(card)
    if changed := [key for key in one | other if one.get(key) != other.get(key)]:
        raise ConfigError(f"this cannot be saved: {', '.join(changed)} of its card would change")
    return text


def _remove_others(folder: Path, stem: str, weights: Weights) -> None:
    """Remove what earlier saves left: files of this model that its card does not name.

    Only names and suffixes that `save` writes; a file that the user put beside them stays.
    """
    kept = {file.name for file in weights.files} | {f"{weights.labels}.txt"}
    suffixes = {".safetensors"} | {file.name[len(stem) + 13 :] for file in weights.files}
    hashed = re.compile(rf"{re.escape(stem)}\.[0-9a-f]{{12}}(\..+)")
    for place, ours in ((folder, suffixes), (folder / "labels", {".txt"})):
        for path in place.glob(f"{stem}.*"):
            found = hashed.fullmatch(path.name)
            if found and found[1] in ours and path.name not in kept:
                path.unlink(missing_ok=True)


def card_text(card: Card) -> str:
    """A card as TOML; values equal to their defaults are left out."""
    import tomlkit

    table = {key: value for key, value in plain(card).items() if value != {}}
    return tomlkit.dumps(table)


def write_document(path: Path, document: Any) -> None:
    """Write an edited card: its lines as they were, and a blank one before every new table."""
    import tomlkit

    text = re.sub(r"^([^#\n].*\n)(?=\[)", r"\1\n", tomlkit.dumps(document), flags=re.MULTILINE)
    files.write_atomically(path, text.encode())


def _check_model(model: nn.Module, card: Card) -> None:
    """Refuse a model that was rebuilt by hand: its card would not build it again."""
    cls = registry.symbol(card.model, card)
    with skeleton_of():
        built = cls(
            build(registry.config_class(cls, card), card.config, where=card.name)
        ).state_dict(keep_vars=True)
    own = model.state_dict(keep_vars=True)
    for name in dict.fromkeys((*own, *built)):
        here, there = _forms(own.get(name), built.get(name))
        if here != there:
            raise ConfigError(
                f"{name} is {here} here and {there} in the configuration of {card.name}; change "
                "models by zoo.load(…, num_classes=…)"
            )
    one, other = tied(own), tied(built)
    for name in own:
        if one[name] != other[name]:
            pair = one[name] if one[name] != name else other[name]
            raise ConfigError(
                f"{name} and {pair} are {'one tensor' if pair == one[name] else 'two tensors'} "
                f"here and not in the configuration of {card.name}; separate or tie them as it does"
            )


def _forms(*tensors: Tensor | None) -> list[str]:
    """Shapes, which tell tensors apart; of equal ones the kind of number, as widths may change."""
    shapes = ["absent" if t is None else str(tuple(t.shape)) for t in tensors]
    if shapes[0] != shapes[1]:
        return shapes
    kept = [t for t in tensors if t is not None]
    return ["floating-point" if t.is_floating_point() else str(t.dtype)[6:] for t in kept]


def _labels(card: Card, labels: Sequence[str] | None) -> tuple[str, ...] | None:
    if isinstance(labels, str | dict) or not all(isinstance(n, str) for n in labels or ()):
        raise ConfigError(f"labels is {shown(labels)}; it takes a list of names, one a class")
    names = tuple(labels) if labels is not None else card.labels
    classes = card.config.get("num_classes")
    if names is not None and classes is not None and len(names) != classes:
        raise ConfigError(f"{len(names)} labels for {classes} classes; give one a class")
    for name in names or ():
        if not is_label(name):
            raise ConfigError(
                f"label {shown(name)} is empty or unprintable; labels are written one line each"
            )
    return names


def is_label(name: str) -> bool:
    """True for a text of one line without control characters.

    Spaces of every kind are fine, and so are the two joiners, which Persian and Hindi need.
    """
    letters = name.replace("\u200c", "").replace("\u200d", "")
    return bool(letters.strip()) and all(
        letter.isprintable() or unicodedata.category(letter) == "Zs" for letter in letters
    )


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of a model by name; one that has two names stands under the first."""
    state = model.state_dict(keep_vars=True)
    first = tied(state)
    return {name: tensor.detach() for name, tensor in state.items() if first[name] == name}
