"""Matrix products of linear layers, by oneDNN where it is the faster one.

torch multiplies float32 matrices on a CPU with MKL, which has no kernels of its own for
AMD's processors, and takes slow ones there. oneDNN, which torch has as well, makes its
kernels for what the processor can do.

Source: the operators by which torch.compile multiplies,
pytorch/pytorch@v2.11.0 torch/_inductor/fx_passes/mkldnn_fusion.py
"""

import functools
import platform
from pathlib import Path

import torch

# Weights of fewer elements gain little, or nothing.
_LARGE = 2**17
# The gradient of a weight with more outputs than inputs takes copies, for which that of
# fewer rows or elements does not pay.
_MANY_ROWS = 1024
_VERY_LARGE = 2**19


@functools.cache
def has_onednn() -> bool:
    """Say whether torch has oneDNN beside MKL, and with it an x86 processor."""
    return torch.backends.mkl.is_available() and all(
        hasattr(torch.ops.mkldnn, name)
        for name in ("_linear_pointwise", "_reorder_linear_weight")
    )


@functools.cache
def on_amd(info: Path = Path("/proc/cpuinfo")) -> bool:
    """Say whether the processor is one of AMD's.

    Args:
        info: File in which Linux describes it.

    """
    # Where there is no such file, on Windows, the processor's name has its vendor.
    processor = info.read_text() if info.exists() else platform.processor()

    return "AuthenticAMD" in processor


def large(weight: torch.Tensor) -> bool:
    """Say whether oneDNN can read a weight, and there is enough of it.

    Args:
        weight: Weight. (N, K)

    """
    return (
        weight.numel() >= _LARGE
        and weight.is_cpu
        and weight.is_contiguous()
        and weight.dtype == torch.float32
        and has_onednn()
        # The user's choice, for how long it lasts.
        and torch.backends.mkldnn.enabled
    )


def by_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Say whether products with a weight as it is, not in blocks, are for oneDNN.

    Args:
        x: Input, or gradient of the output.
        weight: Weight. (N, K)

    Returns:
        : False also under torch.func's transforms, and for kinds of tensors that need
            not be what they look like.

    """
    return (
        on_amd()
        and large(weight)
        and x.dtype == torch.float32
        and x.numel() > 0
        and type(x) is torch.Tensor
        and type(weight) in (torch.Tensor, torch.nn.Parameter)
        and not torch._C._are_functorch_transforms_active()
    )


def affine(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute x weight^T + bias.

    Args:
        x: Input. (..., K)
        weight: Weight. (N, K)
        bias: Bias. (N,)

    Returns:
        : Output. (..., N)

    """
    if _for_good(x, weight):
        return multiply(x, weight, bias)

    return torch.nn.functional.linear(x, weight, bias)


def input_gradient(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute the gradient for the input of `affine`.

    Args:
        grad: Gradient of the output. (..., N)
        weight: Weight. (N, K)

    Returns:
        : Gradient. (..., K)

    """
    if _for_good(grad, weight):
        return multiply(grad, weight.t())

    return torch.matmul(grad, weight)


def weight_gradient(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Compute the gradient for the weight of `affine`.

    Args:
        grad: Gradient of the output. (..., N)
        x: Input. (..., K)
        weight: Weight. (N, K)

    Returns:
        : Gradient. (N, K)

    """
    rows = grad.reshape(-1, grad.size(-1))
    inputs = x.reshape(-1, x.size(-1))
    outgoing, incoming = weight.shape
    by_copies = rows.size(0) >= _MANY_ROWS and weight.numel() >= _VERY_LARGE

    if not _for_good(grad, weight) or (outgoing > incoming and not by_copies):
        return torch.mm(rows.t(), inputs)

    # The larger factor in the place of the weight. With gaps between its rows, oneDNN
    # would take a hundred times as long.
    if outgoing <= incoming:
        return multiply(rows.t(), inputs.contiguous().t())

    return multiply(inputs.t(), rows.contiguous().t()).t().contiguous()


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute x weight^T + bias by oneDNN, without a gradient.

    Args:
        x: Input. (..., K)
        weight: Weight, contiguous, as it is or transposed, or what `in_blocks` makes
            of it. (N, K)
        bias: Bias (None = none). (N,)

    Returns:
        : Output. (..., N)

    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """Copy a weight into the blocks in which oneDNN reads it fastest.

    Args:
        weight: Weight. (N, K)

    Returns:
        : Copy, for `multiply` alone.

    """
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def _for_good(x: torch.Tensor, weight: torch.Tensor) -> bool:
    # With a gradient to come, as in a backward pass that is to be differentiated again,
    # autograd has to see the product.
    return not torch.is_grad_enabled() and by_onednn(x, weight)
