"""Convolutions as products of matrices: the same function by other kernels, for training on a CPU.

In bfloat16 a CPU multiplies matrices several times faster than it convolves images of few pixels,
above all than it computes the gradients of the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Pointwise(torch.autograd.Function):
    """A 1x1 convolution of pixels (M, C) by weights (O, C)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Pixels (M, O)."""
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the pixels and of the weights."""
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Unfolded(torch.autograd.Function):
    """A 3x3 convolution, padded by one, of images (N, H, W, C) by weights (O, C, 3, 3)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        """Images (N, H', W', O)."""
        n, height, width, c = x.shape
        padded = F.pad(x, (0, 0, 1, 1, 1, 1))
        h, w = (height - 1) // stride + 1, (width - 1) // stride + 1
        views = [_view(padded, k, h, w, stride) for k in range(9)]
        columns = torch.cat(views, dim=-1).view(n * h * w, 9 * c)
        flat = weight.permute(0, 2, 3, 1).reshape(-1, 9 * c)
        ctx.save_for_backward(columns, flat)
        ctx.shape, ctx.out, ctx.stride = x.shape, (h, w), stride
        return (columns @ flat.t()).view(n, h, w, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients of the images and of the weights; the stride has none."""
        columns, flat = ctx.saved_tensors
        (n, height, width, c), (h, w) = ctx.shape, ctx.out
        grad = grad.reshape(n * h * w, -1)
        weight = (grad.t() @ columns).view(-1, 3, 3, c).permute(0, 3, 1, 2)
        parts = (grad @ flat).view(n, h, w, 9, c)
        padded = grad.new_zeros(n, height + 2, width + 2, c)
        for k in range(9):
            _view(padded, k, h, w, ctx.stride).add_(parts[:, :, :, k])
        return padded[:, 1:-1, 1:-1].contiguous(), weight, None


def _view(padded: Tensor, k: int, h: int, w: int, stride: int) -> Tensor:
    """The pixels that weight `k` of a 3x3 kernel meets."""
    i, j = divmod(k, 3)
    return padded[:, i : i + stride * (h - 1) + 1 : stride, j : j + stride * (w - 1) + 1 : stride]


def _as_product(conv: nn.Conv2d, x: Tensor) -> Tensor:
    kernel, stride = conv.kernel_size[0], conv.stride[0]
    if x.dtype != torch.bfloat16 or (kernel == 3 and x.shape[1] < 256):
        return nn.Conv2d.forward(conv, x)
    weight, pixels = conv.weight.to(x.dtype), x.permute(0, 2, 3, 1)
    with torch.autocast("cpu", enabled=False):
        if kernel == 3:
            out = Unfolded.apply(pixels, weight, stride)
        else:
            pixels = pixels[:, ::stride, ::stride]
            n, h, w, c = pixels.shape
            out = Pointwise.apply(pixels.reshape(-1, c), weight.flatten(1)).view(n, h, w, -1)
    return out.permute(0, 3, 1, 2)


def as_products(model: nn.Module) -> nn.Module:
    """Compute 1x1 and 3x3 convolutions as products of matrices where they are in bfloat16.

    3x3 ones of fewer than 256 channels stay as they are: copying nine times so many pixels would
    cost more than it gains; so do those with groups, dilation, bias or another padding than half of
    the kernel. The forward of each module is replaced in this process; what is saved of the model
    does not know of it.

    Args:
        model: Of images; its memory format becomes channels last.
    """
    for module in model.modules():
        if type(module) is nn.Conv2d and _is_plain(module):
            module.forward = _as_product.__get__(module)
    return model.to(memory_format=torch.channels_last)


def _is_plain(conv: nn.Conv2d) -> bool:
    return (
        (conv.kernel_size, conv.padding) in (((1, 1), (0, 0)), ((3, 3), (1, 1)))
        and conv.stride[0] == conv.stride[1]
        and (conv.dilation, conv.groups, conv.bias) == ((1, 1), 1, None)
        and conv.padding_mode == "zeros"
    )
