"""espnet_mega_bias.light_call: the module's values, and when it is called."""

import pytest
import torch

from espnet_mega_bias.light_call import light_call


def layer_norm(**options):
    module = torch.nn.LayerNorm(6, **options)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


MODULES = {
    "silu": torch.nn.SiLU,
    "layer norm": layer_norm,
    "layer norm, eps": lambda: layer_norm(eps=0.5),
    "layer norm, no bias": lambda: layer_norm(bias=False),
    "layer norm, no weights": lambda: layer_norm(elementwise_affine=False),
    "relu": torch.nn.ReLU,
}


@pytest.fixture(params=MODULES)
def module(request):
    return MODULES[request.param]()


def test_it_gives_what_the_module_gives_with_its_gradient(module):
    x = torch.randn(3, 6, requires_grad=True)
    inputs = [x, *module.parameters()]
    out, expected = light_call(module)(x), module(x)

    assert torch.equal(out, expected)

    weight = torch.randn(3, 6)
    grads, theirs = (
        torch.autograd.grad((y * weight).sum(), inputs) for y in (out, expected)
    )
    assert all(map(torch.equal, grads, theirs))


def test_known_modules_are_not_called(module, monkeypatch):
    called = []
    call = light_call(module)
    monkeypatch.setattr(
        torch.nn.Module, "__call__", lambda module, x: called.append(module)
    )

    call(torch.randn(3, 6))

    assert called == ([module] if type(module) is torch.nn.ReLU else [])


def test_an_input_may_be_overwritten_where_the_module_says_so():
    x = torch.randn(3, 6)
    expected = torch.nn.functional.silu(x)

    out = light_call(torch.nn.SiLU(inplace=True))(x)

    assert out is x
    assert torch.equal(x, expected)


def test_a_change_of_the_weights_in_place_is_seen():
    module = layer_norm()
    call = light_call(module)

    with torch.no_grad():
        module.weight.fill_(3.0)

    x = torch.randn(3, 6)
    assert torch.equal(call(x), module(x))


def test_hooks_are_called(module):
    x = torch.randn(3, 6)
    module.register_forward_hook(lambda module, inputs, output: 2.0 * output)

    assert torch.equal(light_call(module)(x), module(x))


class Doubled(torch.nn.SiLU):
    def forward(self, x):
        return 2.0 * super().forward(x)


def test_a_subclass_is_called():
    x = torch.randn(3, 6)

    assert torch.equal(light_call(Doubled())(x), 2.0 * torch.nn.functional.silu(x))
