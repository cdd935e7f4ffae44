"""Segmentation tasks in the layout of the Medical Segmentation Decathlon.

A folder holds ``dataset.json``, with the names of the labels and of the channels and the files of
every case, and these files. Which cases are held out is a function of a case's name alone, so that
a case never changes sides when others come or go.

Source: Antonelli et al. 2022, https://arxiv.org/abs/2106.05735; http://medicaldecathlon.com.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zoo.data import Dataset
from zoo.data.rows import Rows
from zoo.errors import DataError, shown

FILE = "dataset.json"
FOLDS = 5
HELD_OUT = 1  # fold of `fold` that no published weights were trained on


@dataclass(frozen=True)
class SegmentationTask:
    """What ``dataset.json`` says.

    Attributes:
        name: Of the task.
        labels: Names by number; the first is the background.
        channels: Names of the channels of every image, such as ``MRI`` or ``CT``.
        cases: Files of image and labels; there need not be any.
    """

    name: str
    labels: tuple[str, ...]
    channels: tuple[str, ...]
    cases: tuple[tuple[Path, Path], ...]


def read_task(folder: str | Path) -> SegmentationTask:
    """The task in a folder; no image is opened.

    Raises:
        DataError: There is no ``dataset.json``, it breaks the format, or names no case.
    """
    folder = Path(folder)
    path = folder / FILE
    where = shown(str(path))
    if not path.is_file():
        raise DataError(
            f"{shown(str(folder))} holds no {FILE}; give a folder in the layout of the Medical "
            "Segmentation Decathlon"
        )
    try:
        content = json.loads(path.read_text("utf-8"))
        cases = [(str(case["image"]), str(case["label"])) for case in content["training"]]
        labels, channels = _numbered(content["labels"]), _numbered(content["modality"])
        name = str(content.get("name", folder.name))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{where} is no description of a task ({shown(reason, 70)}); it takes labels and "
            'modality by number, and training: [{"image", "label"}, …]'
        ) from error
    if len(labels) < 2 or not cases:
        lacks = "label beside the background" if cases else "case to train on"
        raise DataError(f"{where} names no {lacks}; a task takes at least one")
    files = [(_inside(folder, image), _inside(folder, label)) for image, label in cases]
    return SegmentationTask(name, labels, channels, tuple(files))


def _numbered(table: dict[str, Any]) -> tuple[str, ...]:
    """Names by number, from 0 without a gap."""
    names = {int(number): str(name) for number, name in table.items()}
    if sorted(names) != list(range(len(names))):
        raise ValueError(f"numbers {sorted(names)} are not 0, 1, 2, …")
    return tuple(names[number] for number in range(len(names)))


def _inside(folder: Path, name: str) -> Path:
    """A file of the folder; a description from elsewhere does not name others."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"{FILE} names {shown(name)}, which is outside of {shown(str(folder))}")
    return path


def case_name(image: str | Path) -> str:
    """Name of a case: that of its image file without ``.nii.gz``."""
    return Path(image).name.removesuffix(".gz").removesuffix(".nii")


def fold(image: str | Path) -> int:
    """One of `FOLDS` folds, by the SHA-256 of the case's name."""
    return int(hashlib.sha256(case_name(image).encode()).hexdigest(), 16) % FOLDS


class CaseRows(Rows):
    """Cases of a task: the image's file is the raw input, the labels' file the target."""

    def __init__(self, name: str, task: SegmentationTask, cases: list[tuple[Path, Path]]) -> None:
        self.name, self.classes, self.task = name, None, task
        self.paths = [str(image) for image, _ in cases]
        self.targets = np.array([str(label) for _, label in cases], dtype=object)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the voxels' classes."""
        return self.task.labels

    def raw(self, index: int) -> str:
        """Path of the image."""
        return self.paths[index]

    def where(self, index: int) -> str:
        """The case."""
        return f"case {case_name(self.paths[index])}"


def open_task(folder: str | Path) -> CaseRows:
    """All cases of the task in a folder.

    Raises:
        DataError: As `read_task`.
    """
    task = read_task(folder)
    return CaseRows(str(folder), task, list(task.cases))


@dataclass(frozen=True)
class CaseSet(Dataset):
    """A published task; its splits ``train`` and ``validation`` are those of `fold`."""

    def rows(self, split: str) -> CaseRows:
        """Cases of a split.

        Raises:
            DataError: There is no such split, or no such folder in ``ZOO_DATA``.
        """
        task = read_task(self.path(split).parent)
        held_out = split == "validation"
        cases = [case for case in task.cases if (fold(case[0]) == HELD_OUT) == held_out]
        return CaseRows(f"{self.name}/{split}", task, cases)

    def examples(self, split: str) -> Iterator[tuple[Any, Any]]:
        """Paths of image and labels of every case."""
        rows = self.rows(split)
        return (rows[index] for index in range(len(rows)))

    def sha256(self, split: str) -> str:
        """One hash over the files of all cases of a split, names included."""
        digest = hashlib.sha256()
        for paths in self.examples(split):
            for path in map(Path, paths):
                digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


def case_set(name: str, folder: str) -> CaseSet:
    """The set of a published task whose folder lies in ``ZOO_DATA``."""
    return CaseSet(
        name=name,
        files=dict.fromkeys(("train", "validation"), f"{folder}/{FILE}"),
        read=lambda path: iter(read_task(path.parent).cases),
        home="http://medicaldecathlon.com",
    )
