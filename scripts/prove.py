"""The heavy proofs: each one is run, and docs/proofs.md says what came out.

    python scripts/prove.py [TITLE...]

Without titles all are run; with some, the other sections of the page stay as they are.
"""

import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "proofs.md"
TESTS = "-m pytest -q --no-header -rP -m prove"
NETWORKS = "tests/vision tests/nlp tests/rl tests/prove/test_mutants.py"
TRAINING = "tests/zoo/training tests/zoo/data tests/zoo/test_finetuning.py"
TRAINING += " tests/prove/test_resumes.py tests/prove/test_hosts.py"
REST = f"tests/zoo tests/prove {TRAINING} tests/prove/test_mutants.py"
PROOFS = {
    "Speed and memory": "scripts/benchmark.py",
    "Accuracy": "-m zoo smoke",
    "Networks": f"{TESTS} {NETWORKS}",
    "Weights": f"{TESTS} " + re.sub(r"(tests/\w+/)", r"--ignore=\1", REST),
    "Training": f"{TESTS} {TRAINING}",
}
# Of pytest: progress, rulers, and headings that only say which test printed what follows.
NOISE = re.compile(r"[.sFEx]*\s*\[ *\d+%\]|=+ (PASSES|warnings summary) =+|-+ Captured \w+ call -+")


def prove(title: str) -> tuple[str, bool]:
    """Run one proof; its section of the page, and whether it held."""
    arguments = PROOFS[title].split()
    started = time.perf_counter()
    print(f"{title}: python {PROOFS[title]}", flush=True)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    took = time.perf_counter() - started
    held = done.returncode == 0
    output = [
        re.sub(r"^_+ (.*?) _+$", r"\1", line)
        for line in done.stdout.splitlines()
        if line.strip() and not NOISE.fullmatch(line.strip())
    ]
    print(*output, "" if held else done.stderr[-2000:], sep="\n", flush=True)
    fence = [] if output and output[0].startswith("|") else ["```"]
    verdict = "shown" if held else f"NOT shown (exit {done.returncode})"
    machine = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    lines = [f"## {title}: {verdict}", ""]
    lines += [f"`python {PROOFS[title]}`", ""]
    lines += [f"{time.strftime('%Y-%m-%d')}, {took:.0f} s, {machine}, torch {torch.__version__}."]
    return "\n".join([*lines, "", *fence, *output[-120:], *fence, ""]), held


def main(titles: list[str]) -> None:
    """Exit with 1 if a proof fails; the page is written in any case."""
    if unknown := [title for title in titles if title not in PROOFS]:
        sys.exit(f"there is no proof {unknown[0]!r}; there are: {', '.join(PROOFS)}")
    text = PAGE.read_text("utf-8") if PAGE.exists() else ""
    found = {part.partition(":")[0]: part for part in re.split(r"^## ", text, flags=re.M)[1:]}
    sections = {t: f"## {found[t].rstrip()}\n" for t in PROOFS if t in found}
    failed = 0
    for title in titles or PROOFS:
        sections[title], held = prove(title)
        failed += not held
        parts = [sections[t] for t in PROOFS if t in sections]
        PAGE.write_text("\n".join(["# Proofs", "", "`make prove` writes this page.", "", *parts]))
    sys.exit(1 if failed else 0)


main(sys.argv[1:])
