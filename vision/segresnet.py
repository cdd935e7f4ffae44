"""SegResNet: residual encoder with group norm, small decoder that adds what it joins.

Paper:
    Myronenko 2018, "3D MRI brain tumor segmentation using autoencoder regularization",
    https://arxiv.org/abs/1810.11654, without the autoencoder branch, which only trains.

Differs from the paper:
    * Any size comes in and the same goes out: a strided convolution rounds up, and what comes back
      up is cut to the size of the map it joins.
    * The last layer gives logits, one a class, not a sigmoid for each of three nested regions.

State-dict keys are those of MONAI's ``SegResNet``.

Cards: segresnet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vision.convnet import adapted_stem, checkpointed
from vision.volumenet import Axes, check_stages, check_volumes, conv, cut_to
from zoo.errors import ConfigError, shown


@dataclass(frozen=True, kw_only=True)
class SegResNetConfig:
    """Architecture of a `SegResNet`; the defaults are the paper's but for the width."""

    width: int = 16  # channels of the first stage, doubled by each further one; the paper has 32
    blocks_down: tuple[int, ...] = (1, 2, 2, 4)  # residual blocks of every stage of the encoder
    blocks_up: tuple[int, ...] = (1, 1, 1)  # of the decoder, coarsest first
    groups: int = 8  # of channels that are normalised together
    dropout: float = 0.0  # share of the first map's channels; the paper has 0.2
    num_classes: int = 2
    in_channels: int = 1
    gradient_checkpointing: bool = False  # in training: less memory, one more forward pass

    def __post_init__(self) -> None:
        stages = len(self.blocks_down)
        if stages < 2:
            raise ConfigError(f"blocks_down is {shown(self.blocks_down)}; it takes two stages")
        check_stages(self, ["blocks_down"], stages)
        check_stages(self, ["blocks_up"], stages - 1)
        for name in ("width", "groups", "num_classes", "in_channels"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it takes at least 1")
        if self.width % self.groups or self.width == self.groups:
            raise ConfigError(
                f"{self.groups} groups of {self.width} channels are not whole groups of at least "
                "two; choose groups among the divisors of width"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}; it takes a rate from 0, below 1")


class Conv(nn.Module):
    """A convolution under the name that MONAI gives it."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: Axes = (3, 3, 3),
        *,
        stride: Axes = (1, 1, 1),
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv = conv(in_channels, out_channels, kernel, stride=stride, bias=bias)

    def forward(self, x: Float[Tensor, "batch _ _ _ _"]) -> Float[Tensor, "batch _ _ _ _"]:
        """The convolution."""
        return self.conv(x)


class ResBlock(nn.Module):
    """Norm, rectifier and convolution, twice, plus identity (table 1)."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels)
        self.norm2 = nn.GroupNorm(groups, channels)
        self.conv1 = Conv(channels, channels)
        self.conv2 = Conv(channels, channels)

    def forward(
        self, x: Float[Tensor, "batch channels depth height width"]
    ) -> Float[Tensor, "batch channels depth height width"]:
        """Residual branch plus identity."""
        y = self.conv1(F.relu(self.norm1(x)))
        return x + self.conv2(F.relu(self.norm2(y)))


class SegResNet(nn.Module):
    """Encoder of residual blocks, decoder by trilinear interpolation, one classifier a voxel."""

    def __init__(self, config: SegResNetConfig) -> None:
        super().__init__()
        self.config = config
        groups, stages = config.groups, len(config.blocks_down)
        widths = [config.width * 2**stage for stage in range(stages)]
        self.convInit = Conv(config.in_channels, config.width)
        self.dropout = nn.Dropout3d(config.dropout)
        self.down_layers = nn.ModuleList()
        self.up_samples = nn.ModuleList()
        self.up_layers = nn.ModuleList()
        for stage, (width, blocks) in enumerate(zip(widths, config.blocks_down, strict=True)):
            entry = Conv(width // 2, width, stride=(2, 2, 2)) if stage else nn.Identity()
            self.down_layers.append(
                nn.Sequential(entry, *(ResBlock(width, groups) for _ in range(blocks)))
            )
        for width, blocks in zip(reversed(widths[:-1]), config.blocks_up, strict=True):
            self.up_samples.append(nn.Sequential(Conv(2 * width, width, (1, 1, 1))))
            self.up_layers.append(nn.Sequential(*(ResBlock(width, groups) for _ in range(blocks))))
        self.conv_final = nn.Sequential(
            nn.GroupNorm(groups, config.width),
            nn.ReLU(inplace=True),
            Conv(config.width, config.num_classes, (1, 1, 1), bias=True),
        )
        self.apply(self.init_weights)

    @staticmethod
    def init_weights(module: nn.Module) -> None:
        """Initial values of one module.

        Source: He et al. 2015, https://arxiv.org/abs/1502.01852, with the fan of the input.
        """
        if isinstance(module, nn.Conv3d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.GroupNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    def features(
        self, volume: Float[Tensor, "batch in_channels depth height width"]
    ) -> tuple[Float[Tensor, "batch _ _ _ _"], ...]:
        """Maps of the encoder, finest first; each but the first halves the size, rounded up.

        Raises:
            DataError: `volume` is no batch of volumes for this network.
        """
        check_volumes(volume, self.config.in_channels)
        recompute = self.config.gradient_checkpointing and self.training
        x = self.dropout(self.convInit(volume))
        maps = []
        for stage in self.down_layers:
            x = checkpointed(stage, x) if recompute else stage(x)
            maps.append(x)
        return tuple(maps)

    def forward(
        self, volume: Float[Tensor, "batch in_channels depth height width"]
    ) -> Float[Tensor, "batch num_classes depth height width"]:
        """Logits of every voxel of a volume of any size.

        Raises:
            DataError: As `features`.
        """
        *skips, x = self.features(volume)
        for squeeze, blocks, skip in zip(
            self.up_samples, self.up_layers, reversed(skips), strict=True
        ):
            x = F.interpolate(squeeze(x), scale_factor=2.0, mode="trilinear")
            x = blocks(cut_to(x, skip) + skip)
        return self.conv_final(x)

    def depth_order(self) -> list[list[str]]:
        """Key prefixes from the volume to the answer: stem, encoder, decoder, head."""
        down = [[f"down_layers.{i}"] for i in range(len(self.down_layers))]
        up = [[f"up_samples.{i}", f"up_layers.{i}"] for i in range(len(self.up_layers))]
        up[-1].append("conv_final.0")  # the norm before the head
        return [["convInit"], *down, *up, ["conv_final.2"]]

    def adapt_input(self, tensors: dict[str, Tensor], in_channels: int) -> dict[str, Tensor]:
        """The first kernel for this network's channels; see `vision.convnet.adapted_stem`."""
        return adapted_stem("convInit.conv.weight", tensors, in_channels, self.config.in_channels)
