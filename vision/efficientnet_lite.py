"""EfficientNet-Lite for image classification: EfficientNet without what small devices do badly.

Papers:
    Tan, Le 2019, "EfficientNet: rethinking model scaling for convolutional neural networks",
    https://arxiv.org/abs/1905.11946. The Lite family is described in its reference implementation,
    https://github.com/tensorflow/tpu/tree/master/models/official/efficientnet/lite.

Differs from the paper, as the reference implementation does:
    * ReLU6 in place of swish, no squeeze-and-excitation (both for quantisation).
    * Stem, head, and the repeats of the first and the last stage do not scale.

Differs from the reference implementation:
    * A fresh classifier starts with the fan of its input: few classes do not mean large logits.

The family (width_multiplier, depth_multiplier, dropout; resolution it was trained at):
    lite0 1.0, 1.0, 0.2; 224    lite1 1.0, 1.1, 0.2; 240    lite2 1.1, 1.2, 0.3; 260
    lite3 1.2, 1.4, 0.3; 280    lite4 1.4, 1.8, 0.3; 300

State-dict keys, leading underscores included, are those of the package efficientnet-lite-pytorch.

Cards: efficientnet_lite0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vision.augment import ImageRecipe
from vision.convnet import DropPath, adapted_stem, check_images, checkpointed, hold_norms
from zoo.errors import ConfigError, shown
from zoo.training.recipe import AdamW, Cosine

STAGES = (  # table 1 of the paper; those with stride 2 begin a new resolution
    # expansion, kernel, channels, repeats, stride
    (1, 3, 16, 1, 1),
    (6, 3, 24, 2, 2),
    (6, 5, 40, 2, 2),
    (6, 3, 80, 3, 2),
    (6, 5, 112, 3, 1),
    (6, 5, 192, 4, 2),
    (6, 3, 320, 1, 1),
)

STEM_CHANNELS = 32
HEAD_CHANNELS = 1280


@dataclass(frozen=True, kw_only=True)
class EfficientNetLiteConfig:
    """What distinguishes one EfficientNet-Lite from another; the defaults are lite0."""

    width_multiplier: float = 1.0  # on the channels of every stage
    depth_multiplier: float = 1.0  # on the repeats of every stage but the first and the last
    dropout: float = 0.2  # before the classifier, in training
    drop_connect: float = 0.2  # chance of dropping the last block's branch; less for earlier ones
    num_classes: int = 1000
    in_channels: int = 3
    gradient_checkpointing: bool = False  # in training: less memory, one more forward pass

    def __post_init__(self) -> None:
        for name in ("width_multiplier", "depth_multiplier"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {shown(getattr(self, name))}; it takes more than 0")
        for name in ("dropout", "drop_connect"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} is {shown(getattr(self, name))}; it takes a rate from 0, below 1"
                )
        for name in ("num_classes", "in_channels"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {shown(getattr(self, name))}; it takes at least 1")


class SameConv2d(nn.Conv2d):
    """Convolution with TensorFlow's "SAME" padding: ceil(n / stride) outputs for any n inputs.

    The padding depends on the size of the input, and what is odd of it goes to the right and the
    bottom. A fixed symmetric padding shifts the grid of every strided layer: trained weights then
    still work, visibly worse.
    """

    def forward(
        self, x: Float[Tensor, "batch _ height width"]
    ) -> Float[Tensor, "batch channels out_height out_width"]:
        """Pad for this input's size, then convolve."""
        top, bottom = self.same_padding(x.shape[2])
        left, right = self.same_padding(x.shape[3])
        return super().forward(F.pad(x, (left, right, top, bottom)))

    def same_padding(self, size: int) -> tuple[int, int]:
        """Padding before and after an axis of this size: (ceil(n / s) - 1) s + k - n in all.

        Written so that an exported graph simplifies the size of the output to (n - 1) // s + 1.
        """
        kernel_size, stride = self.kernel_size[0], self.stride[0]
        total = (size - 1) // stride * stride + kernel_size - size
        return total // 2, total - total // 2


def conv(
    in_channels: int, out_channels: int, kernel_size: int, *, stride: int = 1, groups: int = 1
) -> nn.Conv2d:
    """Convolution without bias, since a norm follows, with "SAME" padding.

    At stride 1 that is symmetric and the same for every size, so a plain convolution does it.
    """
    if stride == 1:
        return nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            padding=kernel_size // 2,
            groups=groups,
            bias=False,
        )
    return SameConv2d(in_channels, out_channels, kernel_size, stride, groups=groups, bias=False)


def norm(channels: int) -> nn.BatchNorm2d:
    """Batch norm with the reference's constants; its momentum 0.99 is 0.01 in PyTorch."""
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class MBConv(nn.Module):
    """1x1 expand, depthwise, 1x1 project, plus identity where the shape stays."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        expansion: int,
        kernel_size: int,
        stride: int,
        drop_connect: float,
    ) -> None:
        super().__init__()
        inner = in_channels * expansion
        self.out_channels, self.stride = out_channels, stride
        self.expands = expansion != 1
        if self.expands:
            self._expand_conv = conv(in_channels, inner, 1)
            self._bn0 = norm(inner)
            self._relu0 = nn.ReLU6(inplace=True)  # one per use: quantisation observes each apart
        self._depthwise_conv = conv(inner, inner, kernel_size, stride=stride, groups=inner)
        self._bn1 = norm(inner)
        self._relu1 = nn.ReLU6(inplace=True)
        self._project_conv = conv(inner, out_channels, 1)
        self._bn2 = norm(out_channels)
        self.residual = stride == 1 and in_channels == out_channels
        self._drop_connect = DropPath(drop_connect)

    def forward(
        self, x: Float[Tensor, "batch _ height width"]
    ) -> Float[Tensor, "batch channels out_height out_width"]:
        """The block's output, not rectified (a linear bottleneck)."""
        y = self._relu0(self._bn0(self._expand_conv(x))) if self.expands else x
        y = self._relu1(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return self._drop_connect(y) + x if self.residual else y


def blocks(config: EfficientNetLiteConfig) -> list[MBConv]:
    """Every block of every stage, scaled; only the first one of a stage has its stride."""
    repeats = [scaled_repeats(stage[3], config.depth_multiplier) for stage in STAGES]
    repeats[0], repeats[-1] = STAGES[0][3], STAGES[-1][3]
    built: list[MBConv] = []
    in_channels = STEM_CHANNELS
    for (expansion, kernel_size, channels, _, stride), repeat in zip(STAGES, repeats, strict=True):
        out_channels = scaled_channels(channels, config.width_multiplier)
        for i in range(repeat):
            built.append(
                MBConv(
                    in_channels,
                    out_channels,
                    expansion=expansion,
                    kernel_size=kernel_size,
                    stride=stride if i == 0 else 1,
                    drop_connect=config.drop_connect * len(built) / sum(repeats),
                )
            )
            in_channels = out_channels
    return built


def scaled_channels(channels: int, multiplier: float) -> int:
    """Channels times the multiplier, to the nearest multiple of 8 that is not below 90 % of it."""
    exact = channels * multiplier
    rounded = max(8, int(exact + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * exact else rounded


def scaled_repeats(repeats: int, multiplier: float) -> int:
    """Repeats times the multiplier, rounded up."""
    return math.ceil(repeats * multiplier)


class EfficientNetLite(nn.Module):
    """Stem, inverted-bottleneck blocks, 1x1 head, global average, linear classifier."""

    def __init__(self, config: EfficientNetLiteConfig) -> None:
        super().__init__()
        self.config = config
        self.norms_frozen = False
        self.gradient_checkpointing = config.gradient_checkpointing
        self._conv_stem = conv(config.in_channels, STEM_CHANNELS, 3, stride=2)
        self._bn0 = norm(STEM_CHANNELS)
        self._relu0 = nn.ReLU6(inplace=True)
        built = blocks(config)
        self._blocks = nn.ModuleList(built)
        self._conv_head = conv(built[-1].out_channels, HEAD_CHANNELS, 1)
        self._bn1 = norm(HEAD_CHANNELS)
        self._relu1 = nn.ReLU6(inplace=True)
        self._avg_pooling = nn.AdaptiveAvgPool2d(1)
        self._dropout = nn.Dropout(config.dropout)
        self._fc = nn.Linear(HEAD_CHANNELS, config.num_classes)
        # Maps are taken after the last block before each change of resolution, and at the end.
        self._taps = [i - 1 for i, block in enumerate(built) if block.stride == 2]
        self._taps.append(len(built) - 1)
        self.feature_channels = tuple(built[i].out_channels for i in self._taps)
        self.feature_reductions = (2, 4, 8, 16, 32)  # input size over map size, rounded up
        self.apply(self.init_weights)

    @staticmethod
    def init_weights(module: nn.Module) -> None:
        """Initial values of one module.

        Source: the reference implementation. A depthwise kernel there has one output per group,
        which `torch.nn.init.kaiming_normal_` does not see.
        """
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels // module.groups * math.prod(module.kernel_size)
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            # Differs from the reference: it takes the number of classes here.
            bound = 1 / math.sqrt(module.in_features)
            nn.init.uniform_(module.weight, -bound, bound)
            nn.init.zeros_(module.bias)

    def features(
        self, image: Float[Tensor, "batch in_channels height width"]
    ) -> tuple[Float[Tensor, "batch _ _ _"], ...]:
        """Maps after the last block of each resolution, finest first.

        They have `feature_channels` channels and the image's size over `feature_reductions`.
        """
        x = self._stem(image)
        maps = []
        for index, block in enumerate(self._blocks):
            x = self._run(block, x)
            if index in self._taps:
                maps.append(x)
        return tuple(maps)

    def forward(
        self, image: Float[Tensor, "batch in_channels height width"]
    ) -> Float[Tensor, "batch num_classes"]:
        """Logits of images of any size, normalised as the card of the weights says.

        Raises:
            DataError: `image` is no batch of images with the network's channels.
        """
        x = self._stem(image)
        for block in self._blocks:
            x = self._run(block, x)
        x = self._relu1(self._bn1(self._conv_head(x)))
        return self._fc(self._dropout(torch.flatten(self._avg_pooling(x), 1)))

    def _stem(self, image: Tensor) -> Tensor:
        check_images(image, self._conv_stem)
        return self._relu0(self._bn0(self._conv_stem(image)))

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        recompute = self.gradient_checkpointing and self.training
        return checkpointed(block, x) if recompute else block(x)

    def freeze_norms(self) -> None:
        """Freeze all batch norms, statistics and parameters, through every later ``train()``."""
        self.norms_frozen = True
        hold_norms(self, every=True)

    def train(self, mode: bool = True) -> EfficientNetLite:
        """Training or eval mode; frozen norms stay in eval mode."""
        super().train(mode)
        hold_norms(self, every=self.norms_frozen)
        return self

    def depth_order(self) -> list[list[str]]:
        """Key prefixes from the image to the answer: stem, each block, 1x1 head, classifier."""
        blocks = [[f"_blocks.{i}"] for i in range(len(self._blocks))]
        return [["_conv_stem", "_bn0"], *blocks, ["_conv_head", "_bn1"], ["_fc"]]

    def adapt_input(self, tensors: dict[str, Tensor], in_channels: int) -> dict[str, Tensor]:
        """The first kernel for this network's channels; see `vision.convnet.adapted_stem`."""
        return adapted_stem("_conv_stem.weight", tensors, in_channels, self.config.in_channels)


RECIPES = {
    "cifar10": ImageRecipe(
        data="cifar10/train",
        validation="cifar10/test",
        init="imagenet1k",
        config={"num_classes": 10, "drop_connect": 0.1},
        epochs=3,
        batch_size=64,
        optimizer=AdamW(lr=1e-3, weight_decay=0.05),
        schedule=Cosine(warmup=0.05),
        clip_norm=5.0,
        ema=0.998,
        label_smoothing=0.1,
        layer_decay=0.9,
        crop_padding=4,
        flip=True,
        cutout=8,
        channels_last=True,
        cache=0.25,
    )
}
