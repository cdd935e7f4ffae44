"""Distillation: a trained network's probabilities are the targets of the one in training.

The teacher sees the very input that the student sees, mixed images included, so what it says of an
image is right for the crop at hand.

Source: Hinton, Vinyals, Dean 2015, https://arxiv.org/abs/1503.02531, section 2, at temperature 1;
Beyer et al. 2021, https://arxiv.org/abs/2106.05237, section 3 (one view for both).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo import registry
from zoo.errors import ConfigError, shown
from zoo.training.precision import Precision


class Teacher:
    """Trained weights that turn the targets of a batch into their own probabilities.

    Args:
        name: Of the weights.
        share: Of the target that is the teacher's, in (0, 1].
        task: Of the student; the teacher has one of the same class.
        labels: Names of the student's classes, which have to be the teacher's.
        device: Of the student.
        precision: In which the teacher computes.

    Raises:
        ConfigError: The teacher does another task, or knows other classes.
    """

    def __init__(
        self,
        name: str,
        share: float,
        task: Any,
        labels: Sequence[str] | None,
        device: torch.device,
        precision: Precision,
    ) -> None:
        self.model = registry.load(name).requires_grad_(False).to(device)
        self.task, self.share, self.precision = registry.make_task(self.model), share, precision
        if not hasattr(task, "inputs_of"):
            raise ConfigError(f"teacher is {name}; {task.name} takes none, leave it out")
        if type(self.task) is not type(task):
            raise ConfigError(
                f"teacher is {name}, which does {self.task.name}, and the model {task.name}; the "
                "tasks have to be the same"
            )
        known = self.task.labels
        if known is None or labels is None or list(known) != list(labels):
            raise ConfigError(
                f"the teacher {name} knows the classes {shown(known)} and the data have "
                f"{shown(labels)}; they have to be the same"
            )
        self.student = task

    @torch.no_grad()
    def targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Shares of the classes, float32 (batch, classes), each row of sum 1.

        Args:
            batch: Of the student; ``target`` holds classes (batch,) or shares (batch, classes).
        """
        with self.precision.autocast():
            logits = self.model(**self.task.inputs_of(batch, self.student)).float()
        target = batch["target"]
        if not target.is_floating_point():
            target = F.one_hot(target, logits.shape[1]).float()
        return torch.lerp(target, logits.softmax(dim=1), self.share)
