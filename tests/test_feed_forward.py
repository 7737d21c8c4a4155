"""espnet_mega_bias.feed_forward: what ESPnet's module computes."""

import functools

import pytest
import torch
from espnet2.asr_transducer.decoder.modules.mega.feed_forward import (
    NormalizedPositionwiseFeedForward,
)

from espnet_mega_bias import few_rows_linear, matrix_products
from espnet_mega_bias.feed_forward import feed_forward, feed_forward_step


@pytest.fixture(autouse=True)
def amd(monkeypatch):
    for part in (matrix_products, few_rows_linear):
        monkeypatch.setattr(part, "on_amd", lambda: True)


@pytest.fixture
def module():
    torch.manual_seed(5)
    module = NormalizedPositionwiseFeedForward(
        256,
        512,
        normalization=torch.nn.LayerNorm(256),
        activation=torch.nn.SiLU(),
        dropout_rate=0.5,
    ).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module.eval()


def in_full(module):
    return functools.partial(feed_forward, module)


@pytest.mark.parametrize("form", [feed_forward_step, in_full])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_values_are_those_of_the_module(module, form, dtype, count):
    x = torch.randn(count, 256, dtype=torch.float64)

    with torch.no_grad():
        expected = module(x)
        out = form(module.to(dtype))(x.to(dtype))

    atol = 1e-11 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("form", [feed_forward_step, in_full])
def test_gradients_are_those_of_the_module(module, form):
    x = torch.randn(2, 256, dtype=torch.float64, requires_grad=True)
    inputs = [x, *module.parameters()]

    for ours, theirs in zip(
        torch.autograd.grad(form(module)(x).square().sum(), inputs),
        torch.autograd.grad(module(x).square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def all_of_it(module):
    module.train()


def dropout_alone(module):
    module.hidden_dropout.train()


@pytest.mark.parametrize("form", [feed_forward_step, in_full])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("switch", [all_of_it, dropout_alone])
def test_dropout(module, form, switch, later):
    x = torch.randn(3, 256, dtype=torch.float64)

    with torch.no_grad():
        step = form(module)
        switch(module)
        step = step if later else form(module)

        torch.manual_seed(1)
        out = step(x)
        torch.manual_seed(1)

        assert torch.equal(out, module(x))
        assert not torch.equal(out, module(x))


@pytest.mark.parametrize("form", [feed_forward_step, in_full])
@pytest.mark.parametrize("part", ["", "linear1", "activation", "normalization"])
def test_hooks_are_called(module, form, part):
    x = torch.randn(3, 256, dtype=torch.float64)
    before = module(x)
    module.get_submodule(part).register_forward_hook(
        lambda part, inputs, out: 2.0 * out
    )

    with torch.no_grad():
        assert torch.equal(form(module)(x), module(x))
        assert not torch.allclose(before, module(x))


@pytest.mark.parametrize("form", [feed_forward_step, in_full])
def test_a_replacement_is_called(form):
    with torch.no_grad():
        assert torch.equal(
            form(torch.nn.Identity())(torch.ones(1, 2)), torch.ones(1, 2)
        )
