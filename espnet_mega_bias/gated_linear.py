"""A linear layer of a product, for which autograd keeps the factors alone."""

import torch

from espnet_mega_bias.autocast import autocast_dtype
from espnet_mega_bias.linear import linear
from espnet_mega_bias.matrix_products import (
    affine,
    input_gradient,
    weight_gradient,
)
from espnet_mega_bias.plain_module import is_plain
from espnet_mega_bias.swish import swish_backward


def gated_linear(
    layer: torch.nn.Module,
    x: torch.Tensor,
    gate: torch.Tensor,
    activation: torch.nn.Module | None = None,
) -> torch.Tensor:
    """Compute layer(x * activation(gate)).

    Where a gradient will be needed, the product that a linear layer would keep for it
    is computed again instead, and so is swish. A layer that is not torch's own, or that
    something is hooked to, is called as it is, and so is any other activation.

    Args:
        layer: Linear layer from V to D features.
        x: Input. (..., V)
        gate: Gate before its activation, of the same shape. (..., V)
        activation: Activation function of the gate (None = none).

    Returns:
        : Output. (..., D)

    """
    by_call = (
        torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or not is_plain(layer, torch.nn.Linear)
    )
    swish = not by_call and is_plain(activation, torch.nn.SiLU)

    if activation is not None and not swish:
        gate = activation(gate)

    if by_call:
        return linear(layer, x * gate)

    device = x.device.type
    dtype = autocast_dtype(device)

    if dtype is None:
        return _GatedLinear.apply(x, gate, layer.weight, layer.bias, swish)

    bias = None if layer.bias is None else layer.bias.to(dtype)

    with torch.autocast(device, enabled=False):
        return _GatedLinear.apply(x, gate, layer.weight.to(dtype), bias, swish)


class _GatedLinear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, gate, weight, bias, swish):
        product = (x * _activated(gate, swish)).to(weight.dtype)

        return affine(product, weight, bias)

    # Apart from `forward`, or torch.func would refuse the function.
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:3])
        ctx.swish = inputs[4]

    @staticmethod
    def backward(ctx, grad):
        x, gate, weight = ctx.saved_tensors
        activated = _activated(gate, ctx.swish)
        needed = ctx.needs_input_grad
        grads = [None] * 5

        if needed[0] or needed[1]:
            product = input_gradient(grad, weight).to(
                torch.promote_types(x.dtype, gate.dtype)
            )

            if needed[0]:
                grads[0] = product * activated

            if needed[1]:
                grads[1] = product * x

                if ctx.swish:
                    grads[1] = swish_backward(grads[1], gate)

        if needed[2]:
            product = (x * activated).to(grad.dtype)
            grads[2] = weight_gradient(grad, product, weight)

        if needed[3]:
            grads[3] = grad.reshape(-1, grad.size(-1)).sum(0)

        return tuple(grads)


def _activated(gate: torch.Tensor, swish: bool) -> torch.Tensor:
    return torch.nn.functional.silu(gate) if swish else gate
