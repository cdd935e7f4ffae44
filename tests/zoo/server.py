"""A web server on the loopback interface that speaks the hub's resolve API, and misbehaves if told.

``/ORG/REPO/resolve/REVISION/FILE`` answers as huggingface.co does: large files by a redirect to
``/cdn/SHA256`` with the headers X-Repo-Commit, X-Linked-Etag and X-Linked-Size, small ones at once.
``/web/FILE`` is an ordinary web server, to be used through TLS. Both know Range and If-Range.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import struct
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"
CERTIFICATE = Path(__file__).with_name("loopback.pem")


@dataclass
class Seen:
    """One request and what was answered, noted as the answer begins."""

    method: str
    path: str
    headers: dict[str, str]
    status: int
    sent: int = 0  # bytes of the body
    ended: bool = True


class Server:
    """Two listeners, plain and TLS, that serve `files` under every name they are asked for.

    `faults[name]` is a queue, for `/web/` that of "web/name": each GET that would be answered with
    bytes takes the next one. One that begins with ``*`` stays.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.faults: defaultdict[str, deque[str]] = defaultdict(deque)
        self.seen: list[Seen] = []
        self.delay = 0.0  # seconds before every body
        self.released = threading.Event()  # ends the answers that hang
        self.large = 1000  # bytes from which the hub answers by a redirect
        self.handler = type("Handler", (_Handler,), {"hub": self})
        self._lock = threading.Lock()
        self._servers = [self._listen(secure) for secure in (False, True)]
        self.http = f"http://127.0.0.1:{self._servers[0].server_port}"
        self.https = f"https://127.0.0.1:{self._servers[1].server_port}"

    def _listen(self, secure: bool) -> ThreadingHTTPServer:
        class Listener(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # clients are killed, and some refuse what they get

        listener = Listener(("127.0.0.1", 0), self.handler)
        if secure:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE)
            listener.socket = context.wrap_socket(
                listener.socket, server_side=True, do_handshake_on_connect=False
            )
        threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True).start()
        return listener

    def close(self) -> None:
        """End all answers and both listeners."""
        self.released.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def note(self, seen: Seen) -> None:
        """Remember a request."""
        with self._lock:
            self.seen.append(seen)

    def fault(self, name: str) -> str:
        """The fault of the next answer."""
        with self._lock:
            waiting = self.faults[name]
            if waiting and waiting[0].startswith("*"):
                return waiting[0][1:]
            return waiting.popleft() if waiting else ""

    def bodies(self) -> list[Seen]:
        """Requests that were answered with bytes of a file, once their answers have ended.

        A client that has all it wants goes on before its server knows; answers that hang are not
        waited for.
        """
        with self._lock:
            bodies = [s for s in self.seen if s.method == "GET" and s.status in (200, 206)]
        limit = time.monotonic() + 5
        while time.monotonic() < limit and not all(seen.ended for seen in bodies):
            time.sleep(0.002)
        return bodies


class _Handler(BaseHTTPRequestHandler):
    hub: Server
    protocol_version = "HTTP/1.0"  # one request a connection

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        """Find the file and the fault, and answer."""
        path = self.path.partition("?")[0]
        parts = path.strip("/").split("/")
        name = parts[-1]
        if parts[0] == "cdn":
            found = [n for n, d in self.hub.files.items() if hashlib.sha256(d).hexdigest() == name]
            name = found[0] if found else name
        if name not in self.hub.files:
            self.plain(404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        data, headers = self.hub.files[name], {"Accept-Ranges": "bytes"}
        digest = hashlib.sha256(data).hexdigest()
        if "resolve" in parts:
            headers["X-Repo-Commit"] = parts[parts.index("resolve") + 1]
            if len(data) >= self.hub.large:
                headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
                self.plain(302, headers | {"Location": f"{self.elsewhere()}/cdn/{digest}"})
                return
        key = f"web/{name}" if parts[0] == "web" else name
        self.body(key, data, {"ETag": f'"{digest[:40]}"', **headers})

    def elsewhere(self) -> str:
        """This very server under its other name, which a client takes for another host."""
        scheme = "https" if isinstance(self.connection, ssl.SSLSocket) else "http"
        return f"{scheme}://localhost:{self.connection.getsockname()[1]}"

    def plain(self, status: int, headers: dict[str, str]) -> None:
        """An answer without a body."""
        self.hub.note(Seen(self.command, self.path, dict(self.headers), status))
        self.send_response(status)
        for key, value in {"Content-Length": "0", **headers}.items():
            self.send_header(key, value)
        self.end_headers()

    def body(self, name: str, data: bytes, headers: dict[str, str]) -> None:
        """Bytes of a file, or what a fault makes of them."""
        fault = self.hub.fault(name) if self.command == "GET" else ""
        if fault.isdigit():
            self.plain(int(fault), {})
            return
        if fault == "elsewhere":
            self.plain(302, {"Location": f"{self.elsewhere()}{self.path}"})
            return
        if fault == "loop":
            self.plain(302, {"Location": self.path})
            return
        if fault == "downgrade":
            self.plain(302, {"Location": f"{self.hub.http}{self.path}"})
            return
        if fault == "file":
            self.plain(302, {"Location": "file:///etc/hostname"})
            return
        if fault == "reset":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()
            return
        if fault == "dead":
            self.hub.released.wait(60)
            return
        if fault == "html":
            data, headers = b"<!DOCTYPE html><html>sign in</html>", {"Content-Type": "text/html"}
        if fault == "changed":  # the file was replaced meanwhile
            headers["ETag"] = '"another"'
        if fault == "weak":
            headers["ETag"] = 'W/"weak"'
        status, start = 200, 0
        wanted, condition = self.headers.get("Range"), self.headers.get("If-Range")
        if wanted and fault != "no-range" and condition in (None, headers.get("ETag")):
            status, start = 206, int(wanted.removeprefix("bytes=").rstrip("-"))
        if start >= len(data) > 0:
            self.plain(416, {"Content-Range": f"bytes */{len(data)}"})
            return
        body = data[start:]
        if status == 206:
            first = 0 if fault == "wrong-range" else start
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        if fault == "flip":
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        length = {"short-length": len(body) - 9, "long-length": len(body) + 9}.get(fault, len(body))
        seen = Seen(self.command, self.path, dict(self.headers), status, ended=False)
        self.hub.note(seen)
        time.sleep(self.hub.delay)
        self.send_response(status)
        if fault not in ("endless", "no-length"):
            headers["Content-Length"] = str(length)
        for key, value in headers.items():
            self.send_header(key, value)
        try:
            self.end_headers()
            if self.command == "GET":
                for piece in self.pieces(body, fault):
                    self.wfile.write(piece)
                    seen.sent += len(piece)
        finally:
            seen.ended = True

    def pieces(self, body: bytes, fault: str):
        """The bytes of a body as they are sent."""
        if fault == "cut":
            yield body[: len(body) // 2]
        elif fault == "stall":
            yield body[: len(body) // 2]
            self.hub.released.wait(60)
        elif fault == "slow":
            for start in range(0, len(body), len(body) // 20 + 1):
                yield body[start : start + len(body) // 20 + 1]
                time.sleep(0.02)
        elif fault == "steady":
            for start in range(0, len(body), 1 << 16):
                yield body[start : start + (1 << 16)]
                time.sleep(0.0005)
        elif fault == "endless":
            while not self.hub.released.is_set():
                yield body
        elif fault == "too-long":
            yield body + b"more"
        else:
            for start in range(0, len(body), 1 << 16):
                yield body[start : start + (1 << 16)]
