"""espnet_mega_bias.few_rows_linear: the layer's values, and when it is called."""

import platform

import pytest
import torch

from espnet_mega_bias import few_rows_linear as module
from espnet_mega_bias.few_rows_linear import few_rows_linear

LARGE = (512, 256)  # (features, size): just large enough
ROWS = [1, 2, 4, 5, 10, 32, 33]


@pytest.fixture(autouse=True)
def amd(monkeypatch):
    monkeypatch.setattr(module, "_mkl_on_amd", lambda: True)


def linear(features, size, dtype=torch.float64, bias=True):
    torch.manual_seed(3)
    layer = torch.nn.Linear(size, features, bias=bias, dtype=dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def rows(count, size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, size, generator=generator, dtype=dtype)


@pytest.fixture
def products(monkeypatch):
    """Batched products so far."""
    calls, product = [], torch.baddbmm

    def counting(*args):
        calls.append(args)
        return product(*args)

    monkeypatch.setattr(torch, "baddbmm", counting)
    return calls


@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize(
    "shape", [LARGE, (256, 2048), (520, 256), (516, 256), (8, 4)], ids=str
)
def test_values_are_those_of_the_layer(shape, count):
    layer = linear(*shape)
    x = rows(count, shape[1])

    with torch.no_grad():
        out = few_rows_linear(layer)(x)

    torch.testing.assert_close(out, layer(x), rtol=0, atol=1e-11)
    assert out.is_contiguous()


@pytest.mark.parametrize("count", ROWS)
def test_float32_is_as_exact_as_the_layer(count):
    layer = linear(*LARGE, dtype=torch.float32)
    x = rows(count, LARGE[1], torch.float32)
    exact = torch.nn.functional.linear(
        x.double(), layer.weight.double(), layer.bias.double()
    )

    with torch.no_grad():
        error = (few_rows_linear(layer)(x) - exact).abs().max()
        reference = (layer(x) - exact).abs().max()

    assert error < 3.0 * reference


@pytest.mark.parametrize("count", ROWS)
def test_few_rows_and_a_large_weight_take_the_batched_product(products, count):
    with torch.inference_mode():
        few_rows_linear(linear(*LARGE))(rows(count, LARGE[1]))

    assert len(products) == (count <= 32)


def test_input_with_other_strides():
    layer, x = linear(*LARGE), rows(3, 2 * LARGE[1])

    with torch.no_grad():
        for strided in (x[:, ::2], rows(LARGE[1], 3).t(), rows(1, 256).expand(6, -1)):
            torch.testing.assert_close(
                few_rows_linear(layer)(strided), layer(strided), rtol=0, atol=1e-11
            )


def test_changes_in_place_are_seen():
    layer, x = linear(*LARGE), rows(1, LARGE[1])

    with torch.no_grad():
        function = few_rows_linear(layer)
        before = function(x)
        layer.weight.mul_(2.0)
        layer.bias.mul_(2.0)
        torch.testing.assert_close(function(x), 2.0 * before, rtol=0, atol=1e-11)


def test_other_processors_keep_the_layer(monkeypatch):
    monkeypatch.setattr(module, "_mkl_on_amd", lambda: False)
    layer = linear(*LARGE)

    with torch.no_grad():
        assert few_rows_linear(layer) is layer


@pytest.mark.parametrize("mkl", [True, False])
@pytest.mark.parametrize(
    ("content", "name", "found"),
    [
        ("vendor_id\t: AuthenticAMD\n", "", True),
        ("vendor_id\t: GenuineIntel\n", "", False),
        ("CPU implementer\t: 0x41\n", "aarch64", False),
        (None, "AMD64 Family 25 Model 33 Stepping 2, AuthenticAMD", True),
        (None, "Intel64 Family 6 Model 158 Stepping 10, GenuineIntel", False),
        (None, "arm", False),
        (None, "", False),
    ],
)
def test_mkl_on_amd_is_told(monkeypatch, tmp_path, mkl, content, name, found):
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(platform, "processor", lambda: name)
    info = tmp_path / "cpuinfo"

    if content is not None:
        info.write_text(content)

    assert module._mkl_on_amd(info) == (found and mkl)


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2.0 * super().forward(x)


def test_a_subclass_is_called():
    layer = Doubled(LARGE[1], LARGE[0])
    x = rows(1, LARGE[1], torch.float32)

    with torch.no_grad():
        assert torch.equal(few_rows_linear(layer)(x), layer(x))


@pytest.mark.parametrize("later", [False, True])
def test_hooks_are_called(later):
    layer, x = linear(*LARGE), rows(1, LARGE[1])

    with torch.no_grad():
        function = few_rows_linear(layer)
        layer.register_forward_hook(lambda module, inputs, output: 2.0 * output)
        function = function if later else few_rows_linear(layer)

        assert torch.equal(function(x), layer(x))


def without_bias():
    return linear(*LARGE, bias=False)


def transposed_weight():
    layer = linear(*LARGE)
    layer.weight.data = layer.weight.data.t().contiguous().t()
    return layer


def indivisible():
    return linear(516, 256)


def small():
    return linear(8, 256)


@pytest.mark.parametrize(
    "make",
    [without_bias, transposed_weight, indivisible, small],
    ids=lambda f: f.__name__,
)
def test_other_layers_are_called(products, make):
    layer, x = make(), rows(1, 256)

    with torch.no_grad():
        assert torch.equal(few_rows_linear(layer)(x), layer(x))

    assert not products


def test_gradients_are_those_of_the_layer(products):
    layer, x = linear(*LARGE), rows(2, LARGE[1]).requires_grad_()

    out = few_rows_linear(layer)(x)
    grads = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])

    assert all(map(torch.equal, grads, expected))
    assert not products


def test_autocast_rules():
    layer = linear(*LARGE, dtype=torch.float32)
    x = rows(1, LARGE[1], torch.float32)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = few_rows_linear(layer)(x)
        assert out.dtype is torch.bfloat16
        assert torch.equal(out, layer(x))


def test_bfloat16():
    layer = linear(*LARGE, dtype=torch.bfloat16)
    x = rows(2, LARGE[1], torch.bfloat16)

    with torch.no_grad():
        torch.testing.assert_close(few_rows_linear(layer)(x), layer(x))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear(*LARGE)

    def forward(self, x):
        return few_rows_linear(self.layer)(x)


def test_an_exported_program_takes_any_number_of_rows():
    model = Layer()
    count = torch.export.Dim("count", min=1, max=100)

    with torch.no_grad():
        program = torch.export.export(
            model, (rows(3, 256),), dynamic_shapes=({0: count},)
        ).module()
        for number in (1, 7, 50):
            x = rows(number, 256)
            torch.testing.assert_close(program(x), model.layer(x), rtol=0, atol=1e-11)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:FutureWarning")
def test_a_traced_program_takes_any_number_of_rows():
    model = Layer()

    with torch.no_grad():
        program = torch.jit.trace(model, (rows(3, 256),))
        for number in (1, 7, 50):
            x = rows(number, 256)
            torch.testing.assert_close(program(x), model.layer(x), rtol=0, atol=1e-11)
