"""espnet_mega_bias.feed_forward_step: what ESPnet's module computes."""

import pytest
import torch
from espnet2.asr_transducer.decoder.modules.mega.feed_forward import (
    NormalizedPositionwiseFeedForward,
)

from espnet_mega_bias import few_rows_linear
from espnet_mega_bias.feed_forward_step import feed_forward_step


@pytest.fixture(autouse=True)
def amd(monkeypatch):
    monkeypatch.setattr(few_rows_linear, "_mkl_on_amd", lambda: True)


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


@pytest.mark.parametrize("count", [1, 3, 10, 40])
def test_values_are_those_of_the_module(module, count):
    x = torch.randn(count, 256, dtype=torch.float64)

    with torch.no_grad():
        out = feed_forward_step(module)(x)
        torch.testing.assert_close(out, module(x), rtol=0, atol=1e-11)


def test_gradients_are_those_of_the_module(module):
    x = torch.randn(2, 256, dtype=torch.float64, requires_grad=True)
    inputs = [x, *module.parameters()]

    for ours, theirs in zip(
        torch.autograd.grad(feed_forward_step(module)(x).square().sum(), inputs),
        torch.autograd.grad(module(x).square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def all_of_it(module):
    module.train()


def dropout_alone(module):
    module.hidden_dropout.train()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("switch", [all_of_it, dropout_alone])
def test_dropout(module, switch, later):
    x = torch.randn(3, 256, dtype=torch.float64)

    with torch.no_grad():
        step = feed_forward_step(module)
        switch(module)
        step = step if later else feed_forward_step(module)

        torch.manual_seed(1)
        out = step(x)
        torch.manual_seed(1)

        assert torch.equal(out, module(x))
        assert not torch.equal(out, module(x))


@pytest.mark.parametrize("later", [False, True])
def test_hooks_are_called(module, later):
    x = torch.randn(3, 256, dtype=torch.float64)

    with torch.no_grad():
        step = feed_forward_step(module)
        module.register_forward_hook(lambda module, inputs, output: 2.0 * output)
        step = step if later else feed_forward_step(module)

        assert torch.equal(step(x), module(x))


def test_a_replacement_is_called():
    with torch.no_grad():
        assert torch.equal(
            feed_forward_step(torch.nn.Identity())(torch.ones(1, 2)), torch.ones(1, 2)
        )
