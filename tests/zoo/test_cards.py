"""Reading cards: strict, explained, without torch."""

import textwrap

import pytest

import zoo
from tests.zoo.conftest import GOOD
from zoo import cards
from zoo.config import field_types
from zoo.errors import CardError, UnknownModelError, ZooError


def read(tmp_path, text, name="net"):
    path = tmp_path / f"{name}.toml"
    path.write_text(textwrap.dedent(text))
    return cards.read_card(path)


def test_a_card_mirrors_its_keys_as_attributes(tmp_path):
    card = read(tmp_path, GOOD)
    assert card.name == "net"
    assert card.config == {"depths": (1, 1, 1, 1)} or card.config == {"depths": [1, 1, 1, 1]}
    assert card.weights["one"].files[0].size == 10
    assert card.inputs["image"].shape == ("batch", 3, "height", "width")
    assert card.domain == "vision"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("summary", "sumary", ["sumary", "summary"]),
        ("parameters = 10", 'parameters = "10"', ["parameters", "whole number"]),
        ("parameters = 10", "parameters = 10\nparameters = 11", ["TOML"]),
        ('paper = "https://example.org"', "", ["lacks", "paper"]),
        ("vision.resnet:ResNet", "vision.resnet.ResNet", ["package.module:Class"]),
        ('"float32"\nshape = ["batch", 3', '"float23"\nshape = ["batch", 3', ["float32"]),
        ("licence", "license", ["license", "licence"]),
        ("[weights.one]", "[weights.One]", ["One", "tag"]),
        ("a.safetensors", "../a.safetensors", ["plain file name"]),
        ("a.safetensors", "/etc/passwd", ["plain file name"]),
        ('sha256 = "' + "0" * 64, 'sha256 = "' + "0" * 63, ["63", "64"]),
        ('sha256 = "' + "0" * 64, 'sha256 = "' + "Z" * 64, ["sha256"]),
        (', sha256 = "' + "0" * 64 + '"', "", ["no sha256"]),
        ('["batch", 3, "height", "width"]', "[]", ["image", "shape"]),
        ('["batch", 3, "height", "width"]', '["batch", 0]', ["image", "shape"]),
        ("batch = 2,", "batch = -2,", ["image", "sizes from 1"]),
        ("parameters = 10", "parameters = 1" + "0" * 40, ["64"]),
        ("[1, 1, 1, 1]", "[1, 1, 1, 1" + "0" * 40 + "]", ["64"]),
        (
            "files =",
            "default = true\nsources = [{kind='https', url='https://a/'}]\nfiles =",
            ["default"],
        ),
        ("files =", "sources = [{kind='hub', repo='a/b', revision='main'}]\nfiles =", ["40 hex"]),
        ("files = [{", "sources = [{kind='https', url='http://a.b/'}]\nfiles = [{", ["https://"]),
        ("files = [{", "sources = [{kind='ftp', url='x'}]\nfiles = [{", ["package", "hub"]),
    ],
)  # fmt: skip
def test_a_fault_in_a_card_is_one_line_that_names_it(tmp_path, old, new, words):
    assert old in GOOD
    with pytest.raises(CardError) as caught:
        read(tmp_path, GOOD.replace(old, new, 1))
    assert len(caught.value.line) <= 200
    assert "net" in caught.value.line
    for word in words:
        assert word in caught.value.line


def test_a_card_that_is_not_text_is_a_card_error(tmp_path):
    path = tmp_path / "net.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CardError):
        cards.read_card(path)
    with pytest.raises(CardError, match="cannot read"):
        cards.read_card(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("resnet51", "resnet50"),
        ("resnet_50", "resnet50"),
        ("ResNet50", "resnet50"),
        ("resnet50.nope", "imagenet1k_v1"),
        ("resnet50.", "not a model's name"),
        ("../resnet50", "resnet50"),
        ("", "list_models"),
        ("a/b/c", "not a model's name"),
        ("x" * 300, "…"),
        ("all-minilm-l6-v3", "all-minilm-l6-v2"),
    ],
)
def test_an_unknown_name_gets_the_nearest_ones(name, hint):
    with pytest.raises(UnknownModelError) as caught:
        zoo.card(name)
    assert hint in caught.value.line
    assert len(caught.value.line) <= 200
    assert isinstance(caught.value, LookupError)


def test_a_name_must_be_text():
    with pytest.raises(UnknownModelError, match="is a string"):
        zoo.card(50)


def test_models_are_listed_in_natural_order_by_pattern_and_domain():
    names = zoo.list_models("resnet*")
    assert names == ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
    assert set(zoo.list_models(domain="nlp")) >= {"all-minilm-l6-v2", "bert-base-uncased"}
    assert zoo.list_models("nothing*") == []
    assert zoo.list_models(domain="nowhere") == []


def test_weights_are_listed_by_full_name():
    assert {"resnet50.imagenet1k_v1", "resnet50.imagenet1k_v2"} <= set(zoo.list_weights("resnet50"))


def test_a_tag_narrows_the_card():
    card = zoo.card("resnet50.imagenet1k_v2")
    assert list(card.weights) == ["imagenet1k_v2"]
    assert card.labels[:2] == ("tench", "goldfish")
    assert len(card.labels) == 1000
    assert card.preprocessing["size"] == 232


@pytest.mark.parametrize("error", ZooError.__subclasses__())
def test_every_error_is_also_a_built_in_and_survives_pickling(error):
    import copy

    made = error("one\nline " + "x" * 300, "a detail")
    assert len(made.line) <= 200
    assert "\n" not in made.line
    assert str(copy.copy(made)) == str(made)
    built_in = (LookupError, RuntimeError, ValueError, ImportError, ArithmeticError)
    assert any(issubclass(error, base) for base in built_in)


def test_the_card_format_is_documented_field_by_field():
    import re

    text = (cards.CARDS / "README.md").read_text("utf-8")
    for part in (
        cards.Card,
        cards.Weights,
        cards.File,
        cards.Source,
        cards.Metric,
        cards.TensorSpec,
        cards.Check,
    ):
        for field in field_types(part):
            assert re.search(rf"[`\[. ]{field}[`.\] ]", text), (
                f"{part.__name__}.{field} is not explained"
            )
