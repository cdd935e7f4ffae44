from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vision.montage import COLOURS, LEGEND, SIDE, montage, write_montage
from zoo.errors import DataError

LABELS = ["background", "left", "right"]


def scan() -> tuple[np.ndarray, np.ndarray]:
    volume = np.random.default_rng(0).normal(size=(20, 24, 16)).astype(np.float32)
    mask = np.zeros((20, 24, 16), np.uint8)
    mask[5:9, 4:20, 2:7], mask[7:12, 4:20, 9:14] = 1, 2
    return volume, mask


def test_every_slice_with_a_label_is_shown_in_its_colours() -> None:
    picture = montage(*scan(), (2.0, 1.0, 1.0), LABELS)
    # Slices 5 to 11 are 7: three columns of 16:24, three rows.
    assert picture.size == (3 * SIDE * 16 // 24, 3 * SIDE + LEGEND)
    pixels = {tuple(p) for p in np.asarray(picture).reshape(-1, 3).tolist()}
    assert {tuple(c) for c in COLOURS[:2].tolist()} <= pixels
    assert tuple(COLOURS[2].tolist()) not in pixels


def test_slices_are_no_longer_square_where_voxels_are_not() -> None:
    picture = montage(*scan(), (1.0, 1.0, 3.0), LABELS, slices=1)
    assert picture.size == (SIDE, round(SIDE * 24 / 48) + LEGEND)


def test_anterior_is_up_and_right_is_right() -> None:
    volume, mask = np.zeros((2, 8, 8), np.float32), np.zeros((2, 8, 8), np.uint8)
    mask[:, 7, 7] = 1
    pixels = np.asarray(montage(volume, mask, (1.0, 1.0, 1.0), ["background", "x"], slices=1))
    rows, columns = np.nonzero((pixels[:SIDE] == COLOURS[0]).all(2))
    assert rows.max() < SIDE / 8
    assert columns.min() >= SIDE * 7 / 8


def test_an_empty_mask_shows_the_volume(tmp_path: Path) -> None:
    volume, mask = scan()
    write_montage(tmp_path / "m.png", volume, 0 * mask, (1.0, 1.0, 1.0), LABELS)
    with Image.open(tmp_path / "m.png") as picture:
        assert picture.mode == "RGB"
        assert len(np.unique(np.asarray(picture))) > 100


def test_another_shape_is_refused() -> None:
    volume, mask = scan()
    with pytest.raises(DataError, match="both need one"):
        montage(volume, mask[1:], (1.0, 1.0, 1.0), LABELS)
