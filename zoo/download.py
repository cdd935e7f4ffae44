"""Bytes over HTTP into the cache: resumed, limited in size and waiting, never trusted.

Nothing but the hash decides whether a file is right. What a server says of it (length, commit, the
hub's own hash) only ends a download early. No redirect leads from https to http, and a token is
shown to no other server than the one it is for.
"""

from __future__ import annotations

import random
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from zoo import cache
from zoo.errors import shown
from zoo.progress import Meter

PAUSES_S = (0.5, 2.0)  # before the second try of one source, and before the third and last
TIMEOUT_S = 20.0  # until a silent connection is given up
SLOWEST = 1024  # bytes a second: a connection that is slower over a window counts as dead
WINDOW_S = 60.0
CHUNK = 1 << 18
PASSING = {408, 416, 425, 429, 500, 502, 503, 504}  # states that may be gone at the next try


class SourceError(Exception):
    """Why a source does not give a file, in a few words; another try would not help."""


class _BrokenOffError(SourceError):
    """Why a try came to nothing; the next one may succeed."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A file to fetch, and what must be true of it."""

    url: str
    sha256: str  # or its first digits
    size: int | None  # bytes
    limit: int  # bytes that are taken at most; the size, where that is known
    headers: Mapping[str, str] = field(default_factory=dict)
    revision: str | None = None  # the commit that the hub must answer with


def download(wanted: Wanted, partial: cache.Partial, meter: Meter) -> None:
    """Complete a partial file, in several tries; afterwards it has the hash that is wanted.

    Raises:
        SourceError: This source does not give it; what came of it so far is in `partial`.
        CacheError: The cache cannot be written, or the disk is full.
    """
    for pause in (*PAUSES_S, None):
        try:
            with meter:
                if not _is_whole(wanted, partial):
                    _request(wanted, partial, meter)
                _check_hash(wanted, partial)
            return
        except _BrokenOffError as error:
            if pause is None:
                raise SourceError(f"{error} ({len(PAUSES_S) + 1} tries)") from None
            if partial.size:  # of what never began, the error in the end says enough
                meter.say(f"{error}; trying again")
            time.sleep(pause * random.uniform(0.8, 1.2))


def _is_whole(wanted: Wanted, partial: cache.Partial) -> bool:
    """True if an earlier process fetched everything and was killed before it could publish."""
    return partial.size > 0 and partial.digest().startswith(wanted.sha256)


def _check_hash(wanted: Wanted, partial: cache.Partial) -> None:
    digest = partial.digest()
    if not digest.startswith(wanted.sha256):
        partial.discard()
        raise _BrokenOffError(
            f"the bytes have sha256 {digest[:12]}…, and the card says {wanted.sha256[:12]}…"
        )


def _request(wanted: Wanted, partial: cache.Partial, meter: Meter) -> None:
    """Ask for the bytes that are missing and take them."""
    try:
        with _answer(wanted, partial) as response:
            _check_hub(wanted, response.headers)
            _receive(wanted, response, partial, meter)
    except HTTPError as error:
        if error.code == 416:  # what is here is no beginning of what is there
            partial.discard()
        if error.code < 400:
            raise SourceError("redirects in a circle, or to what is no web address") from None
        said = error.headers.get("X-Error-Message") or error.reason
        kind = _BrokenOffError if error.code in PASSING else SourceError
        raise kind(f"HTTP {error.code} {said}".strip()) from None
    except (OSError, HTTPException) as error:
        raise _network_fault(error) from None


def _answer(wanted: Wanted, partial: cache.Partial) -> HTTPResponse:
    """The answer to a request for the bytes that are missing."""
    request = Request(wanted.url, headers={**wanted.headers, "Accept-Encoding": "identity"})
    if partial.size and partial.etag:
        request.add_header("Range", f"bytes={partial.size}-")
        request.add_header("If-Range", partial.etag)
    secure = HTTPSHandler(context=ssl.create_default_context())
    response: HTTPResponse = build_opener(_Redirects(wanted), secure).open(
        request, timeout=TIMEOUT_S
    )
    return response


class _Redirects(HTTPRedirectHandler):
    """Follows no redirect from https to http, and shows the token to no other host."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme != "https" and (new.scheme, old.scheme) != ("http", "http"):
            raise SourceError(f"redirects to {shown(newurl)}, which is not https")
        _check_hub(self.wanted, headers)  # the hub says most where it sends us on
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and (old.scheme, old.netloc) != (new.scheme, new.netloc):
            request.remove_header("Authorization")
        return request


def _check_hub(wanted: Wanted, headers: Message) -> None:
    """Compare what the hub says of a file with the card, before a byte of it is fetched."""
    if wanted.revision is None:
        return
    commit = headers.get("X-Repo-Commit", wanted.revision)
    if commit != wanted.revision:
        raise SourceError(f"answers with commit {shown(commit)}, not {wanted.revision}")
    etag = headers.get("X-Linked-Etag", "").strip('"')
    if len(etag) == 64 and not etag.startswith(wanted.sha256):
        raise SourceError(f"has sha256 {etag[:12]}…, and the card says {wanted.sha256[:12]}…")


def _receive(wanted: Wanted, response: HTTPResponse, partial: cache.Partial, meter: Meter) -> None:
    """Take the body of an answer, as long as it can be what is wanted."""
    total = _begin(response, partial)
    if total is not None and (total > wanted.limit or wanted.size not in (None, total)):
        page = ", an HTML page" if "html" in response.headers.get("Content-Type", "") else ""
        rule = f"and the card says {wanted.size:,}" if wanted.size else f"over {wanted.limit:,}"
        raise SourceError(f"has {total:,} bytes{page}, {rule}")
    cache.make_room((total or wanted.size or 0) - partial.size)
    meter.start(total, partial.size)
    began, before = time.monotonic(), partial.size
    while chunk := response.read1(CHUNK):
        if partial.size + len(chunk) > wanted.limit:
            partial.discard()  # nothing of an answer without an end is the file's beginning
            raise SourceError(f"goes on after {wanted.limit:,} bytes, where it should end")
        partial.write(chunk)
        meter.advance(len(chunk))
        if (passed := time.monotonic() - began) > WINDOW_S:
            if partial.size - before < SLOWEST * passed:
                raise _BrokenOffError(f"gave fewer than {SLOWEST:,} bytes a second")
            began, before = time.monotonic(), partial.size
    if partial.size < (total or wanted.size or 0):
        raise _BrokenOffError(f"ended after {partial.size:,} of {total or wanted.size:,} bytes")


def _begin(response: HTTPResponse, partial: cache.Partial) -> int | None:
    """Continue a download, or begin it anew, as the answer says; gives the size of the file."""
    if response.status == 206:
        text = response.headers.get("Content-Range", "")
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", text)
        if not found or int(found[1]) != partial.size:
            partial.discard()
            raise _BrokenOffError(f"answers with {shown(text)}, not the bytes asked for")
        return int(found[2])
    partial.begin(response.headers.get("ETag"))
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


def _network_fault(error: OSError | HTTPException) -> SourceError:
    """What a connection that failed means for the next try."""
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return SourceError(f"its certificate is not trusted: {reason.verify_message}")
    if isinstance(reason, TimeoutError):
        return _BrokenOffError(f"was silent for {TIMEOUT_S:g} s")
    said = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return _BrokenOffError(f"the connection failed: {said}")
