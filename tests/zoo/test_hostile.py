"""Hostile names, archives, cards, pickles and configs: nothing outside is written, nothing runs.

Two watchers prove it: the tree around the only folder that may change is compared before and after,
and an audit hook of the interpreter sees every file that is opened for writing, every process and
every connection, here and in the process that reads pickles.
"""

from __future__ import annotations

import builtins
import codecs
import functools
import importlib
import io
import json
import marshal
import operator
import os
import pathlib
import pickle
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from zoo import convert, importing
from zoo.errors import CardError, ConfigError, UnknownModelError, WeightsError, ZooError

SMALL = {"width": 8, "num_classes": 3}
TINY = {"num_layers": 1, "embed_dim": 4, "num_heads": 1, "mlp_dim": 4, "vocab_size": 6}

# --- The watchers -------------------------------------------------------------------------------

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {
    "os.mkdir": (0,), "os.rename": (0, 1), "os.remove": (0,), "os.rmdir": (0,), "os.link": (1,),
    "os.symlink": (1,), "os.truncate": (0,), "os.chmod": (0,), "os.utime": (0,),
}  # fmt: skip
FOLLOWING = {"open", "os.truncate", "os.chmod", "os.utime"}  # the others change an entry
RUNS = {
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn", "webbrowser.open",
    "socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request", "subprocess.Popen",
}  # fmt: skip


class Watcher:
    """Notes what the interpreter does outside of one folder, while it is switched on."""

    def __init__(self) -> None:
        self.allowed: str | None = None
        self.seen: list[str] = []
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is None:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, str | bytes) and flags & WRITES:
                self.note(event, path)
        elif event in CHANGES:
            for index in CHANGES[event]:
                self.note(event, arguments[index])
        elif event in RUNS:
            self.seen.append(f"{event} {arguments!r:.200}")

    def note(self, event: str, path: Any) -> None:
        if isinstance(path, int):
            return
        folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        full = os.path.join(os.path.realpath(folder), name)
        if event in FOLLOWING:
            full = os.path.realpath(full)
        if not f"{full}/".startswith(f"{self.allowed}/") and full != os.devnull:
            self.seen.append(f"{event} {full}")


WATCHER = Watcher()


class World:
    """A tree of folders of which only `inside` may change."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.inside, self.outside = self.root / "inside", self.root / "outside"
        for folder in (self.inside / "work", self.inside / "tmp", self.outside / "labels"):
            folder.mkdir(parents=True)
        self.secret = self.outside / "secret.txt"
        self.secret.write_text("secret\nwords\nhere\n")
        self.mark = self.outside / "mark"

    def picture(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for path in sorted(self.root.rglob("*")):
            if not path.is_relative_to(self.inside):
                status = path.lstat()
                held = path.read_bytes() if path.is_file() else b""
                found[str(path)] = (held, status.st_mode, status.st_mtime_ns, status.st_nlink)
        return found

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What the block does leaves no trace outside."""
        before = self.picture()
        WATCHER.seen.clear()
        WATCHER.allowed = str(self.inside)
        try:
            yield
        finally:
            WATCHER.allowed = None
        assert WATCHER.seen == []
        assert self.picture() == before
        assert not self.mark.exists()


READER = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from test_hostile import Watcher
from zoo import convert
watcher = Watcher()
for line in sys.stdin:
    source, tensors, report = map(Path, json.loads(line))
    if (child := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        watcher.allowed = os.path.realpath(tensors.parent)
        status = 1
        try:
            convert._child(source, tensors, report)
            status = 0
        finally:
            os._exit(77 if watcher.seen else status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def reader() -> Iterator[Callable[[Path, Path, Path], str]]:
    """Stands in for `convert._run_child`: forks instead of importing torch for every file."""
    process = subprocess.Popen(
        [sys.executable, "-c", READER, str(Path(__file__).parent)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def read(source: Path, tensors: Path, report: Path) -> str:
        print(json.dumps([str(source), str(tensors), str(report)]), file=process.stdin, flush=True)
        status = int(process.stdout.readline())
        assert status != 77, f"{source.name} did something in the process that read it"
        return f"the reading process ended with status {status}"

    yield read
    process.stdin.close()
    process.wait()


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Callable[[Path, Path, Path], str]
) -> World:
    made = World(tmp_path / "world")
    monkeypatch.chdir(made.inside / "work")
    monkeypatch.setattr(tempfile, "tempdir", str(made.inside / "tmp"))
    monkeypatch.setattr(convert, "_run_child", reader)
    monkeypatch.setenv("ZOO_HOME", str(made.inside / "home"))
    monkeypatch.setenv("HOME", str(made.outside))
    return made


def test_the_watchers_see_what_they_watch_for(world: World) -> None:
    def write_outside() -> None:
        (world.outside / "x").write_text("")

    def link_outside() -> None:
        (world.outside / "link").symlink_to("x")

    def write_through_a_link() -> None:
        (world.inside / "way").symlink_to(world.outside)
        (world.inside / "way" / "y").write_text("")

    def run() -> None:
        subprocess.run(["true"], check=True)

    for act in (write_outside, link_outside, write_through_a_link, run):
        with pytest.raises(AssertionError), world.watched():
            act()
    with world.watched():
        (world.inside / "z").write_text(world.secret.read_text())
    with pytest.raises(AssertionError, match="did something"):
        convert._run_child(world.inside / "none", world.inside / "t", world.outside / "report")


# --- Names --------------------------------------------------------------------------------------

NAMES: list[Any] = [
    "", ".", "..", "/", "../x", "../../outside/secret", "/etc/passwd", "a/../../b", "a//b", "a/b/c",
    "..\\x", "C:\\x", "C:x", "\\\\host\\share", "x\0y", "x\ny", "resnet18\n", " resnet18",
    "resnet18 ", "resnet18.", "resnet18..", "resnet18.../x", "resnet18.tag.tag", "Resnet18",
    "~root", "$HOME", "%TEMP%", "con", "nul", "aux.txt", "-v", "--out", "resnet18;touch mark",
    "$(touch mark)", "`touch mark`", "http://127.0.0.1/x", "file:///etc/passwd", "hf://a/b",
    "\N{FULLWIDTH LATIN SMALL LETTER R}esnet18", "resnet\N{ZERO WIDTH SPACE}18",
    "resnet1\N{ARABIC-INDIC DIGIT EIGHT}", "r\N{CYRILLIC SMALL LETTER IE}snet18", "\udc80",
    "resnet18\N{RIGHT-TO-LEFT OVERRIDE}", "x" * 300, "x" * 100_000, "{0.__class__}", "%s%n",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:40])
def test_a_hostile_name_is_no_model(name: Any, world: World) -> None:
    source = world.inside / "work" / "w.safetensors"
    source.write_bytes(b"")
    with world.watched():
        for act in (zoo.card, zoo.list_weights, zoo.load, zoo.pipeline, zoo.preprocess):
            with pytest.raises(UnknownModelError) as raised:
                act(name)
            assert len(raised.value.line) <= 200
            assert raised.value.line.isprintable() or "\udc80" in str(name)
        with pytest.raises(UnknownModelError):
            importing.convert(source, name)
        with pytest.raises(ZooError):
            zoo.load("resnet18", pretrained=name)
    assert os.listdir(world.inside / "work") == ["w.safetensors"]


# --- Cards --------------------------------------------------------------------------------------

FILE = 'name = "resnet18.saved.safetensors"'
LABELS = 'labels = "resnet18.saved"'
TAG = "[weights.saved]"
MODEL, TASK = 'model = "vision.resnet:ResNet"', 'task = "vision.tasks:ImageClassification"'


def source(kind: str, **fields: str) -> str:
    inner = ", ".join(f"{key} = {json.dumps(value)}" for key, value in fields.items())
    return f'sources = [{{ kind = "{kind}", {inner} }}]\n{LABELS}'


CARDS = [  # what stands on a card, and what takes its place
    *(
        (FILE, f"name = {json.dumps(name)}")
        for name in (
            "../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "",
            "..\\x.safetensors", "C:x.safetensors", "x\0.safetensors", "x\n.safetensors",
            "con.safetensors", "NUL", "lpt1.txt", "x." , "x" * 300 + ".safetensors", "-rf", "~x",
            ".tmp-1-x", "..\N{DIVISION SLASH}x", "\N{FULLWIDTH FULL STOP}\N{FULLWIDTH FULL STOP}",
        )
    ),
    *((FILE, f'{FILE}\nupstream = "{path}"') for path in ("../x", "/etc/passwd", "a/../../b")),
    *(
        (LABELS, f"labels = {json.dumps(name)}")
        for name in ("../../outside/secret", "/etc/passwd", "a/b", "..", "x\0", "con")
    ),
    *((LABELS, f'{LABELS}\ngolden = "{name}"') for name in ("../g.safetensors", "/srv/g", "a/b")),
    *((TAG, f"[weights.{json.dumps(tag)}]") for tag in ("../x", "a/b", "..", "a b", "x\n")),
    *(
        (LABELS, source("package", name="x", path=path))
        for path in ("../x", "/etc", "os/../../x", "x//y", ".", "x\\y")
    ),
    *((LABELS, source("https", url=url)) for url in ("file:///etc/", "http://h/", "https://h", "")),
    (LABELS, source("hub", repo="a/b", revision="main")),
    (LABELS, source("hub", repo="a/b", revision="../" * 13 + "x")),
    *(
        (old, f'{old.split(" =")[0]} = "{target}"')
        for old in (MODEL, TASK)
        for target in (
            "os:system", "subprocess:Popen", "builtins:exec", "antigravity:geohash",
            "runpy:run_path", "zoo.__main__:main", "webbrowser:open", "../evil:X", "evil;x:Y",
            "evil:X.__init__", "os", "idlelib.idle:x", "pip.__main__:main",
        )
    ),
    (LABELS, f'{LABELS}\nmodel = "os:system"'),
    (LABELS, f'{LABELS}\ntask = "posix:system"'),
]  # fmt: skip


def saved_folder(folder: Path) -> Path:
    return zoo.save(zoo.load("resnet18", **SMALL), folder, labels=["a", "b", "c"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_folder(tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize(("old", "new"), CARDS, ids=lambda text: ascii(text)[:50])
def test_a_hostile_card_is_refused(old: str, new: str, world: World, saved: Path) -> None:
    folder = Path(shutil.copytree(saved, world.inside / "work" / "model"))
    card = folder / "resnet18.toml"
    text = card.read_text("utf-8")
    digits = re.search(r'labels = "resnet18\.([0-9a-f]{12})"', text)
    assert digits
    text = text.replace(f'labels = "resnet18.{digits[1]}"', LABELS)
    weights = next(folder.glob("*.safetensors"))
    text = text.replace(f'name = "{weights.name}"', FILE)
    weights.rename(folder / "resnet18.saved.safetensors")
    (folder / "labels" / f"resnet18.{digits[1]}.txt").rename(folder / "labels/resnet18.saved.txt")
    assert old in text
    card.write_text(text.replace(old, new, 1), "utf-8")
    before = sorted(folder.rglob("*"))
    modules = set(sys.modules)
    with world.watched():
        for act in (zoo.load, zoo.pipeline, zoo.preprocess):
            with pytest.raises(CardError) as raised:
                act(folder)
            assert len(raised.value.line) <= 200
            assert raised.value.line.isprintable()
    assert sorted(folder.rglob("*")) == before
    assert not {"antigravity", "idlelib.idle", "pip.__main__"} & (set(sys.modules) - modules)


def test_code_beside_a_card_is_not_imported(world: World, saved: Path) -> None:
    folder = Path(shutil.copytree(saved, world.inside / "work" / "model"))
    for name in ("evil.py", "sitecustomize.py", "conftest.py", "__init__.py", "vision.py"):
        (folder / name).write_text(f"open({str(world.mark)!r}, 'w')")
    (folder / "evil.pth").write_text(f"import os; open({str(world.mark)!r}, 'w')")
    card = folder / "resnet18.toml"
    with world.watched():
        zoo.load(folder)
    card.write_text(card.read_text("utf-8").replace("vision.resnet:ResNet", "evil:Evil"), "utf-8")
    with world.watched(), pytest.raises(CardError, match="'evil', which is neither"):
        zoo.load(folder)


def linked_labels(folder: Path, world: World) -> None:
    shutil.rmtree(folder / "labels")
    (folder / "labels").symlink_to(world.outside / "labels")


def linked(name: str) -> Callable[[Path, World], None]:
    def make(folder: Path, world: World) -> None:
        path = next(folder.glob(name), folder / name)
        path.unlink(missing_ok=True)
        path.symlink_to(world.secret)

    return make


def hard_linked(folder: Path, world: World) -> None:
    path = next(folder.glob("*.safetensors"))
    path.unlink()
    os.link(world.secret, path)


SAVING = {
    "the labels lie behind a link": linked_labels,
    "the weights are a link": linked("*.safetensors"),
    "the card is a link": linked("resnet18.toml"),
    "the signature is a link": linked("resnet18.toml.sig"),
    "the labels are a link": linked("labels/*.txt"),
    "the weights are a hard link": hard_linked,
}


@pytest.mark.parametrize("trap", SAVING)
def test_saving_and_converting_into_a_trap_writes_through_no_link(
    trap: str, world: World, saved: Path
) -> None:
    model = zoo.load(saved)
    original = next(saved.glob("*.safetensors"))
    for name, act in (
        ("save", lambda folder: zoo.save(model, folder)),
        ("convert", lambda folder: importing.convert(original, "resnet18", folder, **SMALL)),
    ):
        folder = Path(shutil.copytree(saved, world.inside / "work" / name))
        SAVING[trap](folder, world)
        if "hard" in trap:
            os.utime(world.secret)
            secret = world.secret.read_bytes()
            act(folder)
            assert world.secret.read_bytes() == secret
            continue
        with world.watched(), suppress(ConfigError):
            act(folder)


# --- Archives -----------------------------------------------------------------------------------


def state_file() -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(4)}, buffer)
    return buffer.getvalue()


def rezipped(pickled: bytes | None = None, more: dict[str, bytes] | None = None) -> bytes:
    """A file of torch.save with another pickle in it, or with more members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(state_file())) as old, zipfile.ZipFile(buffer, "w") as new:
        for entry in old.infolist():
            is_pickle = entry.filename.endswith("data.pkl")
            new.writestr(entry, pickled if pickled and is_pickle else old.read(entry))
        for name, content in (more or {}).items():
            new.writestr(name, content)
    return buffer.getvalue()


def symlink_member() -> bytes:
    link = zipfile.ZipInfo("archive/link")
    link.create_system, link.external_attr = 3, 0o120777 << 16
    buffer = io.BytesIO(rezipped())
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(link, "../../../outside")
        archive.writestr("archive/link/x", b"through the link")
    return buffer.getvalue()


def tarball(name: str, kind: bytes = tarfile.REGTYPE, linkname: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.size = kind, linkname, 1 if kind == tarfile.REGTYPE else 0
        archive.addfile(info, io.BytesIO(b"x"))
    return buffer.getvalue()


def bomb() -> bytes:
    """A pickle of half a gigabyte of zeros in half a megabyte."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(512 << 20))
        archive.writestr("archive/version", b"3\n")
    return buffer.getvalue()


def nested() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("../model.safetensors", b"x")
        archive.writestr("archive/data.pkl/../../../x", b"x")
    return buffer.getvalue()


ARCHIVES: dict[str, Callable[[], bytes]] = {
    "parent": lambda: rezipped(more={"../../outside/x": b"x"}),
    "parent in torch's folder": lambda: rezipped(more={"archive/data/../../../../outside/x": b"x"}),
    "absolute": lambda: rezipped(more={"/srv/zoo-hostile": b"x"}),
    "drive": lambda: rezipped(more={"C:\\x": b"x"}),
    "backslashes": lambda: rezipped(more={"..\\..\\outside\\x": b"x"}),
    "long name": lambda: rezipped(more={"x/" * 10_000: b"x"}),
    "link": symlink_member,
    "bomb": bomb,
    "only hostile members": nested,
    "cut": lambda: state_file()[:-30],
    "tar with a parent": lambda: tarball("../../outside/x"),
    "tar with a link": lambda: tarball("x", tarfile.SYMTYPE, "../../outside"),
    "tar with a hard link": lambda: tarball("x", tarfile.LNKTYPE, "../../outside/secret.txt"),
    "tar with a device": lambda: tarball("x", tarfile.CHRTYPE),
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_an_archive_unpacks_nothing(kind: str, world: World) -> None:
    path = world.inside / "work" / "model.pth"
    path.write_bytes(ARCHIVES[kind]())
    with world.watched():
        with pytest.raises(WeightsError):
            zoo.load("resnet18", pretrained=path)
        with pytest.raises(WeightsError):
            importing.convert(path, "resnet18", world.inside / "out")
    assert os.listdir(world.inside / "work") == ["model.pth"]
    assert sorted(os.listdir(world.inside)) == ["tmp", "work"]
    assert os.listdir(world.inside / "tmp") == []


# --- Pickles ------------------------------------------------------------------------------------


class Evil:
    """Calls something when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.reduced

    def __call__(self) -> None:
        """Pickle wants what it is to call to look callable; this stands for a result."""


def raw(text: str) -> Callable[[Path], bytes]:
    """A pickle by hand: MARK becomes the path, COMMAND what makes it."""
    return lambda mark: text.replace("COMMAND", f"touch {mark}").replace("MARK", str(mark)).encode()


def calls(make: Callable[[str], Any], protocol: int = 2) -> Callable[[Path], bytes]:
    """A pickle that calls what `make` gives for the path of the mark."""
    return lambda mark: pickle.dumps({"w": make(str(mark))}, protocol)


def touching(mark: str) -> str:
    return f"open({mark!r}, 'w').close()"


PICKLES: dict[str, Callable[[Path], bytes]] = {
    "os.system": calls(lambda m: Evil(os.system, f"touch {m}")),
    "os.system, protocol 0": calls(lambda m: Evil(os.system, f"touch {m}"), 0),
    "os.system, protocol 4": calls(lambda m: Evil(os.system, f"touch {m}"), 4),
    "os.system, protocol 5": calls(lambda m: Evil(os.system, f"touch {m}"), 5),
    "os.popen": calls(lambda m: Evil(os.popen, f"touch {m}")),
    "os.open": calls(lambda m: Evil(os.open, m, os.O_CREAT | os.O_WRONLY)),
    "os.mkdir": calls(lambda m: Evil(os.mkdir, m)),
    "os.symlink": calls(lambda m: Evil(os.symlink, "x", m)),
    "subprocess": calls(lambda m: Evil(subprocess.check_call, ["touch", m])),
    "Popen": calls(lambda m: Evil(subprocess.Popen, ["touch", m])),
    "eval": calls(lambda m: Evil(builtins.eval, touching(m))),
    "exec": calls(lambda m: Evil(builtins.exec, touching(m))),
    "open": calls(lambda m: Evil(builtins.open, m, "w")),
    "compile": calls(lambda m: Evil(builtins.exec, Evil(compile, touching(m), "x", "exec"))),
    "getattr": calls(lambda m: Evil(Evil(getattr, Evil(__import__, "os"), "mkdir"), m)),
    "import": calls(lambda m: Evil(importlib.import_module, script_module(m))),
    "pathlib": calls(lambda m: Evil(pathlib.Path.touch, pathlib.PosixPath(m))),
    "shutil": calls(lambda m: Evil(shutil.copyfile, os.devnull, m)),
    "runpy": calls(lambda m: Evil(runpy.run_path, written(m))),
    "codecs": calls(lambda m: Evil(codecs.open, m, "w")),
    "partial": calls(lambda m: Evil(functools.partial(os.mkdir, m))),
    "methodcaller": calls(
        lambda m: Evil(operator.methodcaller("mkdir"), pathlib.PosixPath(m))
    ),
    "map": calls(lambda m: Evil(list, Evil(map, os.mkdir, [m]))),
    "marshal": calls(
        lambda m: Evil(builtins.exec, Evil(marshal.loads, marshal.dumps(compiled(m))))
    ),
    "a second pickle": calls(lambda m: Evil(pickle.loads, pickle.dumps(Evil(os.mkdir, m)))),
    "torch.load without limits": calls(
        lambda m: Evil(functools.partial(torch.load, weights_only=False), written_pickle(m))
    ),
    "torch.hub": calls(
        lambda m: Evil(functools.partial(torch.hub.load, source="local"), hub_folder(m), "evil")
    ),
    "torch.hub download": calls(
        lambda m: Evil(torch.hub.download_url_to_file, f"file://{os.devnull}", m)
    ),
    "torch.save": calls(lambda m: Evil(torch.save, 1, m)),
    "rebuild from type": calls(
        lambda m: Evil(torch._tensor._rebuild_from_type_v2, os.mkdir, torch.Tensor, (m,), {})
    ),
    "rebuild device tensor": calls(
        lambda m: Evil(torch._utils._rebuild_parameter, Evil(os.mkdir, m), False, OrderedDict())
    ),
    "numpy load": calls(
        lambda m: Evil(functools.partial(np.load, allow_pickle=True), written_pickle(m))
    ),
    "numpy objects": calls(lambda m: np.array([Evil(os.mkdir, m)], dtype=object)),
    "numpy memmap": calls(lambda m: Evil(np.memmap, m, "uint8", "w+", 0, (1,))),
    "OrderedDict": calls(lambda m: Evil(OrderedDict, state=Evil(os.mkdir, m))),
    "a key": lambda mark: pickle.dumps({Evil(os.mkdir, str(mark)): 1}, 2),
    "GLOBAL and REDUCE": raw("cposix\nsystem\n(S'COMMAND'\ntR."),
    "INST": raw("(S'COMMAND'\niposix\nsystem\n."),
    "OBJ": raw("(cposix\nsystem\nS'COMMAND'\no."),
    "BUILD": raw("ccollections\nOrderedDict\n)R(dS'x'\ncposix\nmkdir\n(S'MARK'\ntRsb."),
    "after a good state dict": lambda mark: pickle.dumps({"w": 1}, 2)[:-1]
    + raw("cposix\nsystem\n(S'COMMAND'\ntR0.")(mark),
    "copyreg": raw(
        "ccopyreg\n_reconstructor\n(cpathlib\nPosixPath\nc__builtin__\nobject\nNtR0"
        "cposix\nmkdir\n(S'MARK'\ntR."
    ),
}  # fmt: skip


def compiled(mark: str) -> Any:
    return compile(touching(mark), "x", "exec")


def script_module(mark: str) -> str:
    """A module in the folder where the user stands."""
    Path("evil_in_here.py").write_text(touching(mark))
    sys.path_importer_cache.clear()
    return "evil_in_here"


def written(mark: str) -> str:
    """A script beside the mark's folder."""
    path = Path(mark).parent.parent / "inside" / "script.py"
    path.write_text(touching(mark))
    return str(path)


def written_pickle(mark: str) -> str:
    path = Path(mark).parent.parent / "inside" / "second.pkl"
    path.write_bytes(pickle.dumps(Evil(os.mkdir, mark), 2))
    return str(path)


def hub_folder(mark: str) -> str:
    folder = Path(mark).parent.parent / "inside" / "hub"
    folder.mkdir(exist_ok=True)
    (folder / "hubconf.py").write_text(f"{touching(mark)}\ndef evil(): return 1")
    return str(folder)


@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_runs_nothing(kind: str, world: World) -> None:
    content = PICKLES[kind](world.mark)
    path = world.inside / "work" / "model.pth"
    for data in (content, rezipped(content)):
        path.write_bytes(data)
        with world.watched():
            with pytest.raises(WeightsError):
                zoo.load("resnet18", pretrained=path)
            with pytest.raises(WeightsError) as raised:
                importing.convert(path, "resnet18", world.inside / "out")
            assert len(raised.value.line) <= 200
    path.rename(world.inside / "work" / "pytorch_model.bin")
    with world.watched(), pytest.raises(WeightsError):
        importing.convert(world.inside / "work", "resnet18", world.inside / "out")
    assert not (world.inside / "out").exists()


def test_the_pickles_are_loaded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pickle itself reads them, each leaves the mark: the tests above can fail."""
    monkeypatch.syspath_prepend(Path.cwd())
    harmless = []
    for kind, make in PICKLES.items():
        content = make(world.mark)
        if os.fork() == 0:  # what is done here is not undone
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                pickle.loads(content)
            finally:
                os._exit(0)
        os.wait()
        for _ in range(100):  # some start a process and do not wait for it
            if os.path.lexists(world.mark):
                break
            subprocess.run(["sleep", "0.02"], check=True)
        if not os.path.lexists(world.mark):
            harmless.append(kind)
        elif world.mark.is_dir() and not world.mark.is_symlink():
            world.mark.rmdir()
        else:
            world.mark.unlink()
    assert harmless == []


# --- Configs ------------------------------------------------------------------------------------

YAML = '!!python/object/apply:os.system ["touch MARK"]'
CONFIGS: dict[str, Any] = {
    "auto_map": {"auto_map": {"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil"}},
    "trust_remote_code": {"trust_remote_code": True, "auto_map": {"AutoModel": "a/b--evil.Evil"}},
    "custom pipelines": {"custom_pipelines": {"x": {"impl": "evil.Evil", "pt": ["Evil"]}}},
    "architectures": {"architectures": ["evil.Evil"], "model_type": "evil"},
    "another place": {"_name_or_path": "../../outside", "model_type": "../../outside"},
    "a dtype": {"torch_dtype": "__import__('os').system('touch MARK')"},
    "a template": {"id2label": {"0": "{{ cycler.__init__.__globals__.os.system('touch MARK') }}"}},
    "labels": {"id2label": {"0": "../../outside/x", "1": "$(touch MARK)"}},
    "hostile labels": {"id2label": {"0": "a\nb", "1": "\x1b]0;x\x07"}},
    "quantization": {"quantization_config": {"quant_method": "evil", "modules": ["os.system"]}},
    "an object": {"py/object": "os.system", "py/reduce": [{"py/function": "os.system"}]},
    "a class": {"__class__": "Evil", "__reduce__": ["os.system", ["touch MARK"]]},
    "yaml": YAML,
    "yaml in a string": {"id2label": {"0": YAML, "1": YAML}},
    "twice": '{"id2label": {"0": "a"}, "id2label": {"0": "b", "1": "c"}}',
    "deep": "[" * 100_000,
    "not a number": '{"num_labels": NaN, "id2label": Infinity}',
    "a long number": '{"num_labels": ' + "9" * 100_000 + "}",
}
FILES = {  # lie in every such folder
    "evil.py": "open('MARK', 'w')",
    "modeling_evil.py": "open('MARK', 'w')",
    "__init__.py": "open('MARK', 'w')",
    "sitecustomize.py": "open('MARK', 'w')",
    "setup.py": "open('MARK', 'w')",
    "evil.pth": "import os; os.system('touch MARK')",
    "model.yaml": YAML,
    "hyperparams.yaml": YAML,
    "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}',
    "tokenizer.json": '{"version": "1.0", "auto_map": "evil.Evil"}',
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_runs_nothing(kind: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = world.inside / "work"
    config = {"task": "text-classification", "max_length": 4, **TINY}
    state = zoo.load("bert-base-uncased", **config).state_dict()
    torch.save(state, folder / "pytorch_model.bin")
    value = CONFIGS[kind]
    text = value if isinstance(value, str) else json.dumps(value)
    for name, content in {**FILES, "config.json": text}.items():
        (folder / name).write_text(content.replace("MARK", str(world.mark)))
    out = world.inside / "out"
    with world.watched(), suppress(ZooError):
        importing.convert(folder, "bert-base-uncased.google", out, **config)
    refused = ("yaml", "twice", "deep", "a long number", "architectures", "another place")
    assert out.exists() == (kind not in refused)
    if out.exists():
        with world.watched():
            model = zoo.load(out)
            with pytest.raises(ZooError):  # the tokenizer is none
                zoo.pipeline(out)("a text")
        assert all(torch.equal(model.state_dict()[key], state[key]) for key in state)
        assert not [path for path in out.rglob("*") if path.suffix in (".py", ".pth", ".yaml")]


def test_there_are_as_many_as_promised() -> None:
    assert len(NAMES) + len(CARDS) + len(SAVING) + len(ARCHIVES) >= 60
    assert min(len(NAMES), len(CARDS)) >= 20
    assert len(PICKLES) + len(CONFIGS) >= 40
