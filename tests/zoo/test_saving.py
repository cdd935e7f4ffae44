"""A saved folder opens everywhere and never half-replaces another."""

import pytest
import torch

import zoo
from zoo import tensorfile
from zoo.errors import ConfigError


@pytest.fixture
def model():
    return zoo.load("resnet18", width=8, num_classes=3)


def test_a_saved_model_is_the_same_model(model, tmp_path):
    zoo.save(model, tmp_path / "mine", labels=["a", "b", "c"])
    loaded = zoo.load(tmp_path / "mine")
    image = torch.randn(2, 3, 64, 64)
    assert torch.equal(model(image), loaded(image))
    assert loaded.card.labels == ("a", "b", "c")
    assert loaded.card.parameters == sum(p.numel() for p in model.parameters())
    assert loaded.load_report.verified in ("hashed now", "hashed before")


def test_saving_again_replaces_and_leaves_no_other_file(model, tmp_path):
    for _ in range(2):
        zoo.save(model, tmp_path)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".safetensors", ".toml"]


def test_what_another_library_reads_is_what_was_saved(model, tmp_path):
    from safetensors.torch import load_file

    zoo.save(model, tmp_path)
    tensors = load_file(next(tmp_path.glob("*.safetensors")))
    assert set(tensors) == set(model.state_dict())
    assert all(torch.equal(tensors[k], v) for k, v in model.state_dict().items())


def test_a_trained_model_keeps_its_preprocessing_and_loses_its_numbers(tmp_path):
    model = zoo.load("efficientnet_lite0", pretrained=True, num_classes=2)
    zoo.save(model, tmp_path, labels=["cat", "dog"])
    card = zoo.load(tmp_path).card
    assert card.preprocessing["crop"] == 224
    assert card.weights[card.tag].metrics == ()
    assert card.labels == ("cat", "dog")
    assert card.weights[card.tag].licence == "Apache-2.0"


def test_a_saved_text_model_carries_its_tokenizer(tmp_path, monkeypatch):
    model = zoo.load("all-minilm-l6-v2", pretrained=True)
    zoo.save(model, tmp_path)
    pipe = zoo.pipeline(tmp_path)
    text = "A folder that is complete."
    assert (pipe(text) == zoo.pipeline("all-minilm-l6-v2")(text)).all()
    assert any("tokenizer" in p.name for p in tmp_path.iterdir())


def test_the_canonical_bytes_do_not_depend_on_strides(model, tmp_path):
    zoo.save(model, tmp_path / "one")
    zoo.save(model.to(memory_format=torch.channels_last), tmp_path / "two")
    one, two = (next((tmp_path / f).glob("*.safetensors")).read_bytes() for f in ("one", "two"))
    assert one == two


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["a"], "1 labels for 3 classes"),
        (["a", "b", ""], "empty"),
        (["a", "b", "c\nd"], "one line each"),
        (["a", "b", "c\r"], "unprintable"),
        (["a", "b", "\ud800"], "unprintable"),
    ],
)
def test_labels_that_do_not_fit_are_refused_before_anything_is_written(
    model, tmp_path, labels, words
):
    with pytest.raises(ConfigError, match=words):
        zoo.save(model, tmp_path / "mine", labels=labels)
    assert not (tmp_path / "mine").exists()


def test_a_folder_of_another_model_is_refused(model, tmp_path):
    zoo.save(model, tmp_path)
    other = zoo.load("resnet34", width=8)
    with pytest.raises(ConfigError, match=r"resnet18\.toml"):
        zoo.save(other, tmp_path)
    assert zoo.load(tmp_path).card.name == "resnet18"


def test_a_file_in_the_place_of_the_folder_is_refused(model, tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ConfigError, match="is a file"):
        zoo.save(model, tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_module_without_a_card_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no card"):
        zoo.save(torch.nn.Linear(1, 1), tmp_path)


def test_a_failure_while_writing_keeps_the_old_model(model, tmp_path, monkeypatch):
    zoo.save(model, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        zoo.save(zoo.load("resnet18", width=8, num_classes=3), tmp_path)
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_the_file_says_where_it_came_from(model, tmp_path):
    zoo.save(model, tmp_path)
    with next(tmp_path.glob("*.safetensors")).open("rb") as file:
        header = tensorfile.read_header(file, "x")
    assert header.metadata["saved_from"] == "resnet18"
    assert all(t.start % 64 == 0 for t in header.tensors.values() if (t.end - t.start) % 64 == 0)


@pytest.mark.parametrize("labels", [[0, 1, 2], "abc", {0: "a", 1: "b", 2: "c"}])
def test_labels_are_a_list_of_names(model, tmp_path, labels):
    with pytest.raises(ConfigError, match="list of names"):
        zoo.save(model, tmp_path / "mine", labels=labels)


def test_a_model_whose_layer_was_exchanged_is_refused(model, tmp_path):
    model.fc = torch.nn.Linear(64, 5)
    with pytest.raises(ConfigError, match=r"fc\.weight is \(5, 64\) here and \(3, 64\)"):
        zoo.save(model, tmp_path / "mine")


def test_a_saved_card_says_what_it_was_made_from(tmp_path):
    model = zoo.load("all-minilm-l6-v2", pretrained=True, task="text-classification", num_classes=2)
    zoo.save(model, tmp_path, labels=["no", "yes"])
    card = zoo.load(tmp_path).card
    assert card.weights["saved"].origin["saved_from"] == "all-minilm-l6-v2.sbert"
    assert "text-classification" in card.summary
    assert list(card.inputs) == ["input_ids", "attention_mask", "token_type_ids"]


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import torch, zoo
torch.set_num_threads(1)
folder, kills = Path(sys.argv[1]), int(sys.argv[2])
models = []
for value in (1.0, 2.0):
    model = zoo.load("resnet18", width=8, num_classes=2)
    with torch.no_grad():
        model.fc.bias.fill_(value)
    models.append((model, [f"{value}", "other"]))
zoo.save(models[0][0], folder, labels=models[0][1])
random.seed(0)
for kill in range(kills):
    child = os.fork()
    if child == 0:
        while True:
            for model, labels in models:
                zoo.save(model, folder, labels=labels)
    time.sleep(random.uniform(0.01, 0.12))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = zoo.load(folder)
    assert found.card.labels[0] == f"{float(found.fc.bias[0])}", "labels of another save"
    left = len([p for p in folder.rglob("*") if p.is_file()])
    assert left <= 10, f"{left} files left"
zoo.save(models[0][0], folder, labels=models[0][1])
print(sorted(p.suffix for p in folder.rglob("*") if p.is_file()))
"""


@pytest.mark.parametrize(
    "kills", [40, pytest.param(1000, marks=[pytest.mark.prove, pytest.mark.untyped])]
)
def test_a_kill_at_any_instant_leaves_the_old_model_or_the_new_one(fresh_python, tmp_path, kills):
    out = fresh_python(KILLS, str(tmp_path / "mine"), str(kills))
    assert out.strip() == "['.safetensors', '.toml', '.txt']"


def test_processes_that_save_into_one_folder_leave_one_whole_model(fresh_python, tmp_path):
    code = (
        KILLS.partition("random.seed(0)")[0]
        + """
children = []
for number in range(4):
    child = os.fork()
    if child == 0:
        for _ in range(5):
            model, labels = models[number % 2]
            zoo.save(model, folder, labels=labels)
        os._exit(0)
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
found = zoo.load(folder)
assert found.card.labels[0] == f"{float(found.fc.bias[0])}"
print(sorted(p.suffix for p in folder.rglob("*") if p.is_file()))
"""
    )
    assert (
        fresh_python(code, str(tmp_path / "mine"), "0").strip()
        == "['.safetensors', '.toml', '.txt']"
    )


def test_a_folder_given_relative_to_here_stays_the_same_folder(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zoo.save(model, "mine", labels=["a", "b", "c"])
    loaded = zoo.load("mine")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert loaded.card.labels == ("a", "b", "c")
