"""espnet_mega_bias.few_rows_linear: the layer's values, and when it is called."""

import pytest
import torch

from espnet_mega_bias import few_rows_linear as module
from espnet_mega_bias import matrix_products
from espnet_mega_bias.few_rows_linear import few_rows_linear

pytestmark = pytest.mark.skipif(
    not matrix_products.has_onednn(), reason="torch without MKL and oneDNN"
)

LARGE = (512, 256)  # (features, size): just large enough
SHAPES = [LARGE, (256, 2048), (520, 256), (516, 256), (8, 4)]
ROWS = [1, 2, 5, 10, 33]
# Calls until the weight is copied, and one with the copy.
CALLS = module._CALLS_BEFORE_COPY + 2


@pytest.fixture(autouse=True)
def amd(monkeypatch):
    for part in (matrix_products, module):
        monkeypatch.setattr(part, "on_amd", lambda: True)


def linear(features, size, bias=True):
    torch.manual_seed(3)
    layer = torch.nn.Linear(size, features, bias=bias)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def rows(count, size):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(count))


def exact(layer, x):
    return torch.nn.functional.linear(
        x.double(), layer.weight.double(), layer.bias.double()
    )


@pytest.fixture
def products(monkeypatch):
    """Batched products and copies so far, by name."""
    calls = []

    def count(part, name):
        function = getattr(part, name)

        def counting(*args):
            calls.append(name)
            return function(*args)

        monkeypatch.setattr(part, name, counting)

    count(torch, "baddbmm")
    count(module, "in_blocks")
    return calls


@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_every_call_is_as_exact_as_the_layer(shape, count):
    layer = linear(*shape)
    x = rows(count, shape[1])
    function, expected = few_rows_linear(layer), exact(layer, x)
    reference = (layer(x) - expected).abs().max()

    for _ in range(CALLS):
        out = function(x)

        assert (out - expected).abs().max() <= 3.0 * reference
        assert out.shape == expected.shape
        assert out.is_contiguous()


@pytest.mark.parametrize("count", [1, 2])
@torch.inference_mode()
def test_the_fewest_rows_take_a_batched_product_and_no_copy(products, count):
    function = few_rows_linear(linear(*LARGE))

    for _ in range(CALLS):
        function(rows(count, LARGE[1]))

    assert products == ["baddbmm"] * CALLS


@torch.inference_mode()
def test_rows_take_a_copy_once_they_came_often(products):
    function = few_rows_linear(linear(*LARGE))

    for _ in range(CALLS - 2):
        function(rows(3, LARGE[1]))

    assert products == []

    for count in (3, 4, 40):
        function(rows(count, LARGE[1]))

    assert products == ["in_blocks"]


@torch.no_grad()
def test_input_with_other_strides():
    layer, x = linear(*LARGE), rows(3, 2 * LARGE[1])
    function = few_rows_linear(layer)

    for _ in range(CALLS):
        for strided in (
            x[:, ::2],
            x[:1, ::2],
            rows(LARGE[1], 3).t(),
            rows(1, 256).expand(6, -1),
        ):
            torch.testing.assert_close(
                function(strided), layer(strided), rtol=0, atol=2e-4
            )


@torch.no_grad()
def test_other_processors_keep_the_layer_for_one_row(monkeypatch, products):
    for part in (matrix_products, module):
        monkeypatch.setattr(part, "on_amd", lambda: False)

    layer = linear(*LARGE)
    function = few_rows_linear(layer)

    for _ in range(CALLS):
        for count in (1, 3):
            x = rows(count, LARGE[1])
            torch.testing.assert_close(function(x), layer(x), rtol=0, atol=2e-4)

    assert products == ["in_blocks"]


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2.0 * super().forward(x)


def test_a_subclass_is_called():
    layer = Doubled(LARGE[1], LARGE[0])
    x = rows(1, LARGE[1])

    with torch.no_grad():
        assert torch.equal(few_rows_linear(layer)(x), layer(x))


@pytest.mark.parametrize("count", [1, 3])
def test_hooks_are_called(count):
    layer, x = linear(*LARGE), rows(count, LARGE[1])
    layer.register_forward_hook(lambda module, inputs, output: 2.0 * output)

    with torch.no_grad():
        function = few_rows_linear(layer)

        for _ in range(CALLS):
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
    layer = linear(*LARGE)
    x = rows(1, LARGE[1])

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = few_rows_linear(layer)(x)
        assert out.dtype is torch.bfloat16
        assert torch.equal(out, layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [1, 3])
def test_other_types_are_the_layers(products, dtype, count):
    layer = linear(*LARGE).to(dtype)
    x = rows(count, LARGE[1]).to(dtype)

    with torch.no_grad():
        assert torch.equal(few_rows_linear(layer)(x), layer(x))

    assert not products


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
            torch.testing.assert_close(program(x), model.layer(x), rtol=0, atol=2e-4)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:FutureWarning")
def test_a_traced_program_takes_any_number_of_rows():
    model = Layer()

    with torch.no_grad():
        program = torch.jit.trace(model, (rows(3, 256),), check_trace=False)
        for number in (1, 7, 50):
            x = rows(number, 256)
            torch.testing.assert_close(program(x), model.layer(x), rtol=0, atol=2e-4)
