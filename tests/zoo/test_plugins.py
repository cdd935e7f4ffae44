"""Plug-ins: found by their metadata alone, and no broken one breaks the zoo."""

import os
import sys
import warnings

import pytest

import zoo
from tests.zoo.conftest import GOOD
from zoo import cards
from zoo.cli import main
from zoo.errors import UnknownModelError


def plugin(folder, name, value, *, package="theirs_models/cards"):
    """Install a distribution by hand: a package with a card, and its entry point."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[zoo.cards]\n{name} = {value}\n")
    if package:
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").touch()
        (folder / package.partition("/")[0] / "__init__.py").touch()
        (folder / package / "net.toml").write_text(GOOD)


def test_a_plug_in_adds_its_cards_under_its_name(tmp_path, monkeypatch):
    plugin(tmp_path, "theirs", "theirs_models.cards")
    monkeypatch.syspath_prepend(tmp_path)
    assert "theirs/net" in zoo.list_models()
    assert zoo.card("theirs/net.one").full_name == "theirs/net.one"
    with pytest.raises(UnknownModelError, match="theirs/net"):
        zoo.card("theirs/nett")


def test_a_broken_plug_in_is_one_warning(tmp_path, monkeypatch):
    plugin(tmp_path, "broken", "no_such_package.cards", package=None)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="broken") as caught:
        names = zoo.list_models()
    assert len([w for w in caught if "plug-in" in str(w.message)]) == 1
    assert "resnet50" in names


def test_cards_of_a_plug_in_that_cannot_be_read_are_one_warning_each(tmp_path, monkeypatch, capsys):
    plugin(tmp_path, "theirs", "theirs_models.cards")
    folder = tmp_path / "theirs_models" / "cards"
    (folder / "Bad Name.toml").write_text(GOOD)
    (folder / "dotted.name.toml").write_text(GOOD)
    (folder / "digits.toml").write_text(f"x = {'9' * 5000}")
    (folder / "hex.toml").write_text(GOOD.replace("= 10\n", f"= 0x{'f' * 5000}\n"))
    (folder / "deep.toml").write_text(f"x = {'[' * 3000}{']' * 3000}")
    (folder / "large.toml").write_text(f"# {'x' * cards.MAX_BYTES}")
    os.mkfifo(folder / "pipe.toml")
    (folder / "folder.toml").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with (
        pytest.warns(UserWarning, match="cannot be a model's name") as caught,
        pytest.raises(SystemExit) as ended,
    ):
        main(["list"])
    assert ended.value.code == 0
    assert len({str(w.message) for w in caught}) == 2
    out, err = capsys.readouterr()
    assert {"theirs/net", "resnet50"} <= {line.split()[0] for line in out.splitlines()}
    lines = err.splitlines()
    for name in ("digits", "hex", "deep", "large", "pipe", "folder"):
        assert len([line for line in lines if name in line and len(line) <= 210]) == 1, name
    assert len(lines) == 6


@pytest.mark.parametrize(
    "text",
    [
        b"[zoo.cards]\nno equals sign\n",
        b"[zoo.cards]\nname = \xff\n",
        b"[zoo.cards]\nx = a.b:attribute\n",
        b"[zoo.cards]\nx = ../up\n",
        b"[zoo.cards]\nx = __main__\n",
        b"[zoo.cards]\nUpper = theirs_models.cards\n",
    ],
)
def test_malformed_entry_points_are_one_warning(tmp_path, monkeypatch, text):
    plugin(tmp_path, "theirs", "theirs_models.cards")
    (tmp_path / "odd-1.0.dist-info").mkdir()
    (tmp_path / "odd-1.0.dist-info" / "entry_points.txt").write_bytes(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="ignored") as caught:
        names = zoo.list_models()
    assert len(caught) == 1
    assert {"theirs/net", "resnet50"} <= set(names)


def test_finding_a_plug_in_imports_nothing_of_it(tmp_path, monkeypatch):
    plugin(tmp_path, "loud", "loud_models.inner.cards", package="loud_models/inner/cards")
    (tmp_path / "loud_models" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "loud/net" in zoo.list_models()
    assert "loud_models" not in sys.modules


def test_a_plug_in_may_be_a_folder_without_an_init_file(tmp_path, monkeypatch):
    plugin(tmp_path, "bare", "bare_models.inner.cards", package="bare_models/inner/cards")
    for path in tmp_path.rglob("__init__.py"):
        path.unlink()
    monkeypatch.syspath_prepend(tmp_path)
    assert zoo.card("bare/net").name == "bare/net"


def test_without_plug_ins_there_is_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zoo.list_models()
