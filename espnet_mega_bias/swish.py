"""The gradient of swish, for functions that keep its input alone."""

import torch


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
