"""Linear layers for the few rows of a step of the search."""

import functools
import platform
from collections.abc import Callable
from pathlib import Path

import torch

from espnet_mega_bias.plain_module import is_plain

# Weights of fewer elements stay in the caches of a processor.
_LARGE = 2**17
# Up to as many rows, the batched product is the faster one.
_FEW = 32
# Up to as many, with the weight in front.
_FEWEST = 4
# Into as many parts a weight is cut.
_PARTS = 8


def few_rows_linear(
    layer: torch.nn.Module,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make a function that computes a linear layer, faster for a few rows.

    A step of the search reads each weight once, from memory. MKL, with which torch
    multiplies on a CPU, does so on AMD's processors with one thread, and at half the
    speed at which that thread can read. The same sum as a batched product of parts of
    the weight takes all threads, and, with the weight in front, reads at full speed. On
    Intel's, MKL has other kernels, and the batched product would be the slower one.

    It sees hooks and changes of the weight in place. After other changes, and where
    gradients or autocast are switched on or off, it is to be made anew.

    Args:
        layer: Linear layer from K to N features.

    Returns:
        : From inputs (M, K) to outputs (M, N). The layer itself where nothing is gained
            or it is not plain: with hooks, replaced by another class, small, without a
            bias, elsewhere than on a CPU of AMD, with a gradient to come, under
            autocast, or in a program that is being traced.

    """
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.is_autocast_enabled("cpu")
        or not _mkl_on_amd()
        or not is_plain(layer, torch.nn.Linear)
        or layer.bias is None
    ):
        return layer

    weight = layer.weight

    if (
        weight.numel() < _LARGE
        or weight.size(0) % _PARTS != 0
        or not weight.is_cpu
        or not weight.is_contiguous()
        or weight.dtype not in (torch.float32, torch.float64)
    ):
        return layer

    return _FewRowsLinear(layer)


@functools.cache
def _mkl_on_amd(info: Path = Path("/proc/cpuinfo")) -> bool:
    # Where there is no such file, on Windows, the processor's name has its vendor.
    processor = info.read_text() if info.exists() else platform.processor()

    return "AuthenticAMD" in processor and torch.backends.mkl.is_available()


class _FewRowsLinear:
    def __init__(self, layer: torch.nn.Linear) -> None:
        self.layer = layer
        self.features, size = layer.weight.shape

        self.weight = layer.weight.view(_PARTS, -1, size)
        self.transposed = self.weight.transpose(1, 2)
        self.column = layer.bias.view(_PARTS, -1, 1)
        self.row = layer.bias.view(_PARTS, 1, -1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.size(0)

        # Hooks come and go while the weights stay as they are.
        if rows > _FEW or not is_plain(self.layer, torch.nn.Linear):
            return self.layer(x)

        if rows > _FEWEST:
            out = torch.baddbmm(self.row, x.expand(_PARTS, rows, -1), self.transposed)

            return out.transpose(0, 1).reshape(rows, self.features)

        # Not `x.view(-1, 1)` for one row: its strides lead to another, slower, product.
        columns = x.t().expand(_PARTS, -1, rows)
        out = torch.baddbmm(self.column, self.weight, columns)

        return out.view(1, -1) if rows == 1 else out.view(-1, rows).t().contiguous()
