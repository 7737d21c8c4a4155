"""Linear layers over whole sequences."""

import torch

from espnet_mega_bias.matrix_products import (
    affine,
    by_onednn,
    input_gradient,
    weight_gradient,
)
from espnet_mega_bias.plain_module import is_plain


def linear(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compute a linear layer, large ones faster than torch where `by_onednn` says so.

    A layer that is not torch's own, that something is hooked to, or that is compiled,
    exported, traced or under autocast is called as it is.

    Args:
        layer: Linear layer from K to N features.
        x: Input. (..., K)

    Returns:
        : Output. (..., N)

    """
    if (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.is_autocast_enabled("cpu")
        or not is_plain(layer, torch.nn.Linear)
        or layer.bias is None
        or not by_onednn(x, layer.weight)
    ):
        return layer(x)

    return _Linear.apply(x, layer.weight, layer.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)

        return affine(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad

        return (
            input_gradient(grad, weight) if needed[0] else None,
            weight_gradient(grad, x, weight) if needed[1] else None,
            grad.reshape(-1, grad.size(-1)).sum(0) if needed[2] else None,
        )
