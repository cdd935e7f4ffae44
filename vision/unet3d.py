"""U-Nets for volumes: residual encoder, instance norm, optional attention gates.

Papers:
    Çiçek et al. 2016, "3D U-Net: learning dense volumetric segmentation from sparse annotation",
    https://arxiv.org/abs/1606.06650; Isensee et al. 2024 (residual encoder), "nnU-Net revisited",
    https://arxiv.org/abs/2404.09556; Isensee et al. 2018 (kernels and strides that follow the
    spacing, deep supervision), https://arxiv.org/abs/1809.10486; Oktay et al. 2018 (attention
    gates), https://arxiv.org/abs/1804.03999.

Differs from the papers:
    * Any size comes in and the same goes out: a strided convolution rounds up, and what comes back
      up is cut to the size of the map it joins.
    * Shortcuts are strided 1x1x1 convolutions, as in He et al. 2015; nnU-Net pools before them.
    * Convolutions before a norm have no bias, which the norm would remove.
    * An attention gate sees the decoder's map at the resolution of the map that it weighs, so that
      its weights need no interpolation.

Cards: unet3d, attention_unet3d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vision.convnet import adapted_stem, checkpointed
from vision.volume_augment import VolumeRecipe
from vision.volumenet import Axes, check_stages, check_volumes, conv, cut_to, total_stride
from zoo.errors import ConfigError, shown
from zoo.training.recipe import AdamW, Cosine

SLOPE = 0.01  # of the leaky rectifiers below 0


@dataclass(frozen=True, kw_only=True)
class UNet3DConfig:
    """Architecture of a `UNet3D`; entries of a tuple belong to the stages, finest first."""

    channels: tuple[int, ...] = (32, 64, 128, 256, 320)
    depths: tuple[int, ...] = (1, 2, 2, 2, 2)  # residual blocks of the encoder
    decoder_depth: int = 1  # convolutions of each stage of the decoder
    kernels: tuple[tuple[int, int, int], ...] = ()  # odd; empty: 3 everywhere
    strides: tuple[tuple[int, int, int], ...] = ()  # of each stage's entry; empty: 1, then 2
    num_classes: int = 2  # background included
    in_channels: int = 1
    attention: bool = False  # gates on the maps that go from encoder to decoder
    deep_supervision: bool = False  # in training: logits of the coarser decoder stages too
    gradient_checkpointing: bool = False  # in training: less memory, one more forward pass

    def __post_init__(self) -> None:
        stages = len(self.channels)
        if stages < 2:
            raise ConfigError(f"channels is {shown(self.channels)}; it takes at least two stages")
        check_stages(self, ("channels", "depths"), stages)
        check_stages(self, [n for n in ("kernels", "strides") if getattr(self, n)], stages)
        for name in ("decoder_depth", "num_classes", "in_channels"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it takes at least 1")
        if any(size % 2 == 0 for kernel in self.kernels for size in kernel):
            raise ConfigError(f"kernels is {shown(self.kernels)}; it takes odd numbers")
        if self.strides and self.strides[0] != (1, 1, 1):
            raise ConfigError(
                f"the first stride is {self.strides[0]}; it is (1, 1, 1), since the answer has the "
                "volume's own size"
            )

    @property
    def stage_kernels(self) -> tuple[Axes, ...]:
        """Kernel of every stage."""
        return self.kernels or ((3, 3, 3),) * len(self.channels)

    @property
    def stage_strides(self) -> tuple[Axes, ...]:
        """Stride at the entry of every stage."""
        return self.strides or ((1, 1, 1), *((2, 2, 2),) * (len(self.channels) - 1))


def kernels_and_strides(
    spacing: tuple[float, float, float], size: Axes, *, least: int = 4, stages: int = 6
) -> tuple[tuple[Axes, ...], tuple[Axes, ...]]:
    """Kernels and strides that make voxels of thick slices cubic before they are mixed.

    An axis is halved while its voxels are less than twice as long as the shortest, and while half
    of it has at least `least` voxels. Its kernel has one voxel until then, and three from there on.

    Args:
        spacing: Of the voxels along depth, height and width, in mm.
        size: Of the patches to train on, in voxels.
        least: Voxels of an axis that halving leaves, at least.
        stages: Highest number of stages.

    Returns:
        One entry a stage, as `UNet3DConfig` takes them.

    Source: Isensee et al. 2018, section 2.1; nnU-Net v2, ``get_pool_and_conv_props``.
    """
    if min(spacing) <= 0 or min(size) < 1:
        raise ConfigError(
            f"spacing is {shown(spacing)} and size {shown(size)}; both take three numbers above 0"
        )
    lengths, sizes, kernel = list(spacing), list(size), [1, 1, 1]
    kernels: list[Axes] = []
    strides: list[Axes] = [(1, 1, 1)]
    while len(strides) < stages:
        kernel = [
            3 if before == 3 or length < 2 * min(lengths) else 1
            for before, length in zip(kernel, lengths, strict=True)
        ]
        able = [axis for axis in range(3) if sizes[axis] >= 2 * least]
        shortest = min((lengths[axis] for axis in able), default=0.0)
        able = [axis for axis in able if lengths[axis] < 2 * shortest]
        if not able or (len(able) == 1 and sizes[able[0]] < 3 * least):
            break
        for axis in able:
            lengths[axis], sizes[axis] = 2 * lengths[axis], math.ceil(sizes[axis] / 2)
        kernels.append((kernel[0], kernel[1], kernel[2]))
        depth, height, width = (2 if axis in able else 1 for axis in range(3))
        strides.append((depth, height, width))
    return (*kernels, (3, 3, 3)), tuple(strides)


class ConvNorm(nn.Sequential):
    """Convolution and instance norm."""

    def __init__(
        self, in_channels: int, channels: int, kernel: Axes, stride: Axes = (1, 1, 1)
    ) -> None:
        super().__init__(
            conv(in_channels, channels, kernel, stride=stride),
            nn.InstanceNorm3d(channels, affine=True),
        )


class ResidualBlock(nn.Module):
    """Two convolutions plus identity (nnU-Net revisited, section 3)."""

    def __init__(self, in_channels: int, channels: int, kernel: Axes, stride: Axes) -> None:
        super().__init__()
        self.conv1 = ConvNorm(in_channels, channels, kernel, stride)
        self.conv2 = ConvNorm(channels, channels, kernel)
        same = in_channels == channels and stride == (1, 1, 1)
        self.shortcut = None if same else ConvNorm(in_channels, channels, (1, 1, 1), stride)

    def forward(
        self, x: Float[Tensor, "batch _ depth height width"]
    ) -> Float[Tensor, "batch channels out_depth out_height out_width"]:
        """Residual branch plus shortcut, rectified."""
        y = self.conv2(F.leaky_relu(self.conv1(x), SLOPE))
        return F.leaky_relu(y + (x if self.shortcut is None else self.shortcut(x)), SLOPE)


class AttentionGate(nn.Module):
    """Weights in [0, 1] of the voxels of an encoder map (Oktay et al., equations 1 and 2)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = max(1, channels // 2)
        self.encoder = conv(channels, inner, (1, 1, 1))
        self.decoder = conv(channels, inner, (1, 1, 1), bias=True)
        self.psi = conv(inner, 1, (1, 1, 1), bias=True)

    def forward(
        self,
        skip: Float[Tensor, "batch channels depth height width"],
        gating: Float[Tensor, "batch channels depth height width"],
    ) -> Float[Tensor, "batch 1 depth height width"]:
        """Weight of every voxel of `skip`."""
        return self.psi(F.relu(self.encoder(skip) + self.decoder(gating))).sigmoid()


class DecoderStage(nn.Module):
    """Up to the next finer encoder map, joined with it, convolved (Çiçek et al., figure 2)."""

    def __init__(self, config: UNet3DConfig, stage: int) -> None:
        super().__init__()
        channels, kernel = config.channels[stage], config.stage_kernels[stage]
        stride = config.stage_strides[stage + 1]
        self.up = nn.ConvTranspose3d(
            config.channels[stage + 1], channels, stride, stride, bias=False
        )
        self.gate = AttentionGate(channels) if config.attention else None
        widths = [2 * channels, *[channels] * config.decoder_depth]
        self.convs = nn.ModuleList(
            ConvNorm(widths[i], channels, kernel) for i in range(config.decoder_depth)
        )

    def forward(
        self,
        x: Float[Tensor, "batch _ coarse_depth coarse_height coarse_width"],
        skip: Float[Tensor, "batch channels depth height width"],
    ) -> tuple[Float[Tensor, "batch channels depth height width"], Tensor | None]:
        """Map at the resolution of `skip`, and the gate's weights if there is a gate."""
        x = cut_to(self.up(x), skip)
        weights = None if self.gate is None else self.gate(skip, x)
        x = torch.cat((x, skip if weights is None else weights * skip), 1)
        for layer in self.convs:
            x = F.leaky_relu(layer(x), SLOPE)
        return x, weights


class UNet3D(nn.Module):
    """A volumetric U-Net: encoder of residual blocks, decoder, one linear classifier a voxel."""

    def __init__(self, config: UNet3DConfig) -> None:
        super().__init__()
        self.config = config
        self.size_multiple = total_stride(config.stage_strides)
        self.stem = ConvNorm(config.in_channels, config.channels[0], config.stage_kernels[0])
        self.encoder = nn.ModuleList()
        in_channels = config.channels[0]
        for channels, depth, kernel, stride in zip(
            config.channels, config.depths, config.stage_kernels, config.stage_strides, strict=True
        ):
            blocks = nn.Sequential(ResidualBlock(in_channels, channels, kernel, stride))
            for _ in range(depth - 1):
                blocks.append(ResidualBlock(channels, channels, kernel, (1, 1, 1)))
            self.encoder.append(blocks)
            in_channels = channels
        below = range(len(config.channels) - 1)
        self.decoder = nn.ModuleList(DecoderStage(config, i) for i in reversed(below))
        self.head = conv(config.channels[0], config.num_classes, (1, 1, 1), bias=True)
        self.deep_heads = nn.ModuleList()  # second finest stage of the decoder first
        if config.deep_supervision:
            for channels in config.channels[1:-1]:
                self.deep_heads.append(conv(channels, config.num_classes, (1, 1, 1), bias=True))
        self.apply(self.init_weights)

    @staticmethod
    def init_weights(module: nn.Module) -> None:
        """Initial values of one module; ``apply`` comes to a gate after its parts.

        Source: convolutions He et al. 2015, https://arxiv.org/abs/1502.01852, with the fan of the
        input, as in nnU-Net; gates pass what they see, Oktay et al., section 2.2.
        """
        if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
            nn.init.kaiming_normal_(module.weight, a=SLOPE)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.InstanceNorm3d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, AttentionGate):
            nn.init.constant_(module.psi.bias, 2.0)  # type: ignore[arg-type]

    def features(
        self, volume: Float[Tensor, "batch in_channels depth height width"]
    ) -> tuple[Float[Tensor, "batch _ _ _ _"], ...]:
        """Maps of the encoder, finest first; sizes are the volume's over the strides, rounded up.

        Raises:
            DataError: `volume` is no batch of volumes for this network, or it is too small.
        """
        check_volumes(volume, self.config.in_channels, self.size_multiple)
        recompute = self.config.gradient_checkpointing and self.training
        x = F.leaky_relu(self.stem(volume), SLOPE)
        maps = []
        for stage in self.encoder:
            x = checkpointed(stage, x) if recompute else stage(x)
            maps.append(x)
        return tuple(maps)

    def forward(
        self, volume: Float[Tensor, "batch in_channels depth height width"]
    ) -> (
        Float[Tensor, "batch num_classes depth height width"]
        | tuple[Float[Tensor, "batch num_classes _ _ _"], ...]
    ):
        """Logits of every voxel.

        Args:
            volume: Of any size that leaves two voxels at the coarsest map.

        Returns:
            Logits of the volume's size. In training with `deep_supervision`, a tuple: these, then
            those of the coarser stages of the decoder but for the coarsest.

        Raises:
            DataError: As `features`.
        """
        maps, _ = self._decoded(volume)
        logits = self.head(maps[0])
        if not (self.training and self.config.deep_supervision):
            return logits
        deep = (head(x) for head, x in zip(self.deep_heads, maps[1:], strict=True))
        return logits, *deep

    def gate_maps(
        self, volume: Float[Tensor, "batch in_channels depth height width"]
    ) -> tuple[Float[Tensor, "batch 1 depth height width"], ...]:
        """Weights in [0, 1] that each attention gate gives every voxel, the finest gate first.

        Those of coarser gates are interpolated to the size of the volume.

        Raises:
            ConfigError: The network has no gates.
            DataError: As `features`.
        """
        if not self.config.attention:
            raise ConfigError(
                "this UNet3D has no attention gates; zoo.load('attention_unet3d') has them"
            )
        _, gates = self._decoded(volume)
        size = volume.shape[2:]
        return tuple(F.interpolate(gate, size, mode="trilinear") for gate in gates)

    def _decoded(self, volume: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Maps of the decoder and weights of its gates, finest first."""
        *skips, x = self.features(volume)
        maps: list[Tensor] = []
        gates: list[Tensor] = []
        for stage, skip in zip(self.decoder, reversed(skips), strict=True):
            x, weights = stage(x, skip)
            maps.insert(0, x)
            if weights is not None:
                gates.insert(0, weights)
        return maps, gates

    def depth_order(self) -> list[list[str]]:
        """Key prefixes from the volume to the answer: stem, encoder, decoder, heads."""
        stages = len(self.config.channels)
        encoder = [[f"encoder.{i}"] for i in range(stages)]
        decoder = [[f"decoder.{i}"] for i in range(stages - 1)]
        return [["stem"], *encoder, *decoder, ["head", "deep_heads"]]

    def adapt_input(self, tensors: dict[str, Tensor], in_channels: int) -> dict[str, Tensor]:
        """The first kernel for this network's channels; see `vision.convnet.adapted_stem`."""
        return adapted_stem("stem.0.weight", tensors, in_channels, self.config.in_channels)


# Volumes of 35 x 50 x 36 voxels of 1 mm, which one patch holds whole; planned by
# `vision.volume_plan.make_plan` but for the width, which is what a core trains in half an hour.
# Source: Isensee et al. 2018, section 2 (loss, deep supervision, augmentation); Loshchilov, Hutter
# 2017 (AdamW in place of SGD, since the run is short).
HIPPOCAMPUS = VolumeRecipe(
    data="hippocampus/train",
    validation="hippocampus/validation",
    epochs=25,
    batch_size=2,
    optimizer=AdamW(lr=1e-3, weight_decay=0.05),
    schedule=Cosine(warmup=0.03),
    precision="bfloat16",
    clip_norm=5.0,
    ema=0.995,
    spatial=0.2,
    rotation=20.0,
    scaling=(0.8, 1.25),
    intensity=1.0,
    low_resolution=0.25,
    mirror=True,
    evaluate_every=420,
    workers=1,
)
RECIPES = {"hippocampus": HIPPOCAMPUS}
