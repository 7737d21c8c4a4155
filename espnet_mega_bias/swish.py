"""Swish, whose output is computed again where a gradient needs it."""

import torch


def is_swish(activation: torch.nn.Module | None) -> bool:
    """Tell whether a module computes x * sigmoid(x) and nothing else.

    Its gradient is made of its input, which autograd keeps; a function that is given
    that input needs not keep the output as well.

    Args:
        activation: Activation function.

    Returns:
        : False for a subclass, and where something is hooked to the module.

    """
    return type(activation) is torch.nn.SiLU and not (
        activation._forward_pre_hooks
        or activation._forward_hooks
        or activation._backward_pre_hooks
        or activation._backward_hooks
    )


def swish_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of the input of swish.

    Args:
        grad: Gradient of the output. (...)
        x: Input. (...)

    Returns:
        : Gradient, which can itself be differentiated. (...)

    """
    if not torch.is_grad_enabled():
        return torch.ops.aten.silu_backward(grad, x)

    # torch's own has no derivative.
    sigmoid = torch.sigmoid(x)

    return grad * (sigmoid * (1.0 + x * (1.0 - sigmoid)))
