"""Write the model table and the annotated tree into README.md; with --check, only compare."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import zoo

ROOT = Path(__file__).resolve().parent.parent
ROLES = {
    "zoo/": "shared machinery; imports no domain",
    "vision/": "images and volumes",
    "nlp/": "text",
    "rl/": "reinforcement learning",
    "audio/": "sound",
    "weights/": "cards (TOML), weights (safetensors), labels; no code",
    "scripts/": "entry points; imported by nothing",
    "tests/": "mirrors the sources; contract/ and accuracy/ run over every card",
}


def table() -> str:
    """One row a model, from the cards."""
    rows = [
        "| model | task | parameters | weights | measured | licence |",
        "|---|---|--:|---|---|---|",
    ]
    for name in zoo.list_models():
        card = zoo.card(name)
        sets = card.weights
        best = next((m for w in sets.values() for m in w.metrics if m.command), None)
        best = best or next((m for w in reversed(sets.values()) for m in w.metrics), None)
        number = (
            ""
            if best is None
            else f"{best.name} {best.value:.4f}" + ("" if best.command else " (published)")
        )
        tags = ", ".join(f"**{tag}**" if w.default else tag for tag, w in sets.items())
        licences = ", ".join(dict.fromkeys(w.licence for w in sets.values()))
        task = card.task.partition(":")[2]
        rows.append(f"| `{name}` | {task} | {card.parameters:,} | {tags} | {number} | {licences} |")
    return "\n".join(rows)


def tree() -> str:
    """Every folder and source file with its role: the first line of its docstring."""
    listed = subprocess.run(
        ["git", "ls-files", "-c", "-o", "--exclude-standard", *(f"{d}*.py" for d in ROLES)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = sorted(set(listed.stdout.split()))
    lines = []
    for folder, role in ROLES.items():
        lines.append(f"{folder:32} {role}")
        for file in files:
            if file.startswith(folder) and folder != "tests/" and (ROOT / file).is_file():
                doc = (ast.get_docstring(ast.parse((ROOT / file).read_text("utf-8"))) or "").split(
                    "\n"
                )[0]
                if not file.endswith("/__init__.py") or file.count("/") > 1:
                    lines.append(f"  {file.removeprefix(folder):30} {doc}")
    return "```\n" + "\n".join(lines) + "\n```"


def main() -> None:
    """Exit with 1 if --check finds README.md out of date."""
    path = ROOT / "README.md"
    text = old = path.read_text("utf-8")
    for name, content in (("models", table()), ("tree", tree())):
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not marks.search(text):
            sys.exit(f"README.md has no place for the {name}")
        text = marks.sub(lambda m, content=content: f"{m[1]}{content}\n{m[2]}", text)
    if "--check" in sys.argv:
        sys.exit("README.md is out of date; run python scripts/readme.py" if text != old else 0)
    path.write_text(text, "utf-8")


main()
