"""Pickled weights become safetensors bit for bit; code in them is named and never runs."""

from __future__ import annotations

import logging
import os
import stat
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zoo import convert, files, tensorfile
from zoo.errors import WeightsError


class Evil:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Temporary files go here, and none may stay."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.iterdir())


def saved(folder: Path, value: object, **options: Any) -> Path:
    path = folder / "model.pth"
    torch.save(value, path, **options)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(WeightsError) as raised:
        convert.pickled_to_tensors(path)
    assert raised.value.line.startswith(path.name)
    assert len(raised.value.line) <= 200
    return raised.value.line


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "bare pickle"])
def test_code_in_a_file_is_named_and_does_not_run(zipped: bool, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    value = {"w": torch.zeros(2), "x": Evil(mark)}
    path = saved(tmp_path, value, _use_new_zipfile_serialization=zipped)
    assert "posix.system, which was not run" in refusal(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "the file is harmless, and this test proves nothing"


def test_a_training_checkpoint_becomes_the_file_of_its_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    state = OrderedDict(
        weight=nn.Parameter(shared),
        tied=shared,
        row=shared[1],
        transposed=torch.arange(6.0).view(2, 3).t(),
        half=torch.tensor([1.5, float("nan"), float("-inf")], dtype=torch.float16),
        brain=torch.tensor([1e-3, 3e38], dtype=torch.bfloat16),
        steps=torch.tensor(2**53 + 1),
        mask=torch.tensor([True, False]),
        empty=torch.zeros(0, 4),
    )
    source = saved(tmp_path, {"epoch": 3, "model": state, "optimizer": {"lr": 0.1}})
    with caplog.at_level(logging.WARNING):
        size, sha256 = convert.convert_file(source, tmp_path / "a.safetensors")
    assert "model.pth: took model/, left out 'epoch', 'optimizer'" in caplog.text

    target = tmp_path / "a.safetensors"
    assert (size, sha256) == (target.stat().st_size, files.sha256_of(target))
    with target.open("rb") as file:
        header = tensorfile.read_header(file, "a")
        found = tensorfile.read_tensors(file, header)
    assert header.metadata == {}
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        bits = torch.uint8
        assert torch.equal(
            found[name].reshape(-1).view(bits), tensor.detach().reshape(-1).view(bits)
        )

    caplog.clear()
    plain = saved(tmp_path, dict(reversed(state.items())), _use_new_zipfile_serialization=False)
    assert convert.convert_file(plain, tmp_path / "b.safetensors") == (size, sha256)
    assert not caplog.records


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (nn.Linear(2, 2), "names code, torch.nn.modules.linear.Linear, which was not run"),
        ({"w": torch.zeros(2), "version": 1}, "it holds int 'version'"),
        ({"w": torch.zeros(1).expand(1 << 31, 2)}, "takes far more memory than its size explains"),
    ],
    ids=["a module", "an entry that is no tensor", "more than memory holds"],
)
def test_what_is_no_state_dict_is_refused(value: Any, words: str, tmp_path: Path) -> None:
    assert words in refusal(saved(tmp_path, value))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.zeros(1000)})
    path.write_bytes(path.read_bytes()[:-1000])
    assert "cannot be read as PyTorch weights" in refusal(path)


def tensors(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(1) for name in names}


@pytest.mark.parametrize(
    ("loaded", "names", "taken", "left_out"),
    [
        (tensors("a", "b"), ["a", "b"], "", []),
        (tensors("model", "state_dict"), ["model", "state_dict"], "", []),
        ({"state_dict": tensors("a")}, ["a"], "state_dict/", []),
        ({"model": {"state_dict": tensors("a")}, "e": 1}, ["a"], "model/state_dict/", ["e"]),
        (
            {"model": {"state_dict": tensors("a"), "args": 0}, "mean": torch.zeros(1)},
            ["a"],
            "model/state_dict/",
            ["mean", "model/args"],
        ),
    ],
)
def test_the_state_dict_is_found(
    loaded: Any, names: list[str], taken: str, left_out: list[str]
) -> None:
    found, *rest = convert.state_dict_in(loaded, "x.pth")
    assert list(found) == names
    assert rest == [taken, left_out]


@pytest.mark.parametrize(
    ("loaded", "words"),
    [
        ([torch.zeros(1)], "x.pth holds a list, not a table"),
        (torch.zeros(1), "x.pth holds a Tensor, not a table"),
        ({}, "it holds nothing"),
        ({"model": {}}, "it holds nothing"),
        ({"encoder": tensors("a"), "decoder": tensors("a")}, "it holds dict 'encoder'"),
        ({"state_dict": tensors("a"), "model": tensors("a")}, "under state_dict and model"),
        ({"model": {"a": torch.zeros(1), "b": None}}, "it holds NoneType 'b'"),
        ({1: torch.zeros(1)}, "names a tensor 1, not by a string"),
    ],
)
def test_what_is_in_the_way_of_a_state_dict_is_named(loaded: Any, words: str) -> None:
    with pytest.raises(WeightsError, match=r"^x\.pth ") as raised:
        convert.state_dict_in(loaded, "x.pth")
    assert words in raised.value.line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "run git lfs pull"),
        (b"<html>", "an HTML page"),
        (b"\x80\x70\0\0\0\0\0\0{" + b" " * 99, "a safetensors file already"),
    ],
)
def test_what_pytorch_did_not_write_is_named_without_a_child(
    content: bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    assert words in refusal(path)
    with pytest.raises(WeightsError, match="cannot be opened"):
        convert.pickled_to_tensors(tmp_path / "none.bin")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill -9 $$", "ended by SIGKILL"),
        ("echo much >&2; echo reason >&2; exit 3", "ended with status 3 and said reason"),
        ("exit 0", "ended with status 0 and said nothing"),
        ("exec sleep 60", "took longer than 0.5 s"),
    ],
    ids=["killed", "failed", "lied", "hung"],
)
def test_a_child_that_dies_is_an_error_and_leaves_nothing(
    script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    # The arguments end in source, tensors, report: half a tensor file is there when the child dies.
    python.write_text(f'#!/bin/sh\nshift 6\necho half > "$1"\nexec sh -c "{script}"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(convert, "TIME_LIMIT", 0.5)
    source = saved(tmp_path, tensors("a"))
    before = source.read_bytes()
    assert words in refusal(source)
    assert source.read_bytes() == before


def test_a_failed_conversion_leaves_the_old_target(tmp_path: Path) -> None:
    target = tmp_path / "old.safetensors"
    target.write_bytes(b"old")
    source = tmp_path / "model.pth"
    source.write_bytes(b"<html>")
    with pytest.raises(WeightsError, match="an HTML page"):
        convert.convert_file(source, target)
    assert target.read_bytes() == b"old"
