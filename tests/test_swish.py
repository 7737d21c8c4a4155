"""espnet_mega_bias.swish: which modules are it, and its gradients."""

import pytest
import torch

from espnet_mega_bias.swish import is_swish, swish_backward


class Own(torch.nn.SiLU):
    def forward(self, x):
        return 2 * super().forward(x)


def test_torchs_module_alone_is_swish():
    assert is_swish(torch.nn.SiLU())
    assert not is_swish(Own())
    assert not is_swish(torch.nn.ReLU())
    assert not is_swish(None)


@pytest.mark.parametrize(
    "hook", ["forward_pre_hook", "forward_hook", "full_backward_hook"]
)
def test_a_module_with_a_hook_is_called_rather(hook):
    module = torch.nn.SiLU()
    handle = getattr(module, f"register_{hook}")(lambda *_: None)

    assert not is_swish(module)

    handle.remove()
    assert is_swish(module)


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
