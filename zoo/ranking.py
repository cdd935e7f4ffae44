"""Class scores as ranked records: the answer of every classification task, whatever its domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from zoo.errors import CardError, ConfigError, DataError, shown


def ranked(logits: Tensor, labels: Sequence[str] | None, top_k: int) -> list[list[dict[str, Any]]]:
    """The `top_k` most probable classes of every row, best first.

    Probabilities are computed in float64, so that they sum to one whatever the model's precision.
    Of equal classes the one with the smaller index comes first.

    Args:
        logits: Unnormalised scores, shape (batch, classes).
        labels: Name of every class in the order of the indices; None names each class by its index.
        top_k: How many to return, at least 1; all of them where there are fewer.

    Returns:
        One list a row, of records ``{"label", "index", "score"}``; the scores are probabilities.

    Raises:
        ConfigError: `top_k` is not a whole number of at least 1.
        CardError: The number of labels is not the number of classes.
        DataError: A row holds NaN, so that no class is the best.
    """
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
        raise ConfigError(f"top_k is {shown(top_k)}; it takes a whole number of at least 1")
    classes = logits.shape[-1]
    if labels is not None and len(labels) != classes:
        raise CardError(
            f"there are {len(labels)} labels for {classes} classes; each needs one name"
        )
    values = logits.detach().double().cpu()
    if values.isnan().any():
        raise DataError(
            "the model gave NaN for this input; look for NaN or inf in what it was given"
        )
    # Sorted by logit: classes far behind the best one share the probability 0, yet differ in logit.
    order = values.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    scores = values.softmax(dim=-1).gather(-1, order)
    return [
        [
            {"label": labels[index] if labels else str(index), "index": index, "score": score}
            for index, score in zip(indices, probabilities, strict=True)
        ]
        for indices, probabilities in zip(order.tolist(), scores.tolist(), strict=True)
    ]
