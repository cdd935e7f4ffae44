"""Fetch weights that were asked for by their tag: once, by hash, into the cache.

A file comes from the first source of its card that gives the bytes whose SHA-256 the card pins: the
Hugging Face hub at a pinned commit, or https. Addresses and tokens are `huggingface_hub`'s, the
bytes come through `zoo.download`. Every source that fails is named, even if a later one succeeds.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from zoo import __version__, cache, cards
from zoo.cards import Card, File, Source
from zoo.download import SourceError, Wanted, download
from zoo.errors import UnknownModelError, WeightsError, WeightsUnavailableError
from zoo.progress import Meter
from zoo.weights import (
    Stored,
    Verify,
    convert_into_cache,
    locate,
    missed,
    open_weights,
    weights_of,
)

HEADROOM = 64 << 20  # bytes that an upstream file may have beyond those of its parameters

log = logging.getLogger(__name__)


def pull(name: str, *, verify: Verify = "auto", progress: bool = True) -> list[Path]:
    """Fetch the files of a set of weights that are not installed, and verify all of them.

    Args:
        name: A model with a tag; without one, its default weights or the only ones it has.
        verify: "auto" trusts a file that was hashed before and not touched since; "always" hashes.
        progress: Show what is done, on stderr.

    Returns:
        Paths of the verified files, in the order of the card.

    Raises:
        UnknownModelError: No such name or tag, or several tags and no default.
        WeightsUnavailableError: No network is wanted (``ZOO_OFFLINE=1``), or no source has a file.
        WeightsError: A source has other bytes than the card says.
        CacheError: The cache cannot be written, or the disk is full.
    """
    return pull_card(_chosen(name), verify=verify, progress=progress)[0]


def open_or_pull(card: Card, *, verify: Verify = "auto") -> Stored:
    """The tensors of weights that a caller asked for by their tag; what is not there is fetched.

    Raises:
        WeightsError: As `zoo.weights.open_weights` and `pull`.
    """
    may_fetch = bool(_downloads(card)) and not offline()
    notes: list[str] = []
    try:
        stored = open_weights(card, verify=verify)
    except WeightsError as error:
        if not may_fetch:
            raise _not_fetched(card, weights_of(card).files[0], error) from None
        notes += [] if isinstance(error, WeightsUnavailableError) else [error.line]
        notes += pull_card(card, verify=verify)[1]
        stored = open_weights(card)
    for file in weights_of(card).files[1:]:
        try:
            locate(card, file, verify=verify)
        except WeightsError:
            if may_fetch:  # else it is missed by what needs it, which the model does not
                notes += pull_card(card, verify=verify)[1]
    return replace(stored, notes=tuple(dict.fromkeys((*notes, *stored.notes))))


def pull_card(
    card: Card, *, verify: Verify = "auto", progress: bool = True
) -> tuple[list[Path], list[str]]:
    """What `pull` does, for a card with a tag; also gives what was wrong on the way."""
    cache.sweep()
    listed = weights_of(card).files
    paths: list[Path | None] = []
    notes: list[str] = []
    for file in listed:
        try:
            path, broken = locate(card, file, verify=verify)
        except WeightsError as error:
            paths.append(None)
            notes += [] if isinstance(error, WeightsUnavailableError) else [error.line]
        else:
            paths.append(path)
            notes += broken
    for note in notes:
        log.warning("%s", note)
    for index, file in enumerate(listed):
        if paths[index] is None:
            paths[index], failures = fetch(card, file, verify=verify, progress=progress)
            notes += failures
    return [path for path in paths if path], notes


def offline() -> bool:
    """True where the user wants no network: ``ZOO_OFFLINE=1`` or ``HF_HUB_OFFLINE=1``."""
    given = (os.environ.get(name, "").lower() for name in ("ZOO_OFFLINE", "HF_HUB_OFFLINE"))
    return not {"1", "true", "yes", "on"}.isdisjoint(given)


def _chosen(name: str) -> Card:
    card = cards.card(name)
    tags = list(card.weights)
    tag = card.tag or card.default_tag or (tags[0] if len(tags) == 1 else None)
    if tag is None:
        known = ", ".join(f"{card.name}.{tag}" for tag in tags) or "none"
        raise UnknownModelError(f"{card.name} has no default weights; name those to pull: {known}")
    return card if card.tag else card.with_tag(tag)


def _downloads(card: Card) -> list[Source]:
    return [source for source in weights_of(card).sources if source.kind != "package"]


def _not_fetched(card: Card, missing: File, error: WeightsError) -> WeightsError:
    """The error where nothing may be fetched: what to put where instead."""
    sources = _downloads(card)
    if not sources:
        return error
    listed = weights_of(card).files
    details = [*error.details, "what to put into a folder named in ZOO_WEIGHTS, without a network:"]
    for file in listed:
        for source in sources:
            with suppress(SourceError):
                details.append(f"{_by_hand(file)} from {_url(source, file)}")
    if not isinstance(error, WeightsUnavailableError):
        return WeightsError(error.line, *details)
    return WeightsUnavailableError(
        f"{missed(card, missing)}, and ZOO_OFFLINE keeps zoo pull from the network; put "
        f"{_by_hand(missing)} into a folder named in ZOO_WEIGHTS",
        *details,
    )


def _by_hand(file: File) -> str:
    """What a file is called where a user puts it."""
    return (file.upstream or "").rpartition("/")[2] if cache.is_converted(file) else file.name


def fetch(
    card: Card, file: File, *, verify: Verify = "auto", progress: bool = True
) -> tuple[Path, list[str]]:
    """Fetch one file into the cache; gives its path and which sources failed before.

    Raises:
        WeightsError: As `pull`.
    """
    sources = _downloads(card)
    if offline() or not sources:
        try:
            return locate(card, file, verify=verify)[0], []
        except WeightsError as error:
            raise _not_fetched(card, file, error) from None
    key, before, failures = cache.key(card, file), _state(card, file), list[str]()
    meter = Meter(file.name, wanted=progress)
    with cache.locked(key, until=lambda: _state(card, file) != before, say=meter.say):
        with suppress(WeightsError):  # another process was quicker
            return locate(card, file, verify=verify)[0], []
        with cache.Partial(key) as partial:
            partial.resume()
            for source in sources:
                try:
                    return _from_source(card, file, source, partial, meter), failures
                except SourceError as error:
                    failures.append(f"{source.text}: {error}")
                    if source is not sources[-1]:  # else the error below says it
                        log.warning("%s from %s", file.name, failures[-1])
            partial.keep()
    raise WeightsUnavailableError(
        f"{card.full_name}: cannot fetch {file.name} from {failures[0]}", *failures[1:]
    )


def _state(card: Card, file: File) -> object:
    """Changes when a file of the cache is published."""
    with suppress(OSError):
        if kept := cache.kept(card, file):
            found = cache.blob(kept.sha256).stat()
            return kept.sha256, found.st_ino, found.st_mtime_ns
    return None


def _from_source(
    card: Card, file: File, source: Source, partial: cache.Partial, meter: Meter
) -> Path:
    """Fetch, verify and publish a file from one source."""
    converted = cache.is_converted(file)
    size = None if converted else file.size
    # Of a pickle only the parameters are known: 8 bytes each at most, and room for the rest.
    limit = HEADROOM + 8 * card.parameters if size is None else size
    download(
        Wanted(
            url=_url(source, file),
            headers=_headers(source),
            sha256=(file.upstream_sha256 if converted else file.sha256) or "",
            size=size,
            limit=limit,
            revision=source.revision,
        ),
        partial,
        meter,
    )
    if not converted:
        return partial.publish(partial.digest())
    with cache.folder() as folder:
        upstream = folder / _by_hand(file)
        partial.move(upstream)
        return convert_into_cache(card, file, upstream)


def _url(source: Source, file: File) -> str:
    name = file.upstream or file.name
    if source.kind == "https":
        return f"{source.url}{quote(name)}"
    from huggingface_hub import hf_hub_url

    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    try:
        return hf_hub_url(str(source.repo), name, revision=source.revision, endpoint=endpoint)
    except ValueError as error:
        raise SourceError(f"is no repository of the hub: {error}") from None


def _headers(source: Source) -> dict[str, str]:
    """Who asks, and the user's token for the hub.

    `huggingface_hub.utils.build_hf_headers` would ask the hub something first, from version 2 on.
    """
    headers = {"User-Agent": f"refzoo/{__version__}"}
    if source.kind == "hub":
        from huggingface_hub import get_token

        if token := get_token():
            headers["Authorization"] = f"Bearer {token}"
    return headers
