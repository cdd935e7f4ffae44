"""A saved folder opens everywhere and never half-replaces another."""

from dataclasses import replace

import pytest
import torch

import zoo
from zoo import cards, tensorfile
from zoo.errors import CardError, ConfigError, WeightsUnavailableError


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


def floating_counter(model):
    model.bn1.num_batches_tracked = model.bn1.num_batches_tracked.float()


def tied_by_hand(model):
    model.layer1[1].conv1.weight = model.layer1[0].conv1.weight


def odd_summary(model):
    model.card = replace(model.card, summary=None)


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (None, {"licence": 3}, "licence is 3"),
        (floating_counter, {}, r"bn1.num_batches_tracked is floating-point here and int64"),
        (tied_by_hand, {}, r"layer1\.1\.conv1\.weight and layer1\.0\.conv1\.weight are one tensor"),
        (odd_summary, {}, "cannot be saved"),
    ],
)
def test_what_would_not_read_back_is_refused_before_anything_is_replaced(
    model, tmp_path, change, options, words
):
    zoo.save(model, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    other = zoo.load("resnet18", width=8, num_classes=3)
    if change:
        change(other)
    with pytest.raises(ConfigError, match=words) as caught:
        zoo.save(other, tmp_path, **options)
    assert len(caught.value.line) <= 200
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_model_that_changes_while_it_is_saved_leaves_the_old_one(model, tmp_path, monkeypatch):
    zoo.save(model, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    encoded = tensorfile.encoded

    def trained_further(*arguments, **options):
        with torch.no_grad():
            model.fc.bias.add_(1)
        return encoded(*arguments, **options)

    monkeypatch.setattr(tensorfile, "encoded", trained_further)
    with pytest.raises(ConfigError, match="changed while it was saved"):
        zoo.save(model, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_labels_may_hold_the_joiners_and_every_kind_of_space(model, tmp_path):
    names = [
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        "\u0915\u094d\u200d\u0937",
        "a\u00a0b\u3000c",
    ]
    zoo.save(model, tmp_path, labels=names)
    assert zoo.load(tmp_path).card.labels == tuple(names)
    for wrong in ("a\u2028b", "a\x85b", "a\x00", "\u202ea", "\u200d"):
        with pytest.raises(ConfigError, match="unprintable"):
            zoo.save(model, tmp_path, labels=[*names[:2], wrong])


def test_labels_that_were_changed_are_found_by_their_name(model, tmp_path):
    zoo.save(model, tmp_path, labels=["a", "b", "c"])
    path = next((tmp_path / "labels").iterdir())
    path.write_bytes(b"b\na\nc\n")
    with pytest.raises(CardError, match=r"resnet18.*\.txt.*changed since"):
        zoo.load(tmp_path)
    path.write_bytes(b"\xff\n")
    with pytest.raises(CardError, match="cannot read the labels"):
        zoo.load(tmp_path)


def test_only_files_that_saving_writes_are_removed(model, tmp_path):
    zoo.save(model, tmp_path, labels=["a", "b", "c"])
    name = f"resnet18.{'0' * 12}"
    for mine in (f"{name}.onnx", f"{name}.txt", f"labels/{name}.csv", f"labels/{name}.safetensors"):
        (tmp_path / mine).write_text("mine")
    for left in (f"{name}.safetensors", f"labels/{name}.txt"):
        (tmp_path / left).write_text("of a save that was killed")
    zoo.save(model, tmp_path, labels=["a", "b", "d"])
    held = [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()]
    assert f"{name}.onnx" in held
    assert len([n for n in held if name in n]) == 4
    assert len(held) == 4 + 3


def test_a_model_knows_its_labels_after_its_folder_was_replaced(model, tmp_path):
    zoo.save(model, tmp_path, labels=["a", "b", "c"])
    loaded = zoo.load(tmp_path)
    zoo.save(model, tmp_path, labels=["d", "e", "f"])
    assert loaded.card.labels == ("a", "b", "c")
    assert zoo.load(tmp_path).card.labels == ("d", "e", "f")


@pytest.mark.parametrize("opened", [zoo.load, zoo.pipeline, zoo.preprocess])
def test_a_save_between_the_card_and_its_files_is_read_again(model, tmp_path, monkeypatch, opened):
    zoo.save(model, tmp_path, labels=["a", "b", "c"])
    read, saves = cards.read_card, iter(["def", "ghi"])

    def overtaken(path, **options):
        found = read(path, **options)
        if path.parent == tmp_path and (labels := next(saves, None)):
            with torch.no_grad():
                model.fc.bias.add_(1)
            zoo.save(model, tmp_path, labels=list(labels))
        return found

    monkeypatch.setattr(cards, "read_card", overtaken)
    found = opened(tmp_path)
    assert next(saves, "none") == "none"
    if opened is zoo.load:
        assert found.card.labels == ("g", "h", "i")
        assert torch.equal(found.fc.bias, model.fc.bias)


def test_a_damaged_model_that_nobody_replaces_is_read_once(model, tmp_path):
    zoo.save(model, tmp_path)
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(WeightsUnavailableError, match="not installed"):
        zoo.load(tmp_path)


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
