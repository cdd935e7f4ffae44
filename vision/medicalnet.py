"""MedicalNet: ResNets with kernels of three axes, for segmentation, pretrained on 23 data sets.

Paper:
    Chen, Ma, Zheng 2019, "Med3D: transfer learning for 3D medical image analysis",
    https://arxiv.org/abs/1904.00625; the published weights are of
    https://github.com/Tencent/MedicalNet.

Differs from the paper:
    * Any size comes in and the same goes out: strided layers round up, and the logits, which have
      a quarter of the resolution, are interpolated to the size of the volume.

State-dict keys are those of MedicalNet, whose files all begin with ``module.`` and may lack the
head, ``conv_seg``. `Path` of such a file, converted, with ``num_classes``, gives a trained body.

Cards: medicalnet_resnet10, 18, 34, 50, 101, 152, 200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vision.convnet import adapted_stem, checkpointed
from vision.volumenet import check_volumes
from zoo.errors import ConfigError, shown

WIDTHS = (64, 128, 256, 512)  # of the stages, before the expansion of a bottleneck
STRIDES = (1, 2, 1, 1)
DILATIONS = (1, 1, 2, 4)  # in place of the strides of the last two stages
HEAD = 32  # channels of the head


@dataclass(frozen=True, kw_only=True)
class MedicalNetConfig:
    """Architecture of a `MedicalNet`."""

    block: Literal["basic", "bottleneck"] = "basic"
    depths: tuple[int, int, int, int] = (1, 1, 1, 1)
    shortcut: Literal["A", "B"] = "B"  # A repeats no parameter: it fills up with zeros
    width: int = 64  # channels of the stem; each stage has its share of `WIDTHS`
    num_classes: int = 2
    in_channels: int = 1
    gradient_checkpointing: bool = False  # in training: less memory, one more forward pass

    def __post_init__(self) -> None:
        for name, right, takes in (
            ("block", self.block in ("basic", "bottleneck"), "'basic' or 'bottleneck'"),
            ("shortcut", self.shortcut in ("A", "B"), "'A' or 'B'"),
            ("depths", min(self.depths) >= 1, "at least one block in each of the four stages"),
            ("width", self.width >= 1, "at least 1"),
            ("num_classes", self.num_classes >= 1, "at least 1"),
            ("in_channels", self.in_channels >= 1, "at least 1"),
        ):
            if not right:
                raise ConfigError(f"{name} is {shown(getattr(self, name))}; it takes {takes}")


def dilated(in_channels: int, channels: int, stride: int = 1, dilation: int = 1) -> nn.Conv3d:
    """A 3x3x3 convolution that divides the size by the stride, rounded up."""
    return nn.Conv3d(in_channels, channels, 3, stride, dilation, dilation, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3x3 convolutions plus shortcut."""

    expansion = 1

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int,
        dilation: int,
        shortcut: nn.Module | None,
    ) -> None:
        super().__init__()
        self.conv1 = dilated(in_channels, channels, stride, dilation)
        self.bn1 = nn.BatchNorm3d(channels)
        self.conv2 = dilated(channels, channels, 1, dilation)
        self.bn2 = nn.BatchNorm3d(channels)
        self.downsample = shortcut

    def forward(
        self, x: Float[Tensor, "batch _ _ _ _"]
    ) -> Float[Tensor, "batch _ depth height width"]:
        """Residual branch plus shortcut, rectified."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1x1, 3x3x3 and 1x1x1 convolutions plus shortcut; the stride is in the middle."""

    expansion = 4

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int,
        dilation: int,
        shortcut: nn.Module | None,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm3d(channels)
        self.conv2 = dilated(channels, channels, stride, dilation)
        self.bn2 = nn.BatchNorm3d(channels)
        self.conv3 = nn.Conv3d(channels, channels * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm3d(channels * self.expansion)
        self.downsample = shortcut

    def forward(
        self, x: Float[Tensor, "batch _ _ _ _"]
    ) -> Float[Tensor, "batch _ depth height width"]:
        """Residual branch plus shortcut, rectified."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(F.relu(self.bn2(self.conv2(y)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ZeroPadded(nn.Module):
    """Every n-th voxel, with zeros for the channels that are new (shortcut A of He et al. 2015)."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.fresh, self.stride = channels - in_channels, stride

    def forward(
        self, x: Float[Tensor, "batch _ _ _ _"]
    ) -> Float[Tensor, "batch _ depth height width"]:
        """The input, thinned and widened."""
        thin = F.avg_pool3d(x, 1, self.stride)
        return F.pad(thin, (0, 0, 0, 0, 0, 0, 0, self.fresh))


class MedicalNet(nn.Module):
    """A ResNet of three axes, dilated in its last two stages, and a small decoder."""

    def __init__(self, config: MedicalNetConfig) -> None:
        super().__init__()
        self.config = config
        self.width = config.width
        self.conv1 = nn.Conv3d(config.in_channels, self.width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm3d(self.width)
        self.maxpool = nn.MaxPool3d(3, 2, 1)
        for number in range(4):
            setattr(self, f"layer{number + 1}", self._stage(config, number))
        self.conv_seg = nn.Sequential(
            nn.ConvTranspose3d(self.width, HEAD, 2, 2),
            nn.BatchNorm3d(HEAD),
            nn.ReLU(inplace=True),
            nn.Conv3d(HEAD, HEAD, 3, padding=1, bias=False),
            nn.BatchNorm3d(HEAD),
            nn.ReLU(inplace=True),
            nn.Conv3d(HEAD, config.num_classes, 1, bias=False),
        )
        self.apply(self.init_weights)

    def _stage(self, config: MedicalNetConfig, number: int) -> nn.Sequential:
        """Blocks of one stage; the first one has the stride and the shortcut."""
        kind = Bottleneck if config.block == "bottleneck" else BasicBlock
        channels = WIDTHS[number] * config.width // WIDTHS[0]
        wide, stride, dilation = channels * kind.expansion, STRIDES[number], DILATIONS[number]
        shortcut: nn.Module | None = None
        if stride != 1 or self.width != wide:
            shortcut = ZeroPadded(self.width, wide, stride)
            if config.shortcut == "B":
                shortcut = nn.Sequential(
                    nn.Conv3d(self.width, wide, 1, stride, bias=False), nn.BatchNorm3d(wide)
                )
        blocks = [kind(self.width, channels, stride, dilation, shortcut)]
        blocks += [
            kind(wide, channels, 1, dilation, None) for _ in range(config.depths[number] - 1)
        ]
        self.width = wide
        return nn.Sequential(*blocks)

    @staticmethod
    def init_weights(module: nn.Module) -> None:
        """Initial values of one module.

        Source: He et al. 2015, https://arxiv.org/abs/1502.01852, with the fan of the output.
        """
        if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm3d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    def features(
        self, volume: Float[Tensor, "batch in_channels depth height width"]
    ) -> tuple[Float[Tensor, "batch _ _ _ _"], ...]:
        """Maps of the four stages, finest first: a quarter of the size, then thrice an eighth.

        Raises:
            DataError: `volume` is no batch of volumes for this network.
        """
        check_volumes(volume, self.config.in_channels)
        recompute = self.config.gradient_checkpointing and self.training
        x = self.maxpool(F.relu(self.bn1(self.conv1(volume))))
        maps = []
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
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
        logits = self.conv_seg(self.features(volume)[-1])
        return F.interpolate(logits, volume.shape[2:], mode="trilinear")

    def depth_order(self) -> list[list[str]]:
        """Key prefixes from the volume to the answer: stem, each block, head."""
        stages = enumerate(self.config.depths, 1)
        blocks = [[f"layer{number}.{i}"] for number, depth in stages for i in range(depth)]
        return [["conv1", "bn1"], *blocks, ["conv_seg"]]

    def adapt_input(self, tensors: dict[str, Tensor], in_channels: int) -> dict[str, Tensor]:
        """The first kernel for this network's channels; see `vision.convnet.adapted_stem`."""
        return adapted_stem("conv1.weight", tensors, in_channels, self.config.in_channels)
