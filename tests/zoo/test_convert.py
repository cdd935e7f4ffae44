"""Pickled weights become safetensors bit for bit; code in them is named and never runs."""

from __future__ import annotations

import json
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


def shards(folder: Path, suffix: str = ".safetensors") -> Path:
    """Two shards with their index."""
    folder.mkdir(exist_ok=True)
    table: dict[str, str] = {}
    for number in (1, 2):
        name = f"model-{number:05}-of-00002{suffix}"
        part = {f"{key}{number}": torch.full((2,), float(number)) for key in "ab"}
        if suffix == ".bin":
            torch.save(part, folder / name)
        else:
            tensorfile.write(folder / name, part)
        table |= dict.fromkeys(part, name)
    path = folder / f"model{suffix}.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": table}))
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_shards_are_read_as_one(suffix: str, tmp_path: Path) -> None:
    found = convert.read_foreign(shards(tmp_path, suffix))
    assert {name: tensor.tolist() for name, tensor in found.tensors.items()} == {
        "a1": [1, 1], "b1": [1, 1], "a2": [2, 2], "b2": [2, 2],
    }  # fmt: skip
    assert found.folder == tmp_path
    assert [path.name for path in found.files] == [
        f"model-{number:05}-of-00002{suffix}" for number in (1, 2)
    ]
    assert found.header.tensors["a1"][:2] == ("F32", (2,))


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TABLE = {"a1": ONE, "b1": ONE, "a2": TWO, "b2": TWO}
WRONG_INDEXES: dict[str, tuple[object, str]] = {
    "no JSON": (b"{", "is no JSON"),
    "not UTF-8": (b'{"\xff": 1}', "is no JSON"),
    "nested": (b'{"a":' + b"[" * 100_000, "is no JSON"),
    "a list": ([], "no JSON object"),
    "empty": ({}, "no table 'weight_map'"),
    "no table": ({"weight_map": [ONE]}, "no table 'weight_map'"),
    "an empty table": ({"weight_map": {}}, "no table 'weight_map'"),
    "a table twice": (b'{"weight_map": {}, "weight_map": {}}', "'weight_map' twice"),
    "a name twice": (
        b'{"weight_map": {"a1": "x.bin", "\\u0061" : "y.bin", "a": "z.bin"}}',
        "names 'a' twice",
    ),
    "a number": ({"weight_map": {**TABLE, "a1": 1}}, "the shard 1"),
    "a list of shards": ({"weight_map": {**TABLE, "a1": [ONE, TWO]}}, "plain .safetensors"),
    "a parent folder": ({"weight_map": {**TABLE, "a1": f"../{ONE}"}}, "plain .safetensors"),
    "a folder": ({"weight_map": {**TABLE, "a1": f"sub/{ONE}"}}, "plain .safetensors"),
    "a root": ({"weight_map": {**TABLE, "a1": f"/{ONE}"}}, "plain .safetensors"),
    "a drive": ({"weight_map": {**TABLE, "a1": f"C:\\{ONE}"}}, "plain .safetensors"),
    "a zero byte": ({"weight_map": {**TABLE, "a1": f"{ONE}\0.safetensors"}}, "plain .safetensors"),
    "dots": ({"weight_map": {**TABLE, "a1": "..safetensors"}}, "plain .safetensors"),
    "another kind": ({"weight_map": {**TABLE, "a1": "model.py"}}, "plain .safetensors"),
    "a long name": ({"weight_map": {**TABLE, "a1": "x" * 300 + ".bin"}}, "plain .safetensors"),
    "itself": ({"weight_map": {**TABLE, "a1": "model.safetensors.index.json"}}, "plain"),
    "a missing shard": (
        {"weight_map": {**TABLE, "c": "model-00003-of-00003.safetensors"}},
        "1 shards that are not there",
    ),
    "a missing tensor": ({"weight_map": {**TABLE, "c1": ONE}}, "'c1'"),
    "a swapped tensor": ({"weight_map": {**TABLE, "a1": TWO}}, "'a1'"),
    "an extra tensor": ({"weight_map": {"a1": ONE, "a2": TWO, "b2": TWO}}, "holds 'b1'"),
    "an unlisted shard": (
        {"weight_map": {"a1": ONE, "b1": ONE}},
        f"does not name the shard '{TWO}",
    ),
}


@pytest.mark.parametrize("kind", WRONG_INDEXES)
def test_an_index_that_is_not_right_is_refused(kind: str, tmp_path: Path) -> None:
    value, words = WRONG_INDEXES[kind]
    index = shards(tmp_path)
    index.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    with pytest.raises(WeightsError) as raised:
        convert.read_foreign(index)
    assert words in raised.value.line
    assert raised.value.line.startswith(index.name)
    assert len(raised.value.line) <= 200


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    index = shards(tmp_path)
    tensorfile.write(tmp_path / TWO, {**tensors("a1"), **tensors("a2", "b2")})
    with pytest.raises(WeightsError, match=f"that holds 'a1', and this places it in '{ONE}'"):
        convert.read_foreign(index)


@pytest.mark.parametrize("content", [b"", b"<html>", b"\x80\2}q\0.", None])
def test_a_damaged_shard_is_refused_by_its_name(content: bytes | None, tmp_path: Path) -> None:
    index = shards(tmp_path)
    (tmp_path / TWO).unlink()
    if content is None:
        (tmp_path / TWO).mkdir()
    else:
        (tmp_path / TWO).write_bytes(content)
    with pytest.raises(WeightsError, match=f"^{TWO}"):
        convert.read_foreign(index)


def test_an_index_that_never_ends_is_refused(tmp_path: Path) -> None:
    index = shards(tmp_path)
    index.write_bytes(b'{"weight_map": {' + b" " * convert.MAX_JSON + b"}}")
    with pytest.raises(WeightsError, match="more than 16,777,216 bytes"):
        convert.read_foreign(index)
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(WeightsError, match="no regular file"):
        convert.read_foreign(index)


def test_the_one_set_in_a_folder_is_read_and_two_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="holds none of"):
        convert.read_foreign(tmp_path)
    tensorfile.write(tmp_path / "model.safetensors", tensors("a"))
    (tmp_path / "config.json").write_text("{}")
    tensorfile.write(tmp_path / "adapter.safetensors", tensors("b"))
    assert list(convert.read_foreign(tmp_path).tensors) == ["a"]
    torch.save(tensors("c"), tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"model\.safetensors and pytorch_model\.bin"):
        convert.read_foreign(tmp_path)
    assert list(convert.read_foreign(tmp_path / "pytorch_model.bin").tensors) == ["c"]
    (tmp_path / "model.safetensors").unlink()
    assert list(convert.read_foreign(tmp_path).tensors) == ["c"]


def test_safetensors_are_mapped_and_not_copied(tmp_path: Path) -> None:
    tensorfile.write(tmp_path / "a.safetensors", {"w": torch.ones(1 << 20), **tensors("odd")})
    found = convert.read_foreign(tmp_path / "a.safetensors").tensors
    pages = Path("/proc/self/maps").read_text()
    assert found["w"].sum() == 1 << 20
    assert str(tmp_path / "a.safetensors") in pages
