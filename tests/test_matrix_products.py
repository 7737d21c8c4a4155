"""espnet_mega_bias.matrix_products: values, and who computes them."""

import platform

import pytest
import torch

from espnet_mega_bias import matrix_products
from espnet_mega_bias.matrix_products import (
    affine,
    by_onednn,
    has_onednn,
    in_blocks,
    input_gradient,
    large,
    multiply,
    on_amd,
    weight_gradient,
)

# (N, K): just large enough, wider inputs, odd, and large enough for every copy
SHAPES = [(512, 256), (256, 2048), (521, 257), (263, 509), (2048, 256)]
ROWS = [(1,), (3,), (2, 5), (8, 130)]

onednn = pytest.mark.skipif(not has_onednn(), reason="torch without MKL and oneDNN")


@pytest.fixture
def amd(monkeypatch):
    monkeypatch.setattr(matrix_products, "on_amd", lambda: True)


@pytest.fixture
def calls(monkeypatch):
    """Products by oneDNN so far."""
    calls, product = [], multiply

    def counting(*args):
        calls.append(args)
        return product(*args)

    monkeypatch.setattr(matrix_products, "multiply", counting)
    return calls


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_product(actual, x, weight, bias=0.0):
    """x weight^T + bias, but for a few roundings in float32."""
    x, weight = x.double(), weight.double()
    error = (actual.double() - (x @ weight.t() + bias)).abs()
    terms = x.abs() @ weight.abs().t() + abs(bias)

    assert actual.shape == error.shape
    assert (error <= 4.0 * torch.finfo(torch.float32).eps * terms).all()


@onednn
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_products_are_exact_but_for_rounding(amd, calls, shape, rows):
    features, size = shape
    x, weight, bias, grad = (
        draw(*shape) for shape in ((*rows, size), shape, (features,), (*rows, features))
    )
    x2, grad2 = x.reshape(-1, size), grad.reshape(-1, features)

    assert_product(affine(x, weight, bias), x, weight, bias)
    assert_product(input_gradient(grad, weight), grad, weight.t())
    assert len(calls) == 2

    gradient = weight_gradient(grad, x, weight)

    assert_product(gradient, grad2.t(), x2.t())
    assert gradient.is_contiguous()
    assert len(calls) - 2 == (features <= size or len(x2) * features > 2**21)


@onednn
@torch.no_grad()
def test_weight_gradient_takes_gaps_between_rows(amd, calls):
    for features, size in ((256, 2048), (2048, 256)):
        x, grad = draw(1030, 2 * size)[:, size:], draw(1030, 2 * features)[:, 1::2]
        actual = weight_gradient(grad, x, torch.empty(features, size))

        assert_product(actual, grad.t(), x.t())
        # In the place of the weight, gaps would cost a hundredfold.
        assert calls.pop()[1].t().is_contiguous()


@onednn
@pytest.mark.parametrize("count", [2, 5, 33])
@torch.no_grad()
def test_a_copy_in_blocks_is_the_weight(count):
    for features, size in SHAPES:
        x, weight, bias = draw(count, size), draw(features, size), draw(features)
        assert_product(multiply(x, in_blocks(weight), bias), x, weight, bias)


class Kind(torch.Tensor):
    pass


@onednn
@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # by the switch below
def test_who_multiplies(amd, monkeypatch):
    x, weight = draw(3, 256), draw(512, 256)

    assert by_onednn(x, weight)
    assert by_onednn(x, torch.nn.Parameter(weight))
    assert not by_onednn(x, draw(511, 256))
    assert not by_onednn(x.double(), weight)
    assert not by_onednn(x, weight.double())
    assert not by_onednn(x.bfloat16(), weight.bfloat16())
    assert not by_onednn(x[:0], weight)
    assert not by_onednn(x, draw(256, 512).t())
    assert not by_onednn(x.as_subclass(Kind), weight)
    assert not by_onednn(x, weight.as_subclass(Kind))
    assert not by_onednn(x.to("meta"), weight.to("meta"))

    with torch.backends.mkldnn.flags(enabled=False):
        assert not large(weight)

    monkeypatch.setattr(matrix_products, "on_amd", lambda: False)
    assert large(weight)
    assert not by_onednn(x, weight)


@onednn
def test_torch_func_is_left_to_torch(amd):
    weight, seen = draw(512, 256), []

    def note(x):
        seen.append(by_onednn(x, weight))
        return x.sum()

    torch.func.vmap(note)(draw(2, 3, 256))
    torch.func.grad(note)(draw(3, 256))

    assert seen == [False, False]


@onednn
def test_autograd_sees_every_product(amd, calls):
    x, weight = draw(3, 256).requires_grad_(), draw(512, 256).requires_grad_()
    grad = draw(3, 512).requires_grad_()

    for out in (
        affine(x, weight, None),
        input_gradient(grad, weight),
        weight_gradient(grad, x, weight),
    ):
        assert out.requires_grad

    assert not calls


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
def test_the_processor_is_told(monkeypatch, tmp_path, content, name, found):
    monkeypatch.setattr(platform, "processor", lambda: name)
    info = tmp_path / "cpuinfo"

    if content is not None:
        info.write_text(content)

    assert on_amd(info) == found


@pytest.mark.parametrize("missing", ["MKL", "an operator"])
def test_a_build_without_them(monkeypatch, missing):
    if missing == "MKL":
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    else:
        monkeypatch.setattr(torch.ops, "mkldnn", object())

    has_onednn.cache_clear()

    try:
        assert not has_onednn()
        assert not large(draw(512, 256))
    finally:
        has_onednn.cache_clear()
