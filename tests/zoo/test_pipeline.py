"""Pipelines: one in, one out; a list in, a list out; nothing depends on the batch."""

from pathlib import Path

import numpy as np
import pytest
import torch

import zoo
from zoo.errors import ConfigError, DataError, WeightsUnavailableError, ZooError
from zoo.registry import evaluating


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    model = zoo.load("resnet18", width=8, num_classes=3)
    zoo.save(model, folder, labels=["ant", "bee", "cow"])
    return folder


def picture(height, width, seed):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_one_item_gives_one_answer_and_a_list_gives_a_list(saved):
    pipe = zoo.pipeline(saved)
    one = pipe(picture(40, 50, 0), top_k=2)
    assert [sorted(record) for record in one] == [["index", "label", "score"]] * 2
    assert one[0]["score"] >= one[1]["score"]
    assert one[0]["label"] in ("ant", "bee", "cow")
    many = pipe([picture(40, 50, 0)], top_k=2)
    assert many == [one]


def test_answers_come_in_the_order_of_the_items_whatever_their_sizes(saved):
    pipe = zoo.pipeline(saved, batch_size=3)
    pictures = [picture(20 + 7 * i, 90 - 3 * i, i) for i in range(11)]
    together = pipe(pictures)
    for item, answer in zip(pictures, together, strict=True):
        alone = pipe(item)
        assert [a["index"] for a in alone] == [a["index"] for a in answer]
        assert np.allclose([a["score"] for a in alone], [a["score"] for a in answer], atol=1e-5)


def test_a_pipeline_takes_a_loaded_model_too(saved):
    model = zoo.load(saved)
    assert zoo.pipeline(model)(picture(30, 30, 1)) == zoo.pipeline(saved)(picture(30, 30, 1))


def test_a_name_never_means_random_weights():
    with pytest.raises(WeightsUnavailableError):
        zoo.pipeline("resnet18")


def test_without_labels_a_class_is_called_by_its_index(tmp_path):
    model = zoo.load("resnet18", width=8, num_classes=3)
    assert {a["label"] for a in zoo.pipeline(model)(picture(30, 30, 1))} == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda pipe: pipe([]), DataError, "empty"),
        (lambda pipe: pipe("no/such.jpg"), DataError, "no/such.jpg"),
        (lambda pipe: pipe(Path(".")), DataError, "folder"),
        (lambda pipe: pipe([picture(9, 9, 0), "no/such.jpg"]), DataError, "item 1"),
        (lambda pipe: pipe(picture(9, 9, 0), topk=1), ConfigError, "top_k"),
        (lambda pipe: pipe(picture(9, 9, 0), top_k=0), ConfigError, "top_k"),
        (lambda pipe: pipe(None), DataError, "None"),
        (lambda pipe: zoo.pipeline(pipe.model, num_classes=3), ConfigError, "zoo.load"),
        (lambda pipe: zoo.pipeline(pipe.model, batch_size=0), ConfigError, "batch_size"),
        (lambda pipe: zoo.pipeline(torch.nn.Linear(1, 1)), ConfigError, "no card"),
    ],
)
def test_bad_input_is_answered_in_one_line(saved, call, error, words):
    with pytest.raises(error) as caught:
        call(zoo.pipeline(saved))
    assert words in caught.value.line
    assert len(caught.value.line) <= 200


def test_preprocessing_comes_from_the_card():
    prepare = zoo.preprocess("resnet50.imagenet1k_v2")
    grey = np.full((300, 400, 3), 128, np.uint8)
    one = prepare(grey)
    assert one.shape == (3, 224, 224)
    expected = torch.tensor([0.0741, 0.2052, 0.4265])
    assert torch.allclose(one[:, 100, 100], expected, atol=1e-4)
    batch = prepare([grey, grey])
    assert batch.shape == (2, 3, 224, 224)
    assert torch.equal(batch[0], one)


def test_preprocessing_of_a_model_follows_its_input_channels(saved):
    model = zoo.load("resnet18", width=8, in_channels=1)
    assert zoo.preprocess(model)(picture(30, 30, 1)).shape[0] == 1


def test_a_reduced_precision_model_answers_too(saved):
    exact, rough = zoo.pipeline(saved), zoo.pipeline(saved, dtype="bfloat16")
    assert rough(picture(30, 30, 1))[0]["score"] == pytest.approx(
        exact(picture(30, 30, 1))[0]["score"], abs=0.05
    )


def test_a_mask_is_filled_with_words_and_their_places():
    torch.manual_seed(0)
    pipe = zoo.pipeline("all-minilm-l6-v2", task="fill-mask")
    text = "Paris is the [MASK] of France."
    answer = pipe(text, top_k=3)
    assert [sorted(a) for a in answer] == [["end", "score", "start", "text"]] * 3
    assert text[answer[0]["start"] : answer[0]["end"]] == "[MASK]"
    assert [a["text"] for a in pipe([text, "A [MASK]."], top_k=3)[0]] == [a["text"] for a in answer]


def test_a_pipeline_answers_in_eval_mode_and_gives_the_mode_back(saved):
    model = zoo.load(saved).train()
    model.bn1.eval()
    pipe = zoo.pipeline(model)
    before = model.layer1[0].bn1.running_mean.clone()
    assert pipe(picture(30, 30, 1)) == zoo.pipeline(saved)(picture(30, 30, 1))
    assert torch.equal(before, model.layer1[0].bn1.running_mean)
    assert (model.training, model.bn1.training, model.layer1[0].training) == (True, False, True)


def test_threads_that_share_a_model_in_train_mode_all_answer_in_eval_mode(saved):
    model = zoo.load(saved).train()
    first, second = evaluating(model), evaluating(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # leaves while the other is still answering
    assert not any(module.training for module in model.modules())
    second.__exit__(None, None, None)
    assert all(module.training for module in model.modules())


def test_the_path_of_a_saved_model_may_be_text_or_a_path(saved):
    item = picture(30, 30, 1)
    assert zoo.pipeline(str(saved))(item) == zoo.pipeline(saved)(item)
    assert zoo.load(str(saved)).card.tag == "saved"


def test_a_model_without_a_tokenizer_says_how_to_get_one():
    model = zoo.load("all-minilm-l6-v2", pretrained=False, num_layers=1)
    with pytest.raises(ZooError, match=r"all-minilm-l6-v2\.sbert"):
        zoo.pipeline(model)("text")
