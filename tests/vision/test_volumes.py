from __future__ import annotations

import itertools
import struct
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from vision.volumes import (
    Turn,
    Volume,
    VolumePreprocessing,
    check_same_grid,
    largest_components,
    millilitres,
    read_channels,
    read_grid,
    read_volume,
    resampled,
    resampled_mask,
    size_at,
    turned,
    upright,
    with_sides_swapped,
    write_mask,
)
from zoo.errors import ConfigError, DataError

GRID = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
TURNS = [
    Turn(order, reverse)
    for order in itertools.permutations(range(3))
    for reverse in itertools.product([False, True], repeat=3)
]


def affine(spacing=(1.0, 2.0, 3.0), angles=(0.0, 0.0, 0.0)) -> np.ndarray:
    """Turned about the three axes in turn, at (10, 20, 30) mm."""
    matrix = np.eye(3)
    for axis, angle in enumerate(angles):
        i, j = [k for k in range(3) if k != axis]
        step = np.eye(3)
        step[i, i] = step[j, j] = np.cos(angle)
        step[i, j], step[j, i] = -np.sin(angle), np.sin(angle)
        matrix = step @ matrix
    found = np.eye(4)
    found[:3, :3], found[:3, 3] = matrix * spacing, (10, 20, 30)
    return found


def saved(path: Path, data: np.ndarray, matrix: np.ndarray | None = None, **fields: object) -> Path:
    image = nibabel.Nifti1Image(data, affine() if matrix is None else matrix)
    for name, value in fields.items():
        image.header[name] = value
    nibabel.save(image, path)
    return path


def places(volume: Volume) -> dict[int, tuple[float, ...]]:
    """Where in the patient every value lies."""
    return {
        int(value): tuple((volume.affine @ [*index, 1])[:3].round(6))
        for index, value in np.ndenumerate(volume.data)
    }


def test_both_axes_reversed_by_hand() -> None:
    turn = Turn((0, 1, 2), (True, True, False))
    expected = [[-1, 0, 0, 11], [0, -2, 0, 24], [0, 0, 3, 30], [0, 0, 0, 1]]
    assert turn.affine(affine(), (2, 3, 4)).tolist() == expected


@pytest.mark.parametrize("angles", [(0.0, 0.0, 0.0), (0.3, -0.2, 0.5), (1.7, 0.1, -0.6)])
@pytest.mark.parametrize("turn", TURNS, ids=str)
def test_every_voxel_keeps_its_place_and_returns(turn: Turn, angles: tuple[float, ...]) -> None:
    volume = turned(Volume(GRID, affine(angles=angles)), turn)
    assert places(volume) == places(Volume(GRID, affine(angles=angles)))
    assert np.array_equal(turn.back(volume.data), GRID)
    again = upright(volume.affine)
    stood = turned(volume, again)
    assert upright(stood.affine) == Turn((0, 1, 2), (False, False, False))
    assert places(stood) == places(volume)
    assert np.array_equal(turn.back(again.back(stood.data)), GRID)


def test_upright_is_superior_anterior_right() -> None:
    found = turned(Volume(GRID, affine()), upright(affine()))
    assert found.data.shape == (4, 3, 2)
    assert found.spacing == (3, 2, 1)
    assert found.data[1, 2, 1] == GRID[1, 2, 1]
    assert (found.data[0, 0].tolist(), found.data[:, 0, 0].tolist()) == ([0, 12], [0, 1, 2, 3])


@pytest.mark.parametrize("name", ["scan.nii", "scan.nii.gz"])
def test_a_mask_comes_back_in_the_header_of_its_scan(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / name, GRID, qform_code=0, sform_code=1, xyzt_units=10, cal_max=7)
    scan = read_volume(path)
    assert scan.data.dtype == np.int16
    write_mask((GRID % 3).astype(np.int64), scan, tmp_path / f"mask_{name}")
    before, after = (nibabel.load(p) for p in (path, tmp_path / f"mask_{name}"))
    changed = [k for k in before.header if before.header[k].tobytes() != after.header[k].tobytes()]
    assert set(changed) <= {"datatype", "bitpix", "descrip", "scl_slope", "scl_inter"}
    assert np.array_equal(np.asanyarray(after.dataobj), GRID % 3)
    assert after.get_data_dtype() == np.uint8
    assert np.array_equal(after.affine, before.affine)


def test_scaled_values_are_scaled_and_a_time_axis_of_one_is_none(tmp_path: Path) -> None:
    path = saved(tmp_path / "scaled.nii", GRID[..., None])
    raw = bytearray(path.read_bytes())
    raw[112:120] = struct.pack("<ff", 2.0, -5.0)  # scl_slope and scl_inter
    path.write_bytes(raw)
    found = read_volume(path)
    assert found.data.shape == (2, 3, 4)
    assert found.data.dtype == np.float32
    assert np.array_equal(found.data, GRID * 2.0 - 5)


def test_files_that_are_no_volume_are_one_clear_line(tmp_path: Path) -> None:
    good = saved(tmp_path / "good.nii.gz", GRID).read_bytes()
    nan = GRID.astype(np.float32)
    nan[0, 0, :2] = np.nan
    (tmp_path / "cut.nii.gz").write_bytes(good[: len(good) // 2])
    (tmp_path / "text.nii").write_text("not a volume")
    (tmp_path / "empty.nii.gz").write_bytes(b"")
    plain = saved(tmp_path / "plain.nii", GRID).read_bytes()
    (tmp_path / "short.nii").write_bytes(plain[:-7])
    for name, data, matrix in (
        ("2d.nii", GRID[0], affine()),
        ("4d.nii", np.zeros((2, 3, 4, 5), np.int16), affine()),
        ("nan.nii", nan, affine()),
    ):
        saved(tmp_path / name, data, matrix)
    flat = bytearray(plain)
    flat[296:312] = bytes(16)  # srow_y
    (tmp_path / "flat.nii").write_bytes(flat)
    for name, text in {
        "none.nii": "there is no file",
        "cut.nii.gz": "is no readable NIfTI file",
        "text.nii": "is no readable NIfTI file",
        "empty.nii.gz": "is no readable NIfTI file",
        "short.nii": "is no readable NIfTI file",
        "2d.nii": "a volume has the shape (3, 4)",
        "4d.nii": "a volume has the shape (2, 3, 4, 5)",
        "nan.nii": "2 voxels are not finite",
        "flat.nii": "the affine does not map voxels",
    }.items():
        with pytest.raises(DataError) as caught:
            read_volume(tmp_path / name)
        assert text in str(caught.value), name
        assert len(caught.value.line) <= 200


def test_labels_elsewhere_are_refused_with_the_distance() -> None:
    image, near, far = (Volume(GRID, affine()) for _ in range(3))
    near.affine[0, 3] += 5e-4
    far.affine[2, 2] += 0.5  # three steps to the last slice
    check_same_grid(image, near)
    with pytest.raises(DataError, match=r"lie 1\.5 mm apart at a corner"):
        check_same_grid(image, far)
    with pytest.raises(DataError, match=r"\(2, 3, 4\) voxels and its labels \(2, 3, 3\)"):
        check_same_grid(image, Volume(GRID[..., :3], affine()))


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (GRID[..., :3], "the mask is int16 (2, 3, 3)"),
        (GRID * 0.5, "the mask is float64"),
        (GRID - 1, "labels from -1 to 22"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(tmp_path: Path, mask: np.ndarray, text: str) -> None:
    with pytest.raises(DataError) as caught:
        write_mask(mask, Volume(GRID, affine()), tmp_path / "mask.nii")
    assert text in caught.value.line


def test_millilitres_by_hand() -> None:
    # Voxels of 1 * 2 * 3 mm; of 24 values a third is 1 and a third is 2.
    found = millilitres(GRID % 3, Volume(GRID, affine(angles=(0.3, 0.2, 0.1))), ["", "a", "b"])
    assert found == pytest.approx({"a": 0.048, "b": 0.048})


def test_channels_lie_along_a_fourth_axis(tmp_path: Path) -> None:
    data = np.stack([GRID, GRID + 100], axis=3)
    path = saved(tmp_path / "two.nii.gz", data)
    one, two = read_channels(path, 2)
    assert np.array_equal(one.data, GRID)
    assert np.array_equal(two.data, GRID + 100)
    with pytest.raises(DataError, match="it takes three axes"):
        read_volume(path)
    with pytest.raises(DataError, match="the model takes 3 channels"):
        read_channels(path, 3)


def test_a_grid_is_read_without_voxels(tmp_path: Path) -> None:
    matrix = Turn((2, 0, 1), (True, False, True)).affine(affine(), (2, 3, 4))
    path = saved(tmp_path / "scan.nii.gz", np.zeros((4, 2, 3), np.int16), matrix)
    assert read_grid(path) == ((4, 3, 2), pytest.approx((3, 2, 1)))
    (tmp_path / "x.nii").write_text("x")
    with pytest.raises(DataError, match="is no readable NIfTI file"):
        read_grid(tmp_path / "x.nii")


def test_other_voxels_keep_the_extent() -> None:
    assert size_at((10, 20, 30), (2.0, 1.0, 1.0), (1.0, 1.0, 2.0)) == (20, 20, 15)
    assert size_at((1, 1, 5), (0.1, 1.0, 1.0), (1.0, 1.0, 1.0)) == (1, 1, 5)
    assert size_at((10, 20, 30), (2.0, 1.0, 1.0), None) == (10, 20, 30)
    ramp = torch.arange(8.0).reshape(1, 8, 1, 1).expand(1, 8, 2, 2)
    finer = resampled(ramp, (16, 2, 2))[0, :, 0, 0]
    # Halves of a voxel lie a quarter of its length from its middle; the ends stay.
    assert finer.tolist() == [0.0, *[k + s for k in range(7) for s in (0.25, 0.75)], 7.0]


def test_a_mask_on_other_voxels_goes_to_the_heaviest_label() -> None:
    mask = torch.tensor([0, 0, 3, 3, 7, 7]).reshape(6, 1, 1)
    assert resampled_mask(mask, (12, 1, 1)).flatten().tolist() == [0] * 4 + [3] * 4 + [7] * 4
    assert resampled_mask(mask, (3, 1, 1)).flatten().tolist() == [0, 3, 7]
    assert resampled_mask(mask, (6, 1, 1)) is mask
    noisy = torch.randint(0, 9, (7, 8, 9), generator=torch.Generator().manual_seed(0))
    assert set(resampled_mask(noisy, (9, 9, 9)).unique().tolist()) <= set(range(9))


def test_sides_are_swapped_in_pairs() -> None:
    mask = np.array([0, 1, 2, 3, 4])
    assert with_sides_swapped(mask, ((1, 2), (4, 3))).tolist() == [0, 2, 1, 4, 3]
    assert with_sides_swapped(torch.from_numpy(mask), ((1, 2),)).tolist() == [0, 2, 1, 3, 4]
    assert mask.tolist() == [0, 1, 2, 3, 4]


def test_of_each_label_the_largest_part_stays() -> None:
    mask = np.zeros((5, 9, 9), np.uint8)
    mask[1:3, 1:3, 1:3] = 1  # 8 voxels, and one at their corner
    mask[3, 3, 3] = 1
    mask[0, 8, 8] = 1  # apart
    mask[4, 0:3, 8] = 4
    mask[4, 8, 0] = 4
    found = largest_components(mask)
    assert np.count_nonzero(found == 1) == 9
    assert np.count_nonzero(found == 4) == 3
    assert found.dtype == mask.dtype
    assert not largest_components(np.zeros((2, 2, 2), np.int64)).any()


def test_left_and_right_are_mirrored_only_where_labels_say_so() -> None:
    assert VolumePreprocessing(mirror=(0, 1, 2)).mirrored == (0, 1)
    assert VolumePreprocessing(mirror=(0, 1, 2), pairs=()).mirrored == (0, 1, 2)
    assert VolumePreprocessing(pairs=((1, 2),)).mirrored == ()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"spacing": (1.0, 0.0, 1.0)}, "spacing is (1.0, 0.0, 1.0)"),
        ({"window": (0, 1, 1)}, "window is (0, 1, 1)"),
        ({"clip": (1.0, 1.0)}, "clip is (1.0, 1.0)"),
        ({"mean": 1.0}, "mean is 1.0"),
        ({"mean": 1.0, "std": 0.0}, "std is 0.0"),
        ({"mirror": (3,)}, "mirror is (3,)"),
        ({"pairs": ((1, 2), (2, 3))}, "each label once"),
    ],
)
def test_preprocessing_out_of_range_is_refused(fields: dict, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        VolumePreprocessing(**fields)
    assert text in caught.value.line


def there_and_back(folder: Path, matrices: list[np.ndarray], turns: list[Turn]) -> int:
    """Scans in every orientation: a mask made of the upright volume returns voxel for voxel."""
    count = 0
    for matrix in matrices:
        for turn in turns:
            scan = turned(Volume(GRID, matrix), turn)
            path = saved(folder / "scan.nii", np.ascontiguousarray(scan.data), scan.affine)
            read = read_volume(path)
            stood = upright(read.affine)
            standing = turned(read, stood)
            # World coordinates agree, to what float32 in the header holds.
            for value in (0, 7, 23):
                at = [
                    tuple(int(i) for i in np.argwhere(v.data == value)[0]) for v in (scan, standing)
                ]
                here, there = (
                    (v.affine @ [*index, 1])[:3]
                    for v, index in zip((scan, standing), at, strict=True)
                )
                assert np.abs(here - there).max() < 1e-4
            mask = (
                standing.data.astype(np.int64) % 5
            )  # of the upright volume, as a network gives it
            write_mask(np.ascontiguousarray(stood.back(mask)), read, folder / "mask.nii")
            before, after = (nibabel.load(folder / n) for n in ("scan.nii", "mask.nii"))
            assert np.array_equal(np.asarray(after.dataobj), scan.data % 5)
            assert np.array_equal(before.affine, after.affine)
            changed = {
                k for k in before.header if before.header[k].tobytes() != after.header[k].tobytes()
            }
            assert changed <= {"datatype", "bitpix", "descrip", "scl_slope", "scl_inter"}
            count += 1
    return count


def oblique(count: int) -> list[np.ndarray]:
    """Affines turned at random, each with three spacings."""
    draw = np.random.default_rng(0)
    angles = draw.uniform(-np.pi, np.pi, (count, 3))
    spacings = [(1.0, 1.0, 1.0), (0.7, 0.7, 5.0), (1.1, 2.3, 0.4)]
    return [affine(spacing, tuple(angle)) for angle in angles for spacing in spacings]


def test_masks_return_from_some_orientations(tmp_path: Path) -> None:
    assert there_and_back(tmp_path, oblique(2), TURNS[::7]) == 6 * 7


@pytest.mark.prove
def test_masks_return_from_48_orientations_of_20_oblique_scans_of_3_spacings(
    tmp_path: Path,
) -> None:
    assert there_and_back(tmp_path, oblique(20), TURNS) == 48 * 20 * 3
