"""espnet_mega_bias.swish: the gradient, and its own."""

import pytest
import torch

from espnet_mega_bias.swish import swish_backward


@pytest.mark.parametrize("differentiable", [True, False])
def test_gradient_is_that_of_torch(differentiable, assert_close64):
    x = torch.linspace(-30.0, 30.0, 121, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x)
    (expected,) = torch.autograd.grad(torch.nn.functional.silu(x), x, grad)

    with torch.set_grad_enabled(differentiable):
        assert_close64(swish_backward(grad, x), expected)


def test_gradient_of_the_gradient():
    inputs = [torch.randn(7, dtype=torch.float64, requires_grad=True) for _ in "gx"]

    assert torch.autograd.gradcheck(swish_backward, inputs)
