"""What the volumetric families share: the check of their input, sizes, convolutions.

Volumes are (batch, channels, depth, height, width). A network here takes any size: a strided
convolution rounds the size of its map up, and what comes back up is cut to the map it joins.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import ConfigError, DataError, shown

Axes = tuple[int, int, int]  # one number for each of depth, height and width


def check_volumes(volume: Tensor, in_channels: int, multiple: Axes | None = None) -> None:
    """Refuse what is no batch of volumes for this network; an exported graph holds nothing of it.

    Args:
        volume: Input of the network.
        in_channels: Channels that it takes.
        multiple: Product of its strides along every axis. Its coarsest map is the volume's size
            over that, rounded up, and a norm over space has to find two voxels there. None where
            there is no such norm.

    Raises:
        DataError: Other axes, other channels, integers, or too few voxels.
    """
    if volume.ndim != 5:
        raise DataError(
            f"the volume has shape {tuple(volume.shape)}; the model takes (batch, channels, depth, "
            "height, width): one scan becomes a batch with volume[None, None]"
        )
    if volume.shape[1] != in_channels:
        raise DataError(
            f"the volume has {volume.shape[1]} channels and the model takes {in_channels}; "
            f"zoo.load(..., in_channels={volume.shape[1]}) gives one that fits"
        )
    if not volume.is_floating_point():
        raise DataError(
            f"the volume is {str(volume.dtype).removeprefix('torch.')}; the model takes normalised "
            "floats, as zoo.preprocess(name) makes them"
        )
    if multiple is None or torch.compiler.is_compiling():
        return
    if all(size <= most for size, most in zip(volume.shape[2:], multiple, strict=True)):
        raise DataError(
            f"a volume of {tuple(volume.shape[2:])} voxels is one voxel at the coarsest map; it "
            f"takes more than {multiple} along at least one axis: pad it, or take fewer stages"
        )


def check_stages(config: object, fields: Iterable[str], stages: int) -> None:
    """Refuse per-stage fields that do not have one entry of at least 1 for each stage.

    Raises:
        ConfigError: With the field's name and value.
    """
    for name in fields:
        value = getattr(config, name)
        numbers = [n for item in value for n in (item if isinstance(item, tuple) else (item,))]
        if len(value) != stages or min(numbers) < 1:
            raise ConfigError(
                f"{name} is {shown(value)}; it takes one entry for each of the {stages} stages, "
                "at least 1"
            )


def conv(
    in_channels: int,
    out_channels: int,
    kernel_size: Axes = (3, 3, 3),
    *,
    stride: Axes = (1, 1, 1),
    bias: bool = False,
) -> nn.Conv3d:
    """Convolution that divides the size by the stride, rounded up; kernels are odd.

    Without bias by default, since a norm follows.
    """
    depth, height, width = kernel_size
    padding = (depth // 2, height // 2, width // 2)
    return nn.Conv3d(in_channels, out_channels, kernel_size, stride, padding, bias=bias)


def cut_to(x: Tensor, like: Tensor) -> Tensor:
    """The first voxels of every axis, as many as `like` has."""
    depth, height, width = (
        wanted - size for wanted, size in zip(like.shape[2:], x.shape[2:], strict=True)
    )
    # Negative padding copies. A view has the strides of the whole, and exporters ask of strides
    # what holds for some sizes only.
    return F.pad(x, (0, width, 0, height, 0, depth))


def total_stride(strides: Iterable[Axes]) -> Axes:
    """Product of the strides along every axis."""
    depth = height = width = 1
    for stride in strides:
        depth, height, width = depth * stride[0], height * stride[1], width * stride[2]
    return depth, height, width
