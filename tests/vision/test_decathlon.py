from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from vision.decathlon import HELD_OUT, CaseRows, case_name, case_set, fold, open_task, read_task
from vision.segmentation import VolumeSegmentation
from zoo.data.caching import cached
from zoo.data.rows import Subset, split
from zoo.errors import DataError

LABELS = {"0": "background", "1": "Anterior", "2": "Posterior"}


def described(folder: Path, cases: int = 3, **changes: object) -> Path:
    """A task whose files are not there."""
    names = [f"case_{number:03}.nii.gz" for number in range(cases)]
    training = [{"image": f"./imagesTr/{n}", "label": f"./labelsTr/{n}"} for n in names]
    content = {"name": "T", "labels": LABELS, "modality": {"0": "MRI"}, "training": training}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dataset.json").write_text(json.dumps({**content, **changes}))
    return folder


def test_cases_and_names_are_read_in_order(tmp_path: Path) -> None:
    rows = open_task(described(tmp_path / "task"))
    assert (rows.labels, rows.classes) == (("background", "Anterior", "Posterior"), None)
    assert [rows.where(index) for index in range(3)] == [f"case case_00{n}" for n in range(3)]
    image, label = rows[1]
    assert Path(image) == tmp_path / "task" / "imagesTr" / "case_001.nii.gz"
    assert Path(label) == tmp_path / "task" / "labelsTr" / "case_001.nii.gz"


def test_parts_and_copies_keep_the_labels(tmp_path: Path) -> None:
    rows = open_task(described(tmp_path, 10))
    train, held_out = split(rows, 0.2, 0)
    assert (len(train), len(held_out)) == (8, 2)
    assert train.labels == cached(train, lambda raw: raw, 8).labels == rows.labels
    assert Subset(rows, rows.targets.argsort()[:2]).labels == rows.labels
    assert pickle.loads(pickle.dumps(rows))[3] == rows[3]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"training": []}, "names no case"),
        ({"labels": {"0": "background"}}, "names no label"),
        ({"labels": {"0": "background", "2": "x"}}, "numbers [0, 2] are not"),
        ({"labels": ["background"]}, "no description of a task"),
        ({"training": [{"image": "a.nii"}]}, "KeyError: 'label'"),
        ({"training": [{"image": "../../a.nii", "label": "b.nii"}]}, "outside of"),
        ({"training": [{"image": "/etc/passwd", "label": "b.nii"}]}, "outside of"),
    ],
)
def test_what_is_no_task_is_one_line(tmp_path: Path, changes: dict, text: str) -> None:
    with pytest.raises(DataError) as caught:
        read_task(described(tmp_path, **changes))
    assert text in str(caught.value)


def test_a_folder_without_a_description_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no dataset\.json"):
        open_task(tmp_path)
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(DataError, match="no description of a task"):
        open_task(tmp_path)


def test_the_fold_of_a_case_is_its_name_s_alone() -> None:
    assert case_name("a/b/hippocampus_001.nii.gz") == case_name(Path("hippocampus_001.nii"))
    # SHA-256 of "hippocampus_001", by sha256sum, modulo 5.
    assert fold("hippocampus_001.nii.gz") == fold("elsewhere/hippocampus_001.nii")
    counts = [sum(fold(f"case_{n}") == k for n in range(5000)) for k in range(5)]
    assert min(counts) > 900
    assert sum(counts) == 5000


def test_splits_share_no_case_and_leave_none_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = described(tmp_path / "Task99", 40)
    monkeypatch.setenv("ZOO_DATA", str(tmp_path))
    cases = case_set("t", "Task99")
    train, held_out = cases.rows("train"), cases.rows("validation")
    assert isinstance(train, CaseRows)
    assert set(train.paths) | set(held_out.paths) == set(open_task(folder).paths)
    assert len(train) + len(held_out) == 40
    assert {fold(path) for path in held_out.paths} == {HELD_OUT}
    assert list(cases.examples("validation")) == [held_out[i] for i in range(len(held_out))]
    with pytest.raises(DataError, match="has no split 'test'"):
        cases.rows("test")


def test_the_hash_of_a_split_is_that_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = described(tmp_path / "Task99", 10)
    monkeypatch.setenv("ZOO_DATA", str(tmp_path))
    cases = case_set("t", "Task99")
    for image, label in read_task(folder).cases:
        for path in (image, label):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(path.name.encode())
    before = {split: cases.sha256(split) for split in cases.files}
    assert before["train"] != before["validation"]
    Path(cases.rows("train").paths[0]).write_bytes(b"other")
    assert cases.sha256("train") != before["train"]
    assert cases.sha256("validation") == before["validation"]


def test_the_published_hippocampus_set_is_known() -> None:
    assert set(VolumeSegmentation.datasets["hippocampus"].files) == {"train", "validation"}
