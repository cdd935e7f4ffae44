"""What the convolutional families share.

Stochastic depth, squeeze-and-excitation, frozen norms, checkpointing, other input channels.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from zoo.errors import DataError


def check_images(image: Tensor, stem: nn.Conv2d) -> None:
    """Refuse what is no batch of images for this stem; an exported graph holds nothing of it.

    Raises:
        DataError: The tensor has other axes, other channels, or holds integers.
    """
    if image.ndim != 4:
        raise DataError(
            f"the image has shape {tuple(image.shape)}; the model takes (batch, channels, height, "
            "width): one image becomes a batch with image[None]"
        )
    if image.shape[1] != stem.in_channels:
        raise DataError(
            f"the image has {image.shape[1]} channels and the model takes {stem.in_channels}; "
            f"zoo.load(..., in_channels={image.shape[1]}) gives one that fits"
        )
    if not image.is_floating_point():
        raise DataError(
            f"the image is {str(image.dtype).removeprefix('torch.')}; the model takes normalised "
            "floats, as zoo.preprocess(name) makes them"
        )


class DropPath(nn.Module):
    """Zero a sample's whole residual branch with a probability, in training (stochastic depth).

    Source: Huang et al. 2016, https://arxiv.org/abs/1603.09382. Differs from the paper: kept
    branches grow in training, instead of all of them shrinking in eval mode.
    """

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = rate

    def forward(
        self, x: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch channels height width"]:
        """The input, kept or zeroed row by row; kept rows grow so that the mean stays."""
        if not self.training or self.rate == 0:
            return x
        kept = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(1 - self.rate)
        return x / (1 - self.rate) * kept

    def extra_repr(self) -> str:
        """The rate, for ``print(model)``."""
        return f"rate={self.rate}"


class SqueezeExcitation(nn.Module):
    """Channels reweighted by what the whole map holds; keys are those of torchvision and timm.

    Source: Hu et al. 2017, https://arxiv.org/abs/1709.01507, equations 2 to 4.
    """

    def __init__(self, channels: int, reduction: int) -> None:
        super().__init__()
        squeezed = max(1, channels // reduction)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.relu = nn.ReLU(inplace=True)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)

    def forward(
        self, x: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch channels height width"]:
        """Every channel times its weight, between 0 and 1."""
        pooled = x.mean((2, 3), keepdim=True)
        return self.fc2(self.relu(self.fc1(pooled))).sigmoid() * x


def hold_norms(module: nn.Module, *, every: bool) -> None:
    """Put frozen batch norms in eval mode: their statistics must not follow the batches either.

    Each ``train()`` undoes that, so the owner calls this there.

    Args:
        module: A network or a part of one.
        every: Freeze all of them; otherwise frozen are those whose parameters have no gradients.
    """
    for norm in batch_norms(module):
        if every:
            norm.requires_grad_(False)
        if every or (norm.affine and not any(p.requires_grad for p in norm.parameters())):
            norm.eval()


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """The batch norms inside, synchronised ones too."""
    return [m for m in module.modules() if isinstance(m, _BatchNorm)]


def spread_input(weight: Tensor, in_channels: int) -> Tensor:
    """A first convolution for another number of channels, with the same answer to a grey image.

    Each new channel gets the sum over the stored ones divided by the new number n, so that
    f_n(x, …, x) = f(x, …, x) for any n; repeating the stored ones does that for multiples only.

    Args:
        weight: Kernel with the input channels on axis 1.
        in_channels: The new number of input channels.
    """
    # A sum rounded to float16 would not be the answer to a grey image any more.
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return (wide.sum(dim=1, keepdim=True) / in_channels).repeat_interleave(in_channels, dim=1)


def adapted_stem(
    name: str, tensors: dict[str, Tensor], stored: int, wanted: int
) -> dict[str, Tensor]:
    """Stored tensors to replace so that weights take another number of input channels.

    Args:
        name: Of the kernel of the first convolution.
        tensors: Stored tensors by name.
        stored: Channels that they were made for.
        wanted: Channels of the network.
    """
    return {} if stored == wanted else {name: spread_input(tensors[name], wanted)}


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    """The block's output; what is inside is computed again in the backward pass instead of kept.

    Outputs, gradients and running statistics equal those of a plain call bit for bit.

    Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174
    """
    if torch.compiler.is_compiling():  # a compiled graph updates buffers once, and takes no context
        return checkpoint(block, x, use_reentrant=False)
    again = _ScratchStatistics(block)
    return checkpoint(block, x, use_reentrant=False, context_fn=lambda: (nullcontext(), again))


class _ScratchStatistics:
    """While it is entered, batch norms write into copies of their buffers.

    The second pass over a block sees the same batch, which must not count twice.
    """

    def __init__(self, block: nn.Module) -> None:
        self.norms = [norm for norm in batch_norms(block) if norm.training]

    def __enter__(self) -> None:
        self.kept = [dict(norm.named_buffers()) for norm in self.norms]
        for norm, buffers in zip(self.norms, self.kept, strict=True):
            for name, buffer in buffers.items():
                setattr(norm, name, buffer.clone())

    def __exit__(self, *_: Any) -> None:
        for norm, buffers in zip(self.norms, self.kept, strict=True):
            for name, buffer in buffers.items():
                setattr(norm, name, buffer)
