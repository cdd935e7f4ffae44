"""The task from a text to another one: what it reads, how it is trained, searched and measured.

Apart from `nlp.tasks`, whose tasks are all heads of one encoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nlp.spelled_numbers import NUMBERS
from nlp.text import IGNORED
from nlp.text_task import CHUNK, Predict, TextTask, one_text
from nlp.transformer import Hypothesis, generate
from zoo.cards import TensorSpec
from zoo.data import Dataset, Made
from zoo.errors import DataError
from zoo.training.recipe import Recipe


class TextToText(TextTask):
    """The most probable text for a text.

    The tokenizer of the weights puts the model's `start_id` before a text and its `end_id` after.
    """

    name = "text-to-text"
    target = "text"
    outputs: ClassVar[dict[str, TensorSpec]] = {
        "logits": TensorSpec(dtype="float32", shape=("batch", "targets", "vocab_size"))
    }
    datasets: ClassVar[dict[str, Dataset | Made]] = {"numbers": NUMBERS}

    def read(self, raw: object) -> dict[str, Tensor]:
        """One text as the model takes it, without a batch axis.

        Raises:
            DataError: It is no valid text.
        """
        return super().read(one_text(raw, self.name))

    def example(
        self,
        raw: str,
        target: str,
        recipe: Recipe | None = None,
        generator: torch.Generator | None = None,
        size: int | None = None,
    ) -> dict[str, Tensor]:
        """A text with its answer, from the start to the end token; the last three are not used."""
        return {**self.read(raw), "target": self.read(target)["input_ids"]}

    def examine(self, raw: Any, target: Any) -> None:
        """Read a text and its answer, only to see that they can be."""
        self.example(raw, target)

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Number of tokens that are foretold: all but the start of each target."""
        return int((batch["target"][:, 1:] != IGNORED).sum())

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], label_smoothing: float = 0.0
    ) -> tuple[Tensor, int]:
        """Cross-entropy in nats of each target token given those before it, sum and count.

        Args:
            model: A `Transformer`.
            batch: Of `collate`.
            label_smoothing: Share of each target that the whole vocabulary has alike, in [0, 1).

        Source: Vaswani et al. 2017, section 5.4; Szegedy et al. 2015,
            https://arxiv.org/abs/1512.00567, section 7.
        """
        target = batch["target"]
        logits = model(
            batch["input_ids"],
            batch["attention_mask"],
            target_ids=target[:, :-1].clamp(min=0),  # padding is not read, and has to be an id
        )
        total = F.cross_entropy(
            logits.flatten(0, 1).float(),
            target[:, 1:].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=label_smoothing,
        )
        return total, self.count(batch)

    def run(
        self,
        model: nn.Module,
        batch: Mapping[str, Tensor],
        *,
        beams: int = 4,
        length_penalty: float = 0.6,
        max_tokens: int = 128,
    ) -> Hypothesis:
        """The best target of each row, as `nlp.transformer.beam_search` finds it."""
        return generate(
            model,
            batch["input_ids"],
            batch["attention_mask"],
            beams=beams,
            length_penalty=length_penalty,
            limit=max_tokens,
        )

    def decode(self, outputs: Hypothesis) -> list[dict[str, Any]]:
        """For each row ``{"text", "score"}``.

        The score is the probability of the text, its logarithm divided by the length penalty.
        """
        scores = outputs.scores.exp().tolist()
        texts = [self.tokenizer.text_of(ids) for ids in outputs.ids.tolist()]
        return [{"text": t, "score": s} for t, s in zip(texts, scores, strict=True)]

    def measure(self, predict: Predict, examples: Iterable[tuple[str, str]]) -> dict[str, float]:
        """Share of texts whose answer is theirs to the letter."""
        source = iter(examples)
        right = total = 0
        while chunk := list(islice(source, CHUNK)):
            answers = predict([raw for raw, _ in chunk])
            pairs = zip(answers, chunk, strict=True)
            right += sum(answer["text"] == target for answer, (_, target) in pairs)
            total += len(chunk)
        if not total:
            raise DataError("there are no examples to measure on; check the split")
        return {"exact_match": right / total}
