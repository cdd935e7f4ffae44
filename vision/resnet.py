"""Residual networks for image classification: ResNet, ResNeXt and Wide ResNet.

Papers:
    He, Zhang, Ren, Sun 2015, "Deep residual learning for image recognition",
    https://arxiv.org/abs/1512.03385; Xie et al. 2016 (ResNeXt), https://arxiv.org/abs/1611.05431;
    Zagoruyko, Komodakis 2016 (Wide ResNet), https://arxiv.org/abs/1605.07146. Options, all off by
    default: Yu, Koltun, Funkhouser 2017 (dilation), https://arxiv.org/abs/1705.09914; Huang et al.
    2016 (stochastic depth), https://arxiv.org/abs/1603.09382; Hu et al. 2017
    (squeeze-and-excitation), https://arxiv.org/abs/1709.01507.

Differs from the papers:
    * The stride of a bottleneck sits on its 3x3 convolution, not on the first 1x1 ("v1.5").

State-dict keys, their order and every bit of the outputs are those of torchvision 0.29.

Cards: resnet18, resnet34, resnet50, resnet101, resnet152, resnext50_32x4d, resnext101_32x8d,
resnext101_64x4d, wide_resnet50_2, wide_resnet101_2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vision.augment import ImageRecipe
from vision.convnet import (
    DropPath,
    SqueezeExcitation,
    adapted_stem,
    check_images,
    checkpointed,
    hold_norms,
)
from zoo.errors import ConfigError, shown
from zoo.training.recipe import AdamW, Cosine


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """What distinguishes one residual network from another."""

    block: Literal["basic", "bottleneck"] = "bottleneck"
    depths: tuple[int, int, int, int] = (3, 4, 6, 3)  # blocks in each stage
    width: int = 64  # channels of the stem; stages have 1, 2, 4, 8 times as many, before expansion
    groups: int = 1  # ResNeXt's cardinality C
    width_per_group: int = 64  # ResNeXt's d: channels of a group in the first stage, at width 64
    num_classes: int = 1000
    in_channels: int = 3
    output_stride: Literal[8, 16, 32] = 32  # of the last map; below 32 late stages dilate instead
    drop_path_rate: float = 0.0  # chance of dropping the last block's branch; less for earlier ones
    se_reduction: int = 0  # squeeze-and-excitation: channels over those of its middle; 0 = without
    zero_init_residual: bool = False  # blocks start as identities (arXiv:1706.02677, section 5.1)
    gradient_checkpointing: bool = False  # in training: less memory, one more forward pass

    def __post_init__(self) -> None:
        if len(self.depths) != 4 or min(self.depths) < 1:
            raise ConfigError(
                f"depths is {shown(self.depths)}; it takes the number of blocks of each of "
                "the four stages, at least 1"
            )
        sizes = ("width", "groups", "width_per_group", "num_classes", "in_channels")
        for name in (*sizes, "se_reduction"):
            value, least = getattr(self, name), 1 if name in sizes else 0
            if value < least:
                raise ConfigError(f"{name} is {shown(value)}; it takes at least {least}")
        if not 0 <= self.drop_path_rate < 1:
            raise ConfigError(
                f"drop_path_rate is {shown(self.drop_path_rate)}; it takes a rate from 0, below 1"
            )
        if self.block == "basic" and (self.groups, self.width_per_group) != (1, 64):
            raise ConfigError(
                f"a basic block has no groups (groups is {self.groups}, width_per_group is "
                f"{self.width_per_group}); leave both out or take block='bottleneck'"
            )
        if self.width * self.width_per_group < 64:
            raise ConfigError(
                f"width {self.width} and width_per_group {self.width_per_group} leave a group "
                "without channels; their product is at least 64"
            )


def conv(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    *,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
) -> nn.Conv2d:
    """Convolution without bias, since a norm follows, padded to keep the size at stride 1."""
    padding = kernel_size // 2 * dilation
    return nn.Conv2d(
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias=False
    )


def projection(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """Shortcut where the shape changes, or None (He et al., section 3.3, option B)."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        conv(in_channels, out_channels, 1, stride=stride), nn.BatchNorm2d(out_channels)
    )


def excitation(channels: int, config: ResNetConfig) -> nn.Module:
    """Last step of a residual branch, if there is one (Hu et al., figure 3)."""
    reduction = config.se_reduction
    return SqueezeExcitation(channels, reduction) if reduction else nn.Identity()


class BasicBlock(nn.Module):
    """Two 3x3 convolutions plus identity (He et al., figure 5 left)."""

    expansion = 1

    def __init__(
        self,
        in_channels: int,
        channels: int,
        *,
        stride: int,
        dilations: tuple[int, int],  # of the map that the block reads, and of the one it writes
        config: ResNetConfig,
    ) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, channels, 3, stride=stride, dilation=dilations[0])
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU(inplace=True)  # one module per use: quantisation observes each apart
        self.conv2 = conv(channels, channels, 3, dilation=dilations[1])
        self.bn2 = nn.BatchNorm2d(channels)
        self.se = excitation(channels, config)
        self.drop_path = DropPath()
        self.downsample = projection(in_channels, channels, stride)
        self.relu2 = nn.ReLU(inplace=True)
        self.zero_init_residual = config.zero_init_residual

    def forward(
        self, x: Float[Tensor, "batch _ height width"]
    ) -> Float[Tensor, "batch channels out_height out_width"]:
        """Residual branch plus shortcut, rectified."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.drop_path(self.se(self.bn2(self.conv2(y))))
        return self.relu2(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1 reduce, 3x3, 1x1 expand, plus identity (He et al., figure 5 right).

    With groups the 3x3 is ResNeXt's aggregated transformation (Xie et al., figure 3c).
    """

    expansion = 4

    def __init__(
        self,
        in_channels: int,
        channels: int,
        *,
        stride: int,
        dilations: tuple[int, int],  # of the map that the block reads, and of the one it writes
        config: ResNetConfig,
    ) -> None:
        super().__init__()
        inner = channels * config.width_per_group // 64 * config.groups
        self.conv1 = conv(in_channels, inner, 1)
        self.bn1 = nn.BatchNorm2d(inner)
        self.relu1 = nn.ReLU(inplace=True)
        # Differs from the paper: the stride is here and not on conv1 ("v1.5").
        self.conv2 = conv(
            inner, inner, 3, stride=stride, dilation=dilations[0], groups=config.groups
        )
        self.bn2 = nn.BatchNorm2d(inner)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv3 = conv(inner, channels * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(channels * self.expansion)
        self.se = excitation(channels * self.expansion, config)
        self.drop_path = DropPath()
        self.downsample = projection(in_channels, channels * self.expansion, stride)
        self.relu3 = nn.ReLU(inplace=True)
        self.zero_init_residual = config.zero_init_residual

    def forward(
        self, x: Float[Tensor, "batch _ height width"]
    ) -> Float[Tensor, "batch channels out_height out_width"]:
        """Residual branch plus shortcut, rectified."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.relu2(self.bn2(self.conv2(y)))
        y = self.drop_path(self.se(self.bn3(self.conv3(y))))
        return self.relu3(y + (x if self.downsample is None else self.downsample(x)))


BLOCKS: dict[str, type[BasicBlock] | type[Bottleneck]] = {
    "basic": BasicBlock,
    "bottleneck": Bottleneck,
}


class Stage(nn.Sequential):
    """Blocks at one resolution (He et al., table 1: conv2_x to conv5_x)."""

    gradient_checkpointing = False

    def forward(
        self, x: Float[Tensor, "batch _ height width"]
    ) -> Float[Tensor, "batch channels out_height out_width"]:
        """The blocks, one after the other."""
        recompute = self.gradient_checkpointing and self.training
        for block in self:
            x = checkpointed(block, x) if recompute else block(x)
        return x


def stage(config: ResNetConfig, index: int) -> Stage:
    """Stage `index`, from 0; each but the first halves the resolution, doubles the channels.

    One past `output_stride` keeps the resolution and spreads its 3x3 kernels instead: what the
    halved map would hold is still there, at every other pixel (Yu et al., section 2).
    """
    block = BLOCKS[config.block]
    channels = config.width * 2**index
    out_channels = channels * block.expansion
    in_channels = config.width if index == 0 else out_channels // 2
    read, written = (max(1, 2**power // config.output_stride) for power in (index + 1, index + 2))
    stride = 1 if index == 0 else 2 * read // written
    blocks = []
    for _ in range(config.depths[index]):
        blocks.append(
            block(in_channels, channels, stride=stride, dilations=(read, written), config=config)
        )
        in_channels, stride, read = out_channels, 1, written
    built = Stage(*blocks)
    built.gradient_checkpointing = config.gradient_checkpointing
    return built


class ResNet(nn.Module):
    """A residual network: stem, four stages, global average, linear classifier."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.norms_frozen = False
        self.conv1 = conv(config.in_channels, config.width, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(config.width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = stage(config, 0)
        self.layer2 = stage(config, 1)
        self.layer3 = stage(config, 2)
        self.layer4 = stage(config, 3)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        first = config.width * BLOCKS[config.block].expansion
        self.feature_channels = (config.width, first, 2 * first, 4 * first, 8 * first)
        # Input size over map size, rounded up.
        self.feature_reductions = tuple(min(n, config.output_stride) for n in (2, 4, 8, 16, 32))
        self.fc = nn.Linear(self.feature_channels[-1], config.num_classes)
        blocks = [*self.layer1, *self.layer2, *self.layer3, *self.layer4]
        for number, block in enumerate(blocks, 1):  # Huang et al., equation 4
            block.drop_path.rate = config.drop_path_rate * number / len(blocks)
        self.apply(self.init_weights)

    @staticmethod
    def init_weights(module: nn.Module) -> None:
        """Initial values of one module; ``apply`` comes to a block after its parts.

        Source: convolutions He et al. 2015, https://arxiv.org/abs/1502.01852, with the fan of the
        output; the classifier as `torch.nn.Linear`.
        """
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:  # squeeze-and-excitation
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            nn.init.uniform_(module.weight, -bound, bound)
            nn.init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, BasicBlock | Bottleneck) and module.zero_init_residual:
            last = module.bn3 if isinstance(module, Bottleneck) else module.bn2
            nn.init.zeros_(last.weight)

    def features(
        self, image: Float[Tensor, "batch in_channels height width"]
    ) -> tuple[Float[Tensor, "batch _ _ _"], ...]:
        """Maps after the stem and after each stage, finest first.

        They have `feature_channels` channels and the image's size over `feature_reductions`.
        """
        stem = self._stem(image)
        maps = [stem, self.layer1(self.maxpool(stem))]
        for layer in (self.layer2, self.layer3, self.layer4):
            maps.append(layer(maps[-1]))
        return tuple(maps)

    def forward(
        self, image: Float[Tensor, "batch in_channels height width"]
    ) -> Float[Tensor, "batch num_classes"]:
        """Logits of images of any size, normalised as the card of the weights says.

        Raises:
            DataError: `image` is no batch of images with the network's channels.
        """
        x = self.maxpool(self._stem(image))
        # Not features(image)[-1], which would keep the finer maps in memory to the end.
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))

    def _stem(self, image: Tensor) -> Tensor:
        check_images(image, self.conv1)
        return self.relu(self.bn1(self.conv1(image)))

    def freeze_norms(self) -> None:
        """Freeze all batch norms, statistics and parameters, through every later ``train()``."""
        self.norms_frozen = True
        hold_norms(self, every=True)

    def train(self, mode: bool = True) -> ResNet:
        """Training or eval mode; frozen norms stay in eval mode."""
        super().train(mode)
        hold_norms(self, every=self.norms_frozen)
        return self

    def depth_order(self) -> list[list[str]]:
        """Key prefixes from the image to the answer: stem, each block, classifier."""
        stages = enumerate(self.config.depths, 1)
        blocks = [[f"layer{number}.{i}"] for number, depth in stages for i in range(depth)]
        return [["conv1", "bn1"], *blocks, ["fc"]]

    def adapt_input(self, tensors: dict[str, Tensor], in_channels: int) -> dict[str, Tensor]:
        """The first kernel for this network's channels; see `vision.convnet.adapted_stem`."""
        return adapted_stem("conv1.weight", tensors, in_channels, self.config.in_channels)


# Images of 32 pixels, enlarged to 40, 48, then 64, so that the stem for ImageNet stays as it is.
# Source: He et al. 2015, section 4.2 (shift by 4, mirror); DeVries, Taylor 2017 (cutout);
# Loshchilov, Hutter 2017 (AdamW); Goyal et al. 2017, section 5.1 (blocks start as identities).
RECIPES = {
    "cifar10": ImageRecipe(
        data="cifar10/train",
        validation="cifar10/test",
        config={"num_classes": 10, "zero_init_residual": True},
        epochs=18,
        batch_size=128,
        optimizer=AdamW(lr=2e-3, weight_decay=0.05),
        schedule=Cosine(warmup=0.04),
        precision="bfloat16",
        clip_norm=5.0,
        ema=0.998,
        label_smoothing=0.1,
        crop_padding=4,
        flip=True,
        cutout=8,
        sizes=((0.1, 40), (0.25, 48), (1.0, 64)),
        channels_last=True,
        workers=2,
        cache=0.25,
    )
}
