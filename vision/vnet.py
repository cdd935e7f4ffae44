"""V-Net: residual stages of 5x5x5 convolutions, strided convolutions instead of pooling.

Paper:
    Milletari, Navab, Ahmadi 2016, "V-Net: fully convolutional neural networks for volumetric
    medical image segmentation", https://arxiv.org/abs/1606.04797

Differs from the paper:
    * Any size comes in and the same goes out: a strided convolution rounds up, and what comes back
      up is cut to the size of the map it joins.
    * Instance norm follows every 5x5x5 convolution; the paper has none (`norm=False`).

Cards: vnet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vision.convnet import adapted_stem, checkpointed
from vision.volumenet import Axes, check_stages, check_volumes, conv, cut_to
from zoo.errors import ConfigError, shown

HALF = (2, 2, 2)  # kernel and stride between stages


@dataclass(frozen=True, kw_only=True)
class VNetConfig:
    """Architecture of a `VNet`; the defaults are the paper's but for the norm."""

    width: int = 16  # channels of the first stage, doubled by each further one
    depths: tuple[int, ...] = (1, 2, 3, 3, 3)  # convolutions of every stage of the encoder
    decoder_depths: tuple[int, ...] = (3, 3, 2, 1)  # of the decoder, coarsest first
    norm: bool = True
    num_classes: int = 2
    in_channels: int = 1
    gradient_checkpointing: bool = False  # in training: less memory, one more forward pass

    def __post_init__(self) -> None:
        stages = len(self.depths)
        if stages < 2:
            raise ConfigError(f"depths is {shown(self.depths)}; it takes at least two stages")
        check_stages(self, ["depths"], stages)
        check_stages(self, ["decoder_depths"], stages - 1)
        for name in ("width", "num_classes", "in_channels"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it takes at least 1")
        if self.width % self.in_channels:
            raise ConfigError(
                f"width is {self.width}; it takes a multiple of the {self.in_channels} input "
                "channels, which are added to the first stage over and over"
            )


class Residual(nn.Module):
    """Convolutions of one stage, whose input is added to their last (figure 2)."""

    def __init__(self, in_channels: int, channels: int, depth: int, *, norm: bool) -> None:
        super().__init__()
        self.convs, self.norms, self.acts = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for index in range(depth):
            given = channels if index else in_channels
            self.convs.append(conv(given, channels, (5, 5, 5), bias=not norm))
            self.norms.append(nn.InstanceNorm3d(channels, affine=True) if norm else nn.Identity())
            self.acts.append(nn.PReLU(channels))

    def forward(
        self, x: Float[Tensor, "batch _ depth height width"]
    ) -> Float[Tensor, "batch channels depth height width"]:
        """The last convolution plus the input, rectified; fewer input channels are repeated."""
        y, last = x, len(self.convs) - 1
        for index, (layer, norm, act) in enumerate(
            zip(self.convs, self.norms, self.acts, strict=True)
        ):
            y = norm(layer(y))
            if index == last:
                y = y + x.repeat(1, y.shape[1] // x.shape[1], 1, 1, 1)
            y = act(y)
        return y


class Down(nn.Module):
    """2x2x2 convolution with stride 2: half the size, rounded up, and other channels."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(in_channels, channels, HALF, HALF)
        self.act = nn.PReLU(channels)

    def forward(
        self, x: Float[Tensor, "batch _ depth height width"]
    ) -> Float[Tensor, "batch channels _ _ _"]:
        """The map at half the size."""
        # One more voxel of 0: an odd size uses it, an even one leaves it.
        return self.act(self.conv(F.pad(x, (0, 1, 0, 1, 0, 1))))


class Up(nn.Module):
    """2x2x2 transposed convolution: the size of the finer map, joined with it."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose3d(in_channels, channels, HALF, HALF)
        self.act = nn.PReLU(channels)

    def forward(
        self,
        x: Float[Tensor, "batch _ _ _ _"],
        skip: Float[Tensor, "batch channels depth height width"],
    ) -> Float[Tensor, "batch joined depth height width"]:
        """Upsampled channels, then those of `skip`."""
        return torch.cat((self.act(cut_to(self.conv(x), skip)), skip), 1)


class VNet(nn.Module):
    """Residual encoder and decoder, one linear classifier a voxel."""

    def __init__(self, config: VNetConfig) -> None:
        super().__init__()
        self.config = config
        stages, norm = len(config.depths), config.norm
        self.size_multiple: Axes = (2 ** (stages - 1),) * 3
        widths = [config.width * 2**stage for stage in range(stages)]
        self.stem = Residual(config.in_channels, config.width, config.depths[0], norm=norm)
        self.down, self.encoder = nn.ModuleList(), nn.ModuleList()
        for width, depth in zip(widths[1:], config.depths[1:], strict=True):
            self.down.append(Down(width // 2, width))
            self.encoder.append(Residual(width, width, depth, norm=norm))
        self.up, self.decoder = nn.ModuleList(), nn.ModuleList()
        channels = widths[-1]
        for width, depth in zip(reversed(widths[:-1]), config.decoder_depths, strict=True):
            self.up.append(Up(channels, width))
            channels = 2 * width
            self.decoder.append(Residual(channels, channels, depth, norm=norm))
        self.head = conv(channels, config.num_classes, (1, 1, 1), bias=True)
        self.apply(self.init_weights)

    @staticmethod
    def init_weights(module: nn.Module) -> None:
        """Initial values of one module.

        Source: He et al. 2015, https://arxiv.org/abs/1502.01852, with the fan of the input and
        rectifiers that start with a slope of 0.25.
        """
        if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
            nn.init.kaiming_normal_(module.weight, a=0.25)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.InstanceNorm3d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.PReLU):
            nn.init.constant_(module.weight, 0.25)

    def features(
        self, volume: Float[Tensor, "batch in_channels depth height width"]
    ) -> tuple[Float[Tensor, "batch _ _ _ _"], ...]:
        """Maps of the encoder, finest first; each but the first halves the size, rounded up.

        Raises:
            DataError: `volume` is no batch of volumes for this network, or it is too small.
        """
        multiple = self.size_multiple if self.config.norm else None
        check_volumes(volume, self.config.in_channels, multiple)
        recompute = self.config.gradient_checkpointing and self.training
        maps = [checkpointed(self.stem, volume) if recompute else self.stem(volume)]
        for down, stage in zip(self.down, self.encoder, strict=True):
            x = down(maps[-1])
            maps.append(checkpointed(stage, x) if recompute else stage(x))
        return tuple(maps)

    def forward(
        self, volume: Float[Tensor, "batch in_channels depth height width"]
    ) -> Float[Tensor, "batch num_classes depth height width"]:
        """Logits of every voxel of a volume of any size that leaves two voxels at the bottom.

        Raises:
            DataError: As `features`.
        """
        *skips, x = self.features(volume)
        for up, stage, skip in zip(self.up, self.decoder, reversed(skips), strict=True):
            x = stage(up(x, skip))
        return self.head(x)

    def depth_order(self) -> list[list[str]]:
        """Key prefixes from the volume to the answer: first stage, encoder, decoder, head."""
        below = range(len(self.down))
        encoder = [[f"down.{i}", f"encoder.{i}"] for i in below]
        decoder = [[f"up.{i}", f"decoder.{i}"] for i in below]
        return [["stem"], *encoder, *decoder, ["head"]]

    def adapt_input(self, tensors: dict[str, Tensor], in_channels: int) -> dict[str, Tensor]:
        """The first kernel for this network's channels; see `vision.convnet.adapted_stem`."""
        return adapted_stem("stem.convs.0.weight", tensors, in_channels, self.config.in_channels)
