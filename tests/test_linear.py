"""espnet_mega_bias.linear: the layer's values and gradients, and when it is called."""

import pytest
import torch

from espnet_mega_bias import matrix_products
from espnet_mega_bias.linear import linear

pytestmark = pytest.mark.skipif(
    not matrix_products.has_onednn(), reason="torch without MKL and oneDNN"
)

SIZE, FEATURES = 256, 512


@pytest.fixture(autouse=True)
def amd(monkeypatch):
    monkeypatch.setattr(matrix_products, "on_amd", lambda: True)


@pytest.fixture
def calls(monkeypatch):
    """Products by oneDNN so far."""
    calls, product = [], matrix_products.multiply

    def counting(*args):
        calls.append(args)
        return product(*args)

    monkeypatch.setattr(matrix_products, "multiply", counting)
    return calls


@pytest.fixture(params=[(SIZE, FEATURES), (2048, 256)], ids=str)
def layer(request):
    return redrawn(torch.nn.Linear(*request.param))


def redrawn(layer):
    torch.manual_seed(3)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def assert_close(actual, expected, share=1e-5):
    """Gradients are the same but for a share of the largest element."""
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < share * theirs.abs().max()


@pytest.mark.parametrize("shape", [(1,), (7,), (2, 9)], ids=str)
def test_value_and_gradients_are_those_of_the_layer(calls, layer, shape):
    x = draw(*shape, layer.in_features).requires_grad_()
    inputs = [x, *layer.parameters()]

    out = linear(layer, x)
    plain = layer(x)
    grad = torch.randn_like(plain)
    actual = torch.autograd.grad(out, inputs, grad)

    assert len(calls) == (3 if layer.out_features < layer.in_features else 2)
    torch.testing.assert_close(out, plain, rtol=0, atol=2e-4)
    assert_close(actual, torch.autograd.grad(plain, inputs, grad))


def test_the_gradient_may_be_one_number_expanded(calls, layer):
    x = draw(1030, layer.in_features).requires_grad_()
    inputs = [x, *layer.parameters()]

    actual = torch.autograd.grad(linear(layer, x).sum(), inputs)

    assert_close(actual, torch.autograd.grad(layer(x).sum(), inputs))
    assert len(calls) == (3 if layer.out_features < layer.in_features else 2)


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_gradients_that_nobody_wants_are_not_computed(calls, layer, frozen):
    inputs = {"x": draw(3, layer.in_features).requires_grad_()}
    inputs |= dict(layer.named_parameters())
    inputs.pop(frozen).requires_grad_(False)
    x = inputs.get("x", draw(3, layer.in_features))

    actual = torch.autograd.grad(linear(layer, x).square().sum(), inputs.values())
    plain = torch.autograd.grad(layer(x).square().sum(), inputs.values())

    assert_close(actual, plain)
    expected = 1 + (frozen != "x")
    expected += frozen != "weight" and layer.out_features < layer.in_features
    assert len(calls) == expected


def test_second_gradients(layer):
    x = draw(3, layer.in_features).requires_grad_()

    def penalty(out):
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, layer.weight])

    assert_close(penalty(linear(layer, x)), penalty(layer(x)), share=1e-4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(calls, layer, mode):
    with mode():
        x = draw(3, layer.in_features)
        out = linear(layer, x)
        torch.testing.assert_close(out, layer(x), rtol=0, atol=2e-4)

    assert len(calls) == 1
    assert not out.requires_grad


def test_gradients_are_laid_out_like_the_weights():
    layer = redrawn(torch.nn.Linear(256, 2048))

    linear(layer, draw(1030, 256)).square().sum().backward()

    assert layer.weight.grad.is_contiguous()


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2.0 * super().forward(x)


def subclass():
    return Doubled(SIZE, FEATURES)


def hooked():
    layer = torch.nn.Linear(SIZE, FEATURES)
    layer.register_forward_hook(lambda module, inputs, output: 2.0 * output)
    return layer


def without_bias():
    return torch.nn.Linear(SIZE, FEATURES, bias=False)


def small():
    return torch.nn.Linear(SIZE, 8)


@pytest.mark.parametrize(
    "make", [subclass, hooked, without_bias, small], ids=lambda f: f.__name__
)
def test_other_layers_are_called(calls, make):
    layer, x = make(), draw(3, SIZE)

    assert torch.equal(linear(layer, x), layer(x))
    assert not calls


def test_autocast_is_torchs(calls):
    layer, x = torch.nn.Linear(SIZE, FEATURES), draw(3, SIZE)

    with torch.autocast("cpu", torch.bfloat16):
        assert linear(layer, x).dtype is torch.bfloat16

    assert not calls


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(SIZE, FEATURES)

    def forward(self, x):
        return linear(self.layer, x)


def test_an_exported_program_has_torchs_product(calls):
    model = Layer()
    program = torch.export.export(model, (draw(3, SIZE),))

    assert "mkldnn" not in str(program.graph)
    torch.testing.assert_close(program.module()(draw(3, SIZE)), model(draw(3, SIZE)))


def test_gradients_of_each_sample_by_torch_func(calls):
    model = Layer()
    parameters, x = dict(model.named_parameters()), draw(2, 3, SIZE)

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)

    assert not calls
    for sample in range(2):
        alone = torch.autograd.grad(
            model.layer(x[sample]).square().sum(), model.layer.parameters()
        )
        for name, expected in zip(parameters, alone, strict=True):
            torch.testing.assert_close(together[name][sample], expected)
