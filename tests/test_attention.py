import pytest
import torch
from reference import attention as reference
from reference.position_bias import simple_bias

from espnet_mega_bias import attention
from espnet_mega_bias.attention import causal_attention


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch):
    monkeypatch.setattr(attention, "_BLOCK_LENGTH", 4)


def draw(length, batch=2):
    shapes = [(batch, length, 3), (batch, length, 3), (batch, length, 5), (length,)]
    padding = torch.rand(batch, length) < 0.4
    # One sequence begins with a key that cannot be seen, and sees nothing there.
    padding[0, 0], padding[1, 0] = True, False

    return [
        *(torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes),
        padding,
    ]


def expected(query, key, value, bias, padding):
    matrix = simple_bias(torch.cat([bias, bias.new_zeros(len(bias) - 1)]), len(bias))
    hidden = [None] * len(query) if padding is None else padding.tolist()

    return torch.stack(
        [
            reference.causal_attention(q, k, v, matrix, h)
            for q, k, v, h in zip(query, key, value, hidden, strict=True)
        ]
    )


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 21])
@pytest.mark.parametrize("padded", [True, False])
def test_value_and_gradient_equal_the_reference(
    length, padded, assert_close64, assert_gradients64
):
    *inputs, padding = draw(length)
    padding = padding if padded else None

    actual, wanted = causal_attention(*inputs, padding), expected(*inputs, padding)

    # One position that sees no key is zero as a whole.
    if length > 1 or not padded:
        assert_close64(actual, wanted)

    assert_gradients64(actual, wanted, inputs)


@pytest.mark.parametrize("activation", [torch.nn.SiLU(), torch.nn.Tanh()], ids=str)
@pytest.mark.parametrize("padded", [True, False])
def test_values_go_through_their_activation(
    activation, padded, assert_close64, assert_gradients64
):
    *inputs, padding = draw(9)
    query, key, value, bias = inputs
    padding = padding if padded else None

    actual = causal_attention(*inputs, padding, activation=activation)
    wanted = expected(query, key, activation(value), bias, padding)

    assert_close64(actual, wanted)
    assert_gradients64(actual, wanted, inputs)


def test_swish_of_the_values_is_not_kept():
    *inputs, _ = draw(9)
    kept = []

    def note(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        causal_attention(*inputs, activation=torch.nn.SiLU())

    value = inputs[2]
    assert [x.data_ptr() for x in kept if x.shape == value.shape] == [value.data_ptr()]


@pytest.mark.parametrize("length", [4, 11])
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_gradient_goes_through_the_same_dropout(length, rate):
    *inputs, padding = draw(length)

    def seeded(*inputs):
        torch.manual_seed(1)

        return causal_attention(*inputs, padding, rate)

    assert torch.autograd.gradcheck(seeded, inputs)
    assert torch.equal(seeded(*inputs), torch.zeros_like(inputs[2])) == (rate == 1.0)


def test_dropout_keeps_the_mean():
    query = key = torch.zeros(1, 6, 3)
    value, bias = torch.ones(20_000, 6, 5), torch.zeros(6)

    out = causal_attention(
        query.expand(20_000, 6, 3), key.expand(20_000, 6, 3), value, bias, None, 0.25
    )

    # Five times the deviation of the mean, sqrt(0.25 / 0.75 / 20 000), or less.
    torch.testing.assert_close(out.mean(0), torch.ones(6, 5), rtol=0.0, atol=0.02)
    assert out.std() > 0.1


def test_hidden_key_has_no_weight_however_large():
    """A3."""
    query, key, value = torch.ones(1, 6, 3), torch.zeros(1, 6, 3), torch.ones(1, 6, 5)
    padding = torch.zeros(1, 6, dtype=torch.bool)
    padding[:, 2] = True
    key[:, 2] = value[:, 2] = 1e6

    out = causal_attention(query, key, value, torch.randn(6), padding)

    torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_worse_than_the_naive_form(dtype, assert_no_worse):
    *inputs, padding = draw(21)
    inputs = [x.detach().to(dtype) for x in inputs]

    assert_no_worse(
        causal_attention(*inputs, padding),
        expected(*inputs, padding),
        expected(*(x.double() for x in inputs), padding),
    )


def test_autocast_computes_in_its_type(assert_no_worse):
    *inputs, padding = draw(9)
    inputs = [x.detach().float().requires_grad_() for x in inputs]

    with torch.autocast("cpu", torch.bfloat16):
        out = causal_attention(*inputs, padding)

    gradients = torch.autograd.grad(out.sum(), inputs)

    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    assert_no_worse(
        out,
        expected(*(x.bfloat16() for x in inputs), padding),
        expected(*(x.double() for x in inputs), padding),
    )


def test_keeps_half_of_the_weights_for_the_gradient(monkeypatch):
    monkeypatch.setattr(attention, "_BLOCK_LENGTH", 128)
    query = key = torch.randn(1, 1024, 8, requires_grad=True)
    sizes = []

    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.append(x.numel()) or x, lambda x: x
    ):
        causal_attention(query, key, query, torch.zeros(1024))

    assert 0.5 < sum(sizes) / 1024**2 < 0.6
