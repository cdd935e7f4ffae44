"""A folder that Hugging Face transformers opens: tensors, ``config.json`` and the tokenizer.

The tensors keep the names that the family shares with transformers, so that nothing is converted
and nothing is missing. A family that can be written has `to_transformers` and `from_transformers`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zoo import files, tensorfile
from zoo.convert import read_foreign, read_json
from zoo.errors import ExportError
from zoo.export.parity import Run
from zoo.export.program import flat
from zoo.registry import card_of
from zoo.saving import state_of
from zoo.weights import find_file

TENSORS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


def write(model: nn.Module, folder: Path) -> None:
    """Write what transformers reads.

    Args:
        model: What `zoo.load` gave, trained further or not.
        folder: It is there.

    Raises:
        ExportError: transformers has no such model.
        WeightsError: The tokenizer is not there.
    """
    card, describe = card_of(model), getattr(model, "to_transformers", None)
    if describe is None:
        raise ExportError(f"{card.full_name} is none of the models that transformers has")
    tensorfile.write(folder / TENSORS, state_of(model), {"format": "pt"})
    files.write_atomically(folder / CONFIG, _text(describe(card.labels)))
    name = card.preprocessing.get("tokenizer", "")
    if name.endswith(".json"):
        shutil.copyfile(find_file(card, name), folder / TOKENIZER)
        limits = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": card.preprocessing["max_length"],
        }
        files.write_atomically(folder / "tokenizer_config.json", _text(limits))


def run(model: Any, folder: Path) -> Run:
    """The folder, read back as a model of the same class; what it does not state is the model's."""
    stated = model.from_transformers(read_json(folder / CONFIG))
    copy: nn.Module = type(model)(replace(model.config, **stated)).eval()
    copy.load_state_dict(read_foreign(folder).tensors)

    def call(inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return flat(copy(**inputs))

    return call


def _text(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
