"""Every number on every card with installed weights, measured again on the real data."""

import os

import pytest

import zoo
from zoo import evaluation

pytestmark = [
    pytest.mark.accuracy,
    pytest.mark.untyped,
    pytest.mark.skipif("ZOO_DATA" not in os.environ, reason="ZOO_DATA names no data folder"),
]

CARDS = evaluation.evaluated_cards()


def test_there_are_trained_weights_to_measure():
    assert {"efficientnet_lite0.imagenet1k", "all-minilm-l6-v2.sbert"} <= {
        c.full_name for c in CARDS
    }


@pytest.mark.parametrize("name", [card.full_name for card in CARDS])
def test_the_card_states_what_is_measured(name):
    measured = list(evaluation.evaluate(name))
    assert measured
    assert all(result.same_data for result in measured), "other bytes of the data set"
    assert [str(r) for r in measured if not r.passed] == []


def test_symmetric_padding_would_be_the_wrong_network():
    """The bar of 0.86 tells TensorFlow's padding (0.866) from the symmetric one (about 0.80)."""
    top1 = next(
        m
        for m in zoo.card("efficientnet_lite0.imagenet1k").weights["imagenet1k"].metrics
        if m.name.endswith("top1")
    )
    assert top1.value >= 0.86


def test_what_lies_in_a_folder_is_measured_and_not_the_weights_of_its_name(tmp_path):
    stated, *_ = zoo.card("ppo-cartpole.v1").weights["v1"].metrics
    policy = zoo.load("ppo-cartpole.v1")
    for parameter in policy.parameters():
        parameter.data.zero_()
    zoo.save(policy, tmp_path / "policy")
    place = stated.name.rpartition("/")[0]
    values = {m.metric: m.value for m in evaluation.evaluate(str(tmp_path / "policy"), data=place)}
    assert values[stated.name] < 20 < stated.value
