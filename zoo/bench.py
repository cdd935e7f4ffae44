"""Speed and memory as ratios to named peers: fresh processes, taken in turn, medians.

A measurement is two snippets of code, one of this project and one of a peer that does the same job.
Each runs in processes of its own, ours and theirs alternating, so that a machine that slows down
slows both. What is imported before the clock starts is part of the snippet, and so visible.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zoo.errors import ConfigError, ZooError, nearest, shown

HARNESS = """
import json, resource, sys, time
setup, timed = json.loads(sys.argv[1])
names = {}
exec(compile(setup, "setup", "exec"), names)
try:  # the high-water mark starts anew, so that it is that of the timed part
    with open("/proc/self/clear_refs", "w") as file: file.write("5")
except OSError: pass
def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key + ":")) / 1024
before = status("VmRSS")
start = time.perf_counter()
exec(compile(timed, "timed", "exec"), names)
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "peak": status("VmHWM") - before, "value": names.get("value")}))
"""


@dataclass(frozen=True)
class Side:
    """A job: what is done before the clock starts, and what is timed."""

    name: str
    setup: str
    timed: str


@dataclass(frozen=True)
class Comparison:
    """Two ways to do one job, and how many times faster than the peer ours is promised to be."""

    name: str
    ours: Side
    peer: Side | None
    promise: str  # in words, for the page
    faster: float | None = None  # at least so many times
    seconds: float | None = None  # at most so long
    peak_factor: float | None = None  # at most `value` MiB times this, plus `peak_extra`
    peak_extra: float = 0.0  # MiB


@dataclass(frozen=True)
class Outcome:
    """Medians of one comparison."""

    comparison: Comparison
    ours: float  # seconds
    peer: float | None
    peak: float  # MiB above what the process had before
    value: float | None  # what the snippet calls `value`, here MiB of tensors

    @property
    def ratio(self) -> float | None:
        """How many times faster than the peer."""
        return None if self.peer is None else self.peer / self.ours

    @property
    def kept(self) -> bool:
        """True if the promise holds."""
        c = self.comparison
        return (
            (c.faster is None or (self.ratio or 0) >= c.faster)
            and (c.seconds is None or self.ours <= c.seconds)
            and (
                c.peak_factor is None
                or self.peak <= (self.value or 0) * c.peak_factor + c.peak_extra
            )
        )

    def __str__(self) -> str:
        """One row of a Markdown table."""
        c = self.comparison
        theirs = (
            ""
            if self.peer is None or c.peer is None
            else f"{1e3 * self.peer:.1f} ms ({c.peer.name})"
        )
        ratio = "" if self.ratio is None else f"{self.ratio:.1f}x"
        memory = f"{self.peak:.0f} MiB" + (
            f" for {self.value:.0f} MiB of tensors" if self.value else ""
        )
        verdict = "yes" if self.kept else "NO"
        return f"| {c.name} | {1e3 * self.ours:.1f} ms | {theirs} | {ratio} | {memory} | {c.promise} | {verdict} |"


HEADER = (
    "| job | refzoo | peer | ratio | peak memory | promise | kept |\n|---|--:|--:|--:|---|---|---|"
)
OURS = "import torch, zoo, zoo.registry, zoo.loading; from pathlib import Path; torch.set_num_threads(2)\n"
MIB = "value = sum(t.nbytes for t in model.state_dict().values()) / 2**20\n"


def load_suite(folder: Path) -> list[Comparison]:
    """Loading: the first call in a fresh process after the imports, files in the page cache, hash
    recorded.

    Args:
        folder: Where the files to load are made.
    """
    _make_files(folder)
    tv = "import torch, torchvision; torch.set_num_threads(2)\n"
    tv_load = "model = torchvision.models.resnet50(); model.load_state_dict(torch.load({!r}, weights_only=True))\n"
    comparisons = []
    for kind, factor in (("fp32", 5.0), ("fp16", 3.0)):
        ours = Side(
            "zoo.load",
            OURS + "import vision.resnet",
            f"model = zoo.load(Path({str(folder / kind)!r}))\n" + MIB,
        )
        theirs = Side("torchvision", tv, tv_load.format(str(folder / f"{kind}.pth")))
        promise = f"≥ {factor:g} times torchvision's constructor + torch.load + load_state_dict"
        comparisons.append(
            Comparison(f"ResNet-50 from {kind}", ours, theirs, promise, faster=factor)
        )
        comparisons.append(
            Comparison(
                f"memory of ResNet-50 from {kind}", ours, None, "tensors + 10 % + 15 MiB",
                peak_factor=1.1, peak_extra=15.0,
            )
        )  # fmt: skip
    minilm = Side(
        "zoo.load",
        OURS + "import nlp.bert",
        "model = zoo.load('all-minilm-l6-v2', pretrained=True)\n" + MIB,
    )
    hub = Side(
        "transformers",
        "import torch, transformers.models.bert.modeling_bert; from transformers import AutoModel\n"
        "from zoo.cards import card; from zoo.weights import package_folder\n"
        "source = card('all-minilm-l6-v2.sbert').weights['sbert'].sources[0]\n"
        "folder = str(package_folder(source)); torch.set_num_threads(2)\n",
        "model = AutoModel.from_pretrained(folder)",
    )
    promise = "≥ 3 times AutoModel.from_pretrained on the same files"
    comparisons.append(Comparison("MiniLM", minilm, hub, promise, faster=3.0))
    comparisons.append(
        Comparison(
            "memory of MiniLM",
            minilm,
            None,
            "tensors + 10 % + 15 MiB",
            peak_factor=1.1,
            peak_extra=15.0,
        )
    )
    listing = Side("zoo", "", "import zoo; zoo.list_models()")
    comparisons.append(
        Comparison("import zoo; zoo.list_models()", listing, None, "≤ 0.1 s", seconds=0.1)
    )
    header = Side(
        "zoo",
        OURS + "from zoo import files, tensorfile; import os\n"
        f"path = next(Path({str(folder / 'fp32')!r}).glob('*.safetensors')); digest = "
        "files.sha256_of(path)\n",
        "with path.open('rb') as file:\n"
        "    assert files.verified(path, os.fstat(file.fileno()), digest)\n"
        "    tensorfile.read_header(file, path.name)\n",
    )
    comparisons.append(
        Comparison("hash record and header check", header, None, "≤ 5 ms", seconds=0.005)
    )
    cold = f"model = zoo.load(Path({str(folder / 'fp32')!r})); print(model(torch.ones(1, 3, 224, 224))[0, :3])"
    comparisons.append(
        Comparison(
            "cold process to the logits of ResNet-50",
            Side("zoo", "", "import torch, zoo; from pathlib import Path\nwith torch.no_grad(): " + cold),
            Side(
                "torchvision", "",
                "import torch, torchvision\nwith torch.no_grad():\n    "
                + tv_load.format(str(folder / "fp32.pth")).strip()
                + "\n    print(model.eval()(torch.ones(1, 3, 224, 224))[0, :3])",
            ),
            "faster",
            faster=1.0,
        )
    )  # fmt: skip
    return comparisons


def _make_files(folder: Path) -> None:
    """A random ResNet-50 as saved folders and as pickles, in fp32 and fp16; both read once, so recorded."""
    code = OURS + (
        "import sys, time; folder = Path(sys.argv[1])\n"
        "from zoo import tensorfile, files; from zoo.saving import card_text\n"
        "import dataclasses\n"
        "model = zoo.load('resnet50')\n"
        "state = model.state_dict()\n"
        "half = "
        "{k: v.half() if v.is_floating_point() and 'running' not in k else v for k, v in state.items()}\n"
        "for kind, tensors in (('fp32', state), ('fp16', half)):\n"
        "    zoo.save(model, folder / kind); torch.save(tensors, folder / f'{kind}.pth')\n"
        "    path = next((folder / kind).glob('*.safetensors')); tensorfile.write(path, tensors, "
        "{})\n"
        "    toml = folder / kind / 'resnet50.toml'; text = toml.read_text()\n"
        "    import re\n"
        "    text = re.sub('sha256 = .*', f'sha256 = \"{files.sha256_of(path)}\"', text)\n"
        "    toml.write_text(re.sub(r'\\nsize = .*', f'\\nsize = {path.stat().st_size}', text))\n"
        "time.sleep(2.5)\n"  # a file is recorded once it is older than a tick of the coarsest clock
        "for kind in ('fp32', 'fp16'): zoo.load(folder / kind)\n"
        "zoo.load('all-minilm-l6-v2', pretrained=True)\n"
    )
    _python(code, str(folder))


SUITES = {"load": load_suite}


def run_suite(name: str, folder: Path, *, rounds: int = 9) -> Iterator[Outcome]:
    """Measure every comparison of a suite.

    Args:
        name: A key of `SUITES`.
        folder: For the suite's files; empty.
        rounds: Processes of each side; the first of each is not counted.

    Raises:
        ConfigError: There is no such suite.
        ZooError: A snippet failed, for example because a peer is not installed.
    """
    if name not in SUITES:
        raise ConfigError(
            f"no suite is named {shown(name)};{nearest(name, SUITES)} there are {', '.join(SUITES)}"
        )
    for comparison in SUITES[name](folder):
        ours, theirs = [], []
        for _ in range(rounds + 1):
            ours.append(_measure(comparison.ours))
            if comparison.peer:
                theirs.append(_measure(comparison.peer))
        yield Outcome(
            comparison,
            statistics.median(m["seconds"] for m in ours[1:]),
            statistics.median(m["seconds"] for m in theirs[1:]) if theirs else None,
            statistics.median(m["peak"] for m in ours[1:]),
            ours[0]["value"],
        )


def _measure(side: Side) -> dict[str, float]:
    found: dict[str, float] = json.loads(
        _python(HARNESS, json.dumps([side.setup, side.timed])).splitlines()[-1]
    )
    return found


def _python(code: str, argument: str) -> str:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, argument],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise ZooError(
            f"a benchmark's process failed: {done.stderr.strip().splitlines()[-1]}", done.stderr
        )
    return done.stdout
