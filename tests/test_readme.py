"""README is true: its first lines run, its table and tree are the cards and the files."""

import os
import re
import subprocess
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def python_blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_it_opens_with_one_sentence_and_five_working_lines(fresh_python):
    block = python_blocks(README)[0]
    assert README.index("```python") < 500
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) == 5
    out = fresh_python(block)
    first, second, third = (float(x) for x in re.findall(r"[-\d.]+", out.splitlines()[0]))
    assert first > second > third
    assert "resnet50" in out


def test_the_lines_under_use_run(fresh_python, tmp_path):
    code = "import zoo\n" + python_blocks(README)[1].replace('"mine/"', "folder + '/mine'").replace(
        '"out/"', "folder"
    )
    fresh_python("import sys; folder = sys.argv[1]\n" + code, str(tmp_path))
    assert {p.suffix for p in tmp_path.rglob("*.*")} >= {".safetensors", ".toml", ".onnx"}


def test_the_lines_under_train_run(fresh_python, tmp_path):
    for color in ("red", "blue"):
        (tmp_path / color).mkdir()
        for index in range(5):
            Image.new("RGB", (48, 40 + index), color).save(tmp_path / color / f"{index}.png")
    code = "import sys, zoo; folder = sys.argv[1]\n" + python_blocks(README)[2]
    code = code.replace('"photos/", epochs=5', "folder, epochs=1, out=folder + '-run'")
    out = fresh_python(code + "print(done.metrics)\n", str(tmp_path))
    assert "validation/top1" in out


def test_table_and_tree_are_those_of_the_cards_and_the_files():
    done = subprocess.run(
        [sys.executable, "scripts/readme.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_documents_name_no_machine_and_no_registry_host():
    words = re.compile(
        r"/work/|/root/|/tmp/|/opt/|pypi\.org|files\.pythonhosted|registry\.npmjs", re.IGNORECASE
    )
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in listed.split():
        path = ROOT / name
        if (
            path.suffix in (".md", ".py", ".toml", ".txt")
            and path.is_file()
            and path != Path(__file__)
        ):
            assert not words.search(path.read_text("utf-8")), name


def test_what_contributing_says_adds_a_model(tmp_path):
    """Follow the two steps outside the repository, as a plug-in; every promise must hold."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    family = re.search(r"   ```python\n(.*?)   ```", text, re.DOTALL)[1]
    card = re.search(r"   ```toml\n(   model .*?)   ```", text, re.DOTALL)[1]
    package = tmp_path / "their_package"
    (package / "cards").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "cards" / "__init__.py").touch()
    (package / "toynet.py").write_text(re.sub(r"^   ", "", family, flags=re.MULTILINE))
    dedented = re.sub(r"^   ", "", card, flags=re.MULTILINE)
    (package / "cards" / "toynet.toml").write_text(
        dedented.replace("vision.toynet", "their_package.toynet")
    )
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[zoo.cards]\ntheirs = their_package.cards\n")
    done = subprocess.run(
        [sys.executable, "-m", "zoo", "check", "theirs/toynet"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "ZOO_SHAPES": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "14 of 14 promises kept" in done.stdout
