"""Linear layers for the few rows of a step of the search."""

from collections.abc import Callable

import torch

from espnet_mega_bias.matrix_products import (
    affine,
    in_blocks,
    large,
    multiply,
    on_amd,
)
from espnet_mega_bias.plain_module import is_plain

# So many calls with several rows come before a weight is copied.
_CALLS_BEFORE_COPY = 10
# Up to as many rows, the batched product is the faster one.
_FEWEST = 2
# Into as many parts a weight is cut for that.
_PARTS = 8


def few_rows_linear(
    layer: torch.nn.Module,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make a function that computes a linear layer, faster for a few rows.

    A step of the search reads each weight once, from memory, and MKL, with which torch
    multiplies on a CPU, reads slower than memory can: for several rows on any
    processor, on AMD's for a single one too, by one thread at half the speed at which
    that can read. oneDNN reads faster for several rows, from a copy in blocks, which
    takes as long as is gained in some ten calls. For one row or two on AMD's
    processors, the same sum as a batched product of parts of the weight takes all
    threads and reads at full speed, without a copy.

    It is to be made anew after any change of the layer, that of the weight in place and
    hooks included, and where gradients or autocast are switched on or off.

    Args:
        layer: Linear layer from K to N features.

    Returns:
        : From inputs (M, K) to outputs (M, N). The layer itself where nothing is gained
            or it is not plain: with hooks, replaced by another class, small, without a
            bias, elsewhere than on an x86 CPU, of another type than float32, with a
            gradient to come, under autocast, or in a program that is being traced.

    """
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.is_autocast_enabled("cpu")
        or not is_plain(layer, torch.nn.Linear)
        or layer.bias is None
        or not large(layer.weight)
    ):
        return layer

    return _FewRowsLinear(layer)


class _FewRowsLinear:
    def __init__(self, layer: torch.nn.Linear) -> None:
        self.layer = layer
        divides = layer.out_features % _PARTS == 0
        self.in_parts = _in_parts(layer) if on_amd() and divides else None
        self.calls = 0
        self.blocks: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.size(0)

        if rows <= _FEWEST and self.in_parts is not None:
            return self.in_parts(x)

        layer = self.layer

        if rows == 1:
            return layer(x)

        # The search starts anew with every utterance, and many are short.
        if self.calls < _CALLS_BEFORE_COPY:
            self.calls += 1

            return affine(x, layer.weight, layer.bias)

        if self.blocks is None:
            self.blocks = in_blocks(layer.weight)

        return multiply(x, self.blocks, layer.bias)


def _in_parts(layer: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    features, size = layer.weight.shape
    weight = layer.weight.view(_PARTS, -1, size)
    bias = layer.bias.view(_PARTS, -1, 1)

    def compute(x: torch.Tensor) -> torch.Tensor:
        rows = x.size(0)

        if rows == 1:
            # With the strides of `x.t()`: those of `x.view(-1, 1)`, which would do as
            # well for one row, lead to another, slower, product.
            columns = x.as_strided((_PARTS, size, 1), (0, x.stride(1), size))

            return torch.baddbmm(bias, weight, columns).view(1, -1)

        columns = x.t().expand(_PARTS, -1, rows)
        out = torch.baddbmm(bias, weight, columns)

        return out.view(features, rows).t().contiguous()

    return compute
