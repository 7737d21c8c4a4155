"""espnet_mega_bias.gated_linear, by value, gradient and memory."""

import pytest
import torch

from espnet_mega_bias.gated_linear import gated_linear

SHAPES = [(7,), (2, 7), (3, 5, 7)]


def tensors(shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
        for _ in range(2)
    ]


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def layer(request):
    torch.manual_seed(3)
    layer = torch.nn.Linear(7, 4, bias=request.param, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


@pytest.fixture(params=[None, torch.nn.SiLU(), torch.nn.Tanh()], ids=str)
def activation(request):
    return request.param


def plain_form(layer, x, gate, activation):
    return layer(x * (gate if activation is None else activation(gate)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_gradients_are_those_of_the_plain_form(layer, activation, shape):
    x, gate = tensors(shape)
    inputs = [x, gate, *layer.parameters()]

    out = gated_linear(layer, x, gate, activation)
    plain = plain_form(layer, x, gate, activation)
    grad = torch.randn_like(plain)

    torch.testing.assert_close(out, plain, rtol=0, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, grad),
        torch.autograd.grad(plain, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


class Gated(torch.nn.Module):
    def __init__(self, layer, activation):
        super().__init__()
        self.layer = layer
        self.activation = activation

    def forward(self, x, gate):
        return gated_linear(self.layer, x, gate, self.activation)


def test_numerical_first_and_second_gradients(layer, activation):
    names = [f"layer.{name}" for name, _ in layer.named_parameters()]
    inputs = (*tensors((3, 7)), *layer.parameters())

    def function(x, gate, *parameters):
        parameters = dict(zip(names, parameters, strict=True))
        model = Gated(layer, activation)
        return torch.func.functional_call(model, parameters, (x, gate))

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_gradients_of_each_sample_under_vmap(layer, activation):
    model = Gated(layer, activation)
    parameters = dict(model.named_parameters())
    x, gate = (tensor.detach() for tensor in tensors((3, 5, 7)))

    def loss(parameters, x, gate):
        return torch.func.functional_call(model, parameters, (x, gate)).square().sum()

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(
        parameters, x, gate
    )

    for sample in range(3):
        alone = torch.autograd.grad(
            plain_form(layer, x[sample], gate[sample], activation).square().sum(),
            layer.parameters(),
        )
        for name, expected in zip(parameters, alone, strict=True):
            torch.testing.assert_close(
                together[name][sample], expected, rtol=0, atol=1e-11
            )


@pytest.mark.parametrize("activation", [None, torch.nn.SiLU()], ids=str)
def test_neither_product_nor_swish_is_kept(layer, activation):
    x, gate = tensors((3, 5, 7))
    kept = []

    def note(tensor):
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        gated_linear(layer, x, gate, activation)

    expected = {tensor.data_ptr() for tensor in (x, gate, layer.weight)}
    assert len(kept) == 3
    assert set(kept) == expected


def test_autocast_computes_in_its_type_and_gives_gradients_in_the_weights_type(
    activation,
):
    torch.manual_seed(1)
    layer = torch.nn.Linear(64, 16)
    x, gate = tensors((32, 64), torch.float32)

    def gradients(function):
        with torch.autocast("cpu", torch.bfloat16):
            out = function()
        assert out.dtype == torch.bfloat16
        return torch.autograd.grad(
            out.float().square().sum(), [x, gate, *layer.parameters()]
        )

    ours = gradients(lambda: gated_linear(layer, x, gate, activation))
    plain = gradients(lambda: plain_form(layer, x, gate, activation))
    with torch.no_grad():
        exact = [tensor.double() for tensor in (x, gate, layer.weight, layer.bias)]
    for tensor in exact:
        tensor.requires_grad_()
    gated = exact[0] * (exact[1] if activation is None else activation(exact[1]))
    out = torch.nn.functional.linear(gated, *exact[2:])
    exact = torch.autograd.grad(out.square().sum(), exact)

    for mine, theirs, reference in zip(ours, plain, exact, strict=True):
        assert mine.dtype == torch.float32
        error = (mine - reference).norm()
        assert error <= 1.5 * (theirs - reference).norm() + 1e-6 * reference.norm()


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_layer_with_a_call_of_its_own_is_called():
    doubled = Doubled(7, 4, dtype=torch.float64)
    x, gate = tensors((2, 7))

    assert torch.equal(gated_linear(doubled, x, gate), doubled(x * gate))


@pytest.mark.parametrize(
    "hook", ["forward_pre_hook", "forward_hook", "full_backward_hook"]
)
def test_a_hook_is_called(layer, hook):
    called = []
    getattr(layer, f"register_{hook}")(lambda *_: called.append(True))
    x, gate = tensors((2, 7))

    gated_linear(layer, x, gate).sum().backward()

    assert called == [True]
