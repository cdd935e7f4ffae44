"""Speed and memory as ratios to named peers: fresh processes, taken in turn, medians.

A side of a comparison is a function that imports what the job needs, in a process of its own, and
returns the job; only the job is timed. Ours and the peer's processes alternate, so that a machine
that slows down slows both.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zoo.errors import ConfigError, ZooError, nearest, require, shown

Job = Callable[[], Any]  # what it returns, if a number, is printed beside its time
MINILM = "all-minilm-l6-v2.sbert"
SENTENCES = 512


@dataclass(frozen=True)
class Promise:
    """One job, the peer that does the same, and what is promised."""

    job: str
    ours: str  # a key of SIDES
    peer: str | None
    text: str
    faster: float | None = None  # at least so many times faster than the peer
    seconds: float | None = None  # at most
    peak_factor: float | None = None  # peak memory at most the job's number times this plus 15 MiB
    peak_share: float | None = None  # peak memory at most the peer's times this


@dataclass(frozen=True)
class Outcome:
    """Medians of the processes of one promise."""

    promise: Promise
    ours: float  # seconds
    peer: float | None
    peak: float  # MiB above what the process had before the job
    number: float | None  # that the job returned: MiB of tensors
    peer_peak: float | None = None  # MiB

    @property
    def ratio(self) -> float | None:
        """How many times faster than the peer."""
        return None if self.peer is None else self.peer / self.ours

    @property
    def kept(self) -> bool:
        """True if the promise holds."""
        p = self.promise
        room = None if p.peak_factor is None else (self.number or 0) * p.peak_factor + 15
        return (
            (p.faster is None or (self.ratio or 0) >= p.faster)
            and (p.seconds is None or self.ours <= p.seconds)
            and (room is None or self.peak <= room)
            and (p.peak_share is None or self.peak <= p.peak_share * (self.peer_peak or 0))
        )

    def __str__(self) -> str:
        """One row of a Markdown table."""
        cells = (
            self.promise.job,
            f"{1e3 * self.ours:.1f} ms",
            "" if self.peer is None else f"{1e3 * self.peer:.1f} ms",
            "" if self.ratio is None else f"{self.ratio:.1f}x",
            f"{self.peak:.0f} MiB"
            + (f" for {self.number:.0f}" if self.number else "")
            + (f", peer {self.peer_peak:.0f}" if self.promise.peak_share else ""),
            self.promise.text,
            "yes" if self.kept else "NO",
        )
        return "| " + " | ".join(cells) + " |"


HEADER = (
    "| job | refzoo | peer | ratio | peak memory | promise | kept |\n|---|--:|--:|--:|---|---|---|"
)
MEMORY = "at most the tensors + 10 % + 15 MiB"

PROMISES = (
    Promise("list all models", "list", None, "≤ 0.1 s", seconds=0.1),
    Promise("hash record and header of ResNet-50", "header", None, "≤ 5 ms", seconds=0.005),
    Promise(
        "load ResNet-50 from fp32", "resnet fp32", "torchvision fp32",
        "≥ 5x torchvision's constructor + torch.load + load_state_dict", faster=5,
    ),
    Promise("its memory", "resnet fp32", None, MEMORY, peak_factor=1.1),
    Promise(
        "load ResNet-50 from fp16", "resnet fp16", "torchvision fp16",
        "≥ 3x torchvision's constructor + torch.load + load_state_dict", faster=3,
    ),
    Promise("its memory", "resnet fp16", None, MEMORY, peak_factor=1.1),
    Promise(
        "load MiniLM", "minilm", "transformers minilm",
        "≥ 3x AutoModel.from_pretrained on the same files", faster=3,
    ),
    Promise("its memory", "minilm", None, MEMORY, peak_factor=1.1),
    Promise(
        "embed 512 sentences of STS-B", "embed", "sentence-transformers",
        "faster than sentence-transformers' encode", faster=1,
    ),
    Promise(
        "new process to the logits of ResNet-50", "cold", "torchvision cold",
        "faster than torchvision", faster=1,
    ),
    Promise(
        "train ResNet-18 at 32 px", "train cifar10", "bare cifar10",
        "at least 0.97x of a bare loop", faster=0.97,
    ),
    Promise(
        "train ResNet-18 by Lightning", "train cifar10", "lightning cifar10",
        "faster than Lightning, with no more memory", faster=1, peak_share=1,
    ),
    Promise(
        "train MiniLM by transformers", "train sst2", "transformers sst2",
        "faster than transformers.Trainer, with no more memory", faster=1, peak_share=1,
    ),
    Promise(
        "bf16 and checkpointing, ResNet-50 at 224 px", "lean resnet50", "train resnet50",
        "1.4x of float32 in 40 % of its memory", faster=1.4, peak_share=0.4,
    ),
    Promise(
        "bf16 and checkpointing, BERT-base", "lean encoder", "train encoder",
        "1.4x of float32 in 40 % of its memory", faster=1.4, peak_share=0.4,
    ),
    Promise(
        "stitch 16 classes of 96³ from windows of 48³", "stitch", "monai stitch",
        "faster than MONAI's inferer and argmax, with no more memory", faster=1, peak_share=1,
    ),
)  # fmt: skip


def _list(folder: Path) -> Job:
    code = "import time; t = time.perf_counter(); import zoo; zoo.list_models()\n"
    return lambda: {"seconds": float(_python(code + "print(time.perf_counter() - t)"))}


def _header(folder: Path) -> Job:
    from zoo import files, tensorfile

    path = next((folder / "fp32").glob("*.safetensors"))
    digest = files.sha256_of(path)

    def job() -> None:
        with path.open("rb") as file:
            if not files.verified(path, os.fstat(file.fileno()), digest):
                raise ZooError(f"{path.name} has no record")
            tensorfile.read_header(file, path.name)

    return job


def _resnet(kind: str) -> Callable[[Path], Job]:
    def side(folder: Path) -> Job:
        load = _loader("resnet50")
        return lambda: _mebibytes(load(folder / kind))

    return side


def _minilm(folder: Path) -> Job:
    load = _loader(MINILM)
    return lambda: _mebibytes(load(MINILM))


def _sentences() -> list[str]:
    """Of STS-B, as long as they come."""
    from zoo import registry

    stsb = registry.task_class(_card()).datasets["stsb"]
    return [first for (first, _), _ in stsb.examples("validation")][:SENTENCES]


def _card() -> Any:
    from zoo import cards

    return cards.card(MINILM)


def _embed(folder: Path) -> Job:
    from zoo.pipeline import pipeline

    pipe, sentences = pipeline(MINILM), _sentences()
    pipe(sentences[:64])

    def job() -> None:
        pipe(sentences)

    return job


def _sentence_transformers(folder: Path) -> Job:
    from zoo import plugins

    package = plugins.package_folder(_card().weights["sbert"].sources[0].path or "")
    peer = require("sentence_transformers", "bench").SentenceTransformer(str(package), device="cpu")
    peer.max_seq_length = _card().preprocessing["max_length"]
    sentences = _sentences()
    peer.encode(sentences[:64])

    def job() -> None:
        peer.encode(sentences)

    return job


def _cold(folder: Path) -> Job:
    code = (
        "import sys, torch, zoo; from pathlib import Path\n"
        "model = zoo.load(Path(sys.argv[1]) / 'fp32')\n"
        "with torch.no_grad(): print(model(torch.ones(1, 3, 224, 224))[0, :3])\n"
    )
    return lambda: _python(code, str(folder))


def _torchvision(kind: str) -> Callable[[Path], Job]:
    def side(folder: Path) -> Job:
        import torch

        models = require("torchvision", "bench").models
        path = folder / f"{kind}.pth"

        def job() -> None:
            models.resnet50().load_state_dict(torch.load(path, weights_only=True))

        return job

    return side


def _torchvision_cold(folder: Path) -> Job:
    code = (
        "import sys, torch, torchvision\n"
        "model = torchvision.models.resnet50().eval()\n"
        "model.load_state_dict(torch.load(sys.argv[1] + '/fp32.pth', weights_only=True))\n"
        "with torch.no_grad(): print(model(torch.ones(1, 3, 224, 224))[0, :3])\n"
    )
    return lambda: _python(code, str(folder))


def _transformers_minilm(folder: Path) -> Job:
    from zoo import cards, plugins

    transformers = require("transformers", "bench")
    require("transformers.models.bert.modeling_bert", "bench")
    source = cards.card(MINILM).weights["sbert"].sources[0]
    package = plugins.package_folder(source.path or "")
    return lambda: transformers.AutoModel.from_pretrained(package) and None


CLASSES, EDGE, WINDOW = 16, 96, 48  # of what is stitched; voxels


def _intensities() -> tuple[Any, Any]:
    """A volume, and a network that costs nearly nothing, so that the stitching is measured."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    volume = torch.randn(1, 1, EDGE, EDGE, EDGE)
    return nn.Conv3d(1, CLASSES, 1).eval(), volume


def _stitch(folder: Path) -> Job:
    import torch

    from zoo import cards, registry

    card = cards.card("unet3d")
    planned = cards.Weights(licence="", preprocessing={"window": (WINDOW,) * 3})
    task = registry.task_of(replace(card, tag="x", weights={"x": planned}))
    model, volume = _intensities()

    def job() -> None:
        with torch.inference_mode():
            task.run(model, {"volume": volume}, overlap=0.5)

    return job


def _monai_stitch(folder: Path) -> Job:
    import torch

    infer = require("monai.inferers", "bench").sliding_window_inference
    model, volume = _intensities()

    def job() -> None:
        with torch.inference_mode():
            infer(volume, (WINDOW,) * 3, 1, model, 0.5, mode="gaussian").argmax(1).byte()

    return job


def _training(kind: str, name: str, **changes: Any) -> Callable[[Path], Job]:
    """A side of `zoo.bench_training`, imported in the process that runs it."""

    def side(folder: Path) -> Job:
        from zoo import bench_training

        job: Job = getattr(bench_training, kind)(name, **changes)(folder)
        return job

    return side


LEAN = {"precision": "bfloat16", "gradient_checkpointing": True}

SIDES: dict[str, Callable[[Path], Job]] = {
    "list": _list,
    "header": _header,
    "resnet fp32": _resnet("fp32"),
    "resnet fp16": _resnet("fp16"),
    "minilm": _minilm,
    "embed": _embed,
    "sentence-transformers": _sentence_transformers,
    "cold": _cold,
    "torchvision fp32": _torchvision("fp32"),
    "torchvision fp16": _torchvision("fp16"),
    "torchvision cold": _torchvision_cold,
    "transformers minilm": _transformers_minilm,
    **{
        f"train {name}": _training("ours", name)
        for name in ("cifar10", "sst2", "resnet50", "encoder")
    },
    **{f"lean {name}": _training("ours", name, **LEAN) for name in ("resnet50", "encoder")},
    "bare cifar10": _training("bare", "cifar10"),
    "lightning cifar10": _training("lightning", "cifar10"),
    "transformers sst2": _training("transformers", "sst2"),
    "stitch": _stitch,
    "monai stitch": _monai_stitch,
}


def compare(folder: Path, *, only: str = "", rounds: int = 9) -> Iterator[Outcome]:
    """Measure every promise whose job contains a text.

    Args:
        folder: Empty; the files to load are made in it.
        only: The text; empty for all.
        rounds: Processes of each side that are counted, after one that is not.

    Raises:
        ConfigError: No job contains the text.
        ZooError: A process failed.
    """
    chosen = [promise for promise in PROMISES if only in promise.job]
    if not chosen:
        jobs = [promise.job for promise in PROMISES]
        raise ConfigError(f"no job contains {shown(only)};{nearest(only, jobs)} see zoo.bench")
    make_files(folder)
    for promise in chosen:
        ours, theirs = [], []
        for _ in range(rounds + 1):
            ours.append(_measured(promise.ours, folder))
            if promise.peer:
                theirs.append(_measured(promise.peer, folder))
        yield Outcome(
            promise,
            statistics.median(one["seconds"] for one in ours[1:]),
            statistics.median(one["seconds"] for one in theirs[1:]) if theirs else None,
            statistics.median(one["peak"] for one in ours[1:]),
            ours[0]["number"],
            statistics.median(one["peak"] for one in theirs[1:]) if theirs else None,
        )


def make_files(folder: Path) -> None:
    """A random ResNet-50 in fp32 and fp16, as saved folders and pickles, verified and recorded."""
    import torch

    from zoo import files, registry, saving, tensorfile

    model = registry.load("resnet50")
    for kind in ("fp32", "fp16"):
        saving.save(model, folder / kind)
        tensors = model.state_dict()
        if kind == "fp16":  # norm statistics keep their own type
            half = {n for n, t in tensors.items() if t.is_floating_point() and "running" not in n}
            tensors = {n: t.half() if n in half else t for n, t in tensors.items()}
        torch.save(tensors, folder / f"{kind}.pth")
        path = next((folder / kind).glob("*.safetensors"))
        tensorfile.write(path, tensors)
        card = folder / kind / "resnet50.toml"
        text = re.sub(r"size = \d+", f"size = {path.stat().st_size}", card.read_text("utf-8"))
        text = re.sub('sha256 = ".*"', f'sha256 = "{files.sha256_of(path)}"', text)
        card.write_text(text, "utf-8")
    time.sleep(files.TICK_NS / 1e9)  # younger files are not recorded
    for kind in ("fp32", "fp16"):
        registry.load(folder / kind)
    registry.load(MINILM)


def _loader(name: str) -> Callable[..., Any]:
    """`zoo.load` with everything imported that it needs for a model."""
    from importlib import import_module

    from zoo import cards, registry

    import_module("zoo.loading")
    registry.symbol(cards.card(name).model, cards.card(name))
    return registry.load


def _mebibytes(model: Any) -> float:
    return float(sum(t.nbytes for t in model.state_dict().values()) / 2**20)


def _measured(side: str, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_python("", "-m", "zoo.bench", side, str(folder)))
    return found


def _python(code: str, *arguments: str) -> str:
    """Last line that a fresh interpreter prints."""
    quiet = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [sys.executable, *(["-c", code] if code else []), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **quiet},
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1]
        raise ZooError(f"a process of the benchmark failed: {last}", done.stderr)
    return done.stdout.splitlines()[-1]


def _status(key: str) -> float:
    """A line of this process's memory accounts, in MiB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{key}:")) / 1024


def main(side: str, folder: str) -> None:
    """Run one side in this process and print what it took."""
    job = SIDES[side](Path(folder))
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark starts anew
    before, start = _status("VmRSS"), time.perf_counter()
    result = job()
    found = {"seconds": time.perf_counter() - start, "peak": _status("VmHWM") - before}
    found |= result if isinstance(result, dict) else {}
    print(json.dumps({**found, "number": result if isinstance(result, float) else None}))


if __name__ == "__main__":
    main(*sys.argv[1:])
