"""The heavy proofs: every one is run, and docs/proofs.md says what came out."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("-m", "pytest", "-q", "-m", "prove")
PROOFS = {
    "Speed and memory": ["scripts/benchmark.py"],
    "Accuracy": ["-m", "zoo", "smoke"],
    "Parity of the largest networks": [*TESTS, "tests/vision", "tests/nlp"],
    "Weights: malformed files, kills, signatures": [*TESTS, "tests/prove", "tests/zoo"],
}


def main() -> None:
    """Exit with 1 if a proof fails; the page is written in any case."""
    machine = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    lines = ["# Proofs", "", "`make prove` wrote this page.", ""]
    lines += [f"{time.strftime('%Y-%m-%d')}: {machine}, torch {torch.__version__}.", ""]
    failed = 0
    for title, arguments in PROOFS.items():
        started = time.perf_counter()
        print(f"{title}: python {' '.join(arguments)}", flush=True)
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        failed += done.returncode != 0
        verdict = "shown" if done.returncode == 0 else f"NOT shown (exit {done.returncode})"
        output = [line for line in done.stdout.splitlines() if line.strip()][-40:]
        table = output and output[0].startswith("|")
        fence = [] if table else ["```"]
        took = time.perf_counter() - started
        lines += [f"## {title}: {verdict}", "", f"`python {' '.join(arguments)}`, {took:.0f} s", ""]
        lines += [*fence, *output, *fence, ""]
        print(*output, done.stderr[-2000:] if done.returncode else "", sep="\n", flush=True)
        (ROOT / "docs").mkdir(exist_ok=True)
        (ROOT / "docs" / "proofs.md").write_text("\n".join(lines), "utf-8")
    sys.exit(1 if failed else 0)


main()
