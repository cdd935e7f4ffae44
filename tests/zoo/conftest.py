"""A web server, and a zoo of small models whose weights lie on it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import zoo
from zoo import cards, download, tensorfile

from .server import CERTIFICATE, REVISION, Server

CARD = """
model = "vision.resnet:ResNet"
task = "vision.tasks:ImageClassification"
summary = "A small network for tests."
paper = "https://arxiv.org/abs/1512.03385"
parameters = 77_000
head = ["fc"]
[config]
block = "basic"
depths = [1, 1, 1, 1]
width = 4
num_classes = 10
[inputs.image]
dtype = "float32"
shape = ["batch", 3, "height", "width"]
[outputs.logits]
dtype = "float32"
shape = ["batch", "num_classes"]
"""
# The least that a card says, and weights that are not there.
GOOD = """
model = "vision.resnet:ResNet"
task = "vision.tasks:ImageClassification"
summary = "A small net."
paper = "https://example.org"
parameters = 10
head = ["fc"]
[config]
depths = [1, 1, 1, 1]
[inputs.image]
dtype = "float32"
shape = ["batch", 3, "height", "width"]
example = { batch = 2, height = 8, width = 8 }
[outputs.logits]
dtype = "float32"
shape = ["batch", "num_classes"]
[weights.one]
licence = "MIT"
files = [{ name = "a.safetensors", size = 10, sha256 = "HASH" }]
""".replace("HASH", "0" * 64)
PREPROCESSING = (
    '{ size = 32, resize = "shorter", crop = 32, interpolation = "bilinear", antialias = true, '
    "mean = [0.5, 0.5, 0.5], std = [0.5, 0.5, 0.5] }"
)


@pytest.fixture(scope="session")
def _server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    config = {"width": 4, "num_classes": 10, "depths": (1, 1, 1, 1)}
    return dict(zoo.load("resnet18", **config).state_dict())


@dataclass
class House:
    """Where everything lies: the server, the cards, the cache."""

    server: Server
    cards: Path
    home: Path
    tensors: dict[str, torch.Tensor]

    def card(self, name: str, tag: str, **parts: str) -> None:
        """Write a card with one set of weights; `parts` are TOML values."""
        table = {"licence": '"MIT"', "preprocessing": PREPROCESSING, **parts}
        lines = [CARD, f"[weights.{tag}]", *(f"{key} = {value}" for key, value in table.items())]
        (self.cards / f"{name}.toml").write_text("\n".join(lines))

    def publish(self, name: str, data: bytes) -> str:
        """Put a file on the server; gives its hash."""
        self.server.files[name] = data
        return hashlib.sha256(data).hexdigest()

    def file(self, name: str, upstream: str) -> str:
        """What a card says of a published file."""
        data = self.server.files[upstream]
        digest = hashlib.sha256(data).hexdigest()
        return (
            f'{{ name = "{name}", upstream = "{upstream}", size = {len(data)}, '
            f'sha256 = "{digest}" }}'
        )

    @property
    def hub(self) -> str:
        """The server as a source of kind hub."""
        return f'{{ kind = "hub", repo = "org/repo", revision = "{REVISION}" }}'

    @property
    def web(self) -> str:
        """The server as a source of kind https."""
        return f'{{ kind = "https", url = "{self.server.https}/web/" }}'

    def left(self) -> list[str]:
        """Names of everything in the cache that is not a finished file."""
        return sorted(
            str(path.relative_to(self.home))
            for path in self.home.rglob("*")
            if not path.is_dir()
            and path.parts[len(self.home.parts)] not in ("blobs", "refs", "records")
        )

    def blobs(self) -> dict[str, str]:
        """Name and real hash of everything that the cache keeps."""
        return {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in self.home.glob("blobs/*/*")
        }


@pytest.fixture
def house(
    _server: Server,
    _tensors: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[House]:
    """The models ``tiny.v1`` (hub, then https) and an empty cache; the network is allowed."""
    for name in ("ZOO_OFFLINE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HF_ENDPOINT", _server.http)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(download, "PAUSES_S", (0.01, 0.01))
    folder = tmp_path / "cards"
    folder.mkdir()
    monkeypatch.setattr(cards, "CARDS", folder)
    _server.seen.clear()
    _server.files.clear()
    _server.faults.clear()
    _server.delay = 0.0
    made = House(_server, folder, tmp_path / "home", _tensors)
    tensorfile.write(tmp_path / "x", _tensors)
    made.publish("model.safetensors", (tmp_path / "x").read_bytes())
    made.publish("words.json", json.dumps({"words": ["a", "b"]}).encode())
    listed = f"[{made.file('tiny.v1.safetensors', 'model.safetensors')}, "
    listed += f"{made.file('tiny.v1.words.json', 'words.json')}]"
    made.card("tiny", "v1", files=listed, sources=f"[{made.hub}, {made.web}]")
    yield made
    _server.released.set()
    _server.released.clear()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent connection is given up soon."""
    monkeypatch.setattr(download, "TIMEOUT_S", 0.5)
