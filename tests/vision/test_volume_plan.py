from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vision.unet3d import UNet3D, UNet3DConfig
from vision.volume_plan import (
    BATCH,
    activation_bytes,
    make_plan,
    stage_channels,
    target_spacing,
)
from zoo.config import build
from zoo.errors import ConfigError
from zoo.loading import skeleton_of

GIB = 2**30


def test_the_plan_of_the_hippocampus_is_that_of_its_weights() -> None:
    plan = make_plan([(1.0, 1.0, 1.0)] * 3, [(36, 50, 35), (31, 40, 26), (43, 59, 47)], 4 * GIB)
    assert (plan.spacing, plan.patch) == ((1.0, 1.0, 1.0), (40, 56, 40))
    assert plan.kernels == ((3, 3, 3),) * 4
    assert plan.strides == ((1, 1, 1), *((2, 2, 2),) * 3)
    assert (plan.channels, plan.depths) == ((32, 64, 128, 256), (1, 2, 2, 2))
    assert plan.line == "planned: patches of 40x56x40 voxels of 1x1x1 mm, 4 stages"


def test_the_spacing_is_the_median_and_of_thick_slices_the_tenth_percentile() -> None:
    sizes = [(20, 200, 200)] * 3
    assert target_spacing([(1, 1, 1), (2, 2, 2), (3, 1, 1)], sizes) == (2.0, 1.0, 1.0)
    thick = [(2.5, 0.7, 0.7), (5.0, 0.7, 0.7), (5.0, 0.7, 0.7)]
    # Between 2.5 and 5, a fifth of the way.
    assert target_spacing(thick, sizes) == pytest.approx((3.0, 0.7, 0.7))
    many = [(100, 200, 200)] * 3  # slices enough: nothing is lost
    assert target_spacing(thick, many) == pytest.approx((5.0, 0.7, 0.7))
    equal = [(0.1, 0.7, 0.7), *[(5.0, 0.7, 0.7)] * 4]
    assert target_spacing(equal, [(20, 200, 200)] * 5)[0] >= 0.7


def test_less_memory_gives_smaller_patches_and_then_smaller_batches() -> None:
    spacings, shapes = [(1.0, 1.0, 1.0)], [(128, 128, 128)]
    plans = [make_plan(spacings, shapes, n * GIB) for n in (2, 8, 32, 128)]
    voxels = [math.prod(plan.patch) for plan in plans]
    assert voxels == sorted(voxels)
    assert voxels[0] < voxels[-1] == 128**3
    assert [plan.batch_size for plan in plans][-1] > plans[0].batch_size == BATCH[0]
    for plan, n in zip(plans, (2, 8, 32, 128), strict=True):
        assert plan.bytes <= n * GIB


def test_thick_slices_keep_kernels_of_one_slice_at_first() -> None:
    plan = make_plan([(5.0, 0.78, 0.78)], [(120, 512, 512)], 8 * GIB)
    assert plan.kernels[0] == (1, 3, 3)
    assert plan.kernels[-1] == (3, 3, 3)
    assert plan.strides[1] == (1, 2, 2)


@settings(deadline=None, max_examples=25)
@given(
    st.tuples(*[st.floats(0.2, 8.0)] * 3),
    st.tuples(*[st.integers(1, 400)] * 3),
    st.floats(0.5, 64),
)
def test_whatever_is_planned_can_be_built_and_fits(spacing, shape, gib) -> None:
    try:
        plan = make_plan([spacing], [shape], int(gib * GIB))
    except ConfigError:  # only of volumes whose smallest network is none
        assert max(shape) < 16 or gib < 4
        return
    with skeleton_of():
        model = UNet3D(build(UNet3DConfig, plan.config, where="plan"))
    assert all(n % m == 0 for n, m in zip(plan.patch, model.size_multiple, strict=True))
    assert any(n > m for n, m in zip(plan.patch, model.size_multiple, strict=True))
    assert plan.batch_size * activation_bytes(plan.patch, plan.strides, plan.channels) == plan.bytes
    assert BATCH[0] <= plan.batch_size <= BATCH[1]


def test_channels_double_and_stop() -> None:
    assert stage_channels(6) == (32, 64, 128, 256, 320, 320)
    assert stage_channels(3, 8) == (8, 16, 32)


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes no two patches"):
        make_plan([(1.0, 1.0, 1.0)], [(36, 50, 35)], 2**20)
    with pytest.raises(ConfigError, match="there are 0 spacings"):
        make_plan([], [], GIB)
