import copy
import io
import math

import pytest
import torch
from espnet2.asr_transducer.decoder.modules.mega import positional_bias
from reference.position_bias import rotary_bias, rotate

from espnet_mega_bias import RotaryRelativePositionBias

LENGTHS = [1, 2, 7, 33]


@pytest.fixture
def build(redraw):
    def make(size=16, max_positions=64, dtype=torch.float64):
        return redraw(RotaryRelativePositionBias(size, max_positions)).to(dtype)

    return make


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [2, 16])
def test_values_and_gradients_equal_the_reference(build, assert_close64, length, size):
    bias = build(size)
    cotangent = torch.randn(length, length, dtype=torch.float64)

    alpha = bias.alpha.detach().squeeze(0).requires_grad_()
    beta = bias.beta.detach().squeeze(0).requires_grad_()
    expected = rotary_bias(alpha, beta, length)
    actual = bias(length)

    assert_close64(actual, expected)

    expected.backward(cotangent)
    actual.backward(cotangent)

    assert_close64(bias.alpha.grad.squeeze(0), alpha.grad)
    assert_close64(bias.beta.grad.squeeze(0), beta.grad)


@pytest.mark.parametrize("length", [1, 2, 7, 300, 2048])
@pytest.mark.parametrize("std", [0.02, 1.0])
def test_equals_espnet_up_to_the_rounding_of_espnets_angles(length, std):
    theirs = positional_bias.RotaryRelativePositionBias(128)
    theirs.reset_parameters(std=std)
    ours = RotaryRelativePositionBias(128)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    exact = copy.deepcopy(ours).double()(length)

    largest = exact.abs().max()
    espnet_error = (theirs(length) - exact).abs().max() / largest
    our_error = (ours(length) - exact).abs().max() / largest
    difference = (theirs(length) - ours(length)).abs().max() / largest

    # ESPnet forms its angles in float32, which at position 2047 costs it more than
    # 1e-5 of the maximum; up to 300 both are within that.
    assert our_error < 1e-6
    assert difference <= (1e-5 if length <= 300 else espnet_error + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_no_worse_than_the_plain_product(
    build, assert_no_worse, dtype
):
    bias = build(dtype=dtype)
    alpha, beta = bias.alpha.detach().squeeze(0), bias.beta.detach().squeeze(0)

    naive = rotary_bias(alpha, beta, 33)
    exact = rotary_bias(alpha.double(), beta.double(), 33)

    assert_no_worse(bias(33), naive, exact)


def test_depends_on_the_offset_only_and_on_its_sign(build):
    bias = build()(33)

    for offset in range(-32, 33):
        diagonal = bias.diagonal(offset)
        assert torch.equal(diagonal, diagonal[:1].expand_as(diagonal))

    assert not torch.allclose(bias, bias.T, atol=0.1)


def test_longer_bias_extends_the_shorter_one(build):
    bias = build()

    assert torch.equal(bias(33)[:7, :7], bias(7))


@pytest.mark.parametrize("length", LENGTHS)
def test_by_offset_last_row_and_causal_are_parts_of_the_matrix(build, length):
    bias = build()
    full = bias(length)

    assert torch.equal(bias.last_row(length), full[-1])
    assert torch.equal(bias.by_offset(length), torch.cat([full[-1], full[0, 1:]]))

    future = torch.ones_like(full, dtype=torch.bool).triu(1)
    assert torch.equal(bias.causal(length), full.masked_fill(future, -math.inf))


@pytest.mark.parametrize(
    ("first", "last"), [(-5, -2), (2, 5), (-3, 4), (0, 0), (-4, 0)]
)
def test_values_at_any_range_of_offsets(build, first, last):
    bias = build()
    full = bias(33)
    expected = [full[16, 16 + offset] for offset in range(first, last + 1)]

    torch.testing.assert_close(
        bias.values(first, last), torch.stack(expected), rtol=1e-12, atol=1e-12
    )


def test_rotary_turns_the_two_halves(build, assert_close64):
    x = torch.randn(7, 16, dtype=torch.float64)

    expected = torch.stack([rotate(x[p], p) for p in range(7)])

    assert_close64(build().rotary(x), expected)


def test_documented_parts_have_their_shapes():
    bias = RotaryRelativePositionBias(6, 9)

    assert bias.alpha.shape == bias.beta.shape == (1, 6)
    assert bias.sine.shape == bias.cosine.shape == (9, 3)
    assert (bias.size, bias.max_positions) == (6, 9)
    assert set(bias.state_dict()) == {"alpha", "beta", "_pe"}
    assert {"sine", "cosine", "_pe"} == {name for name, _ in bias.named_buffers()}

    sine, cosine = RotaryRelativePositionBias.get_sinusoid_embeddings(9, 6)
    assert torch.equal(sine, bias.sine)
    assert torch.equal(cosine, bias.cosine)
    assert sine[5, 2].item() == pytest.approx(math.sin(5 * 10000 ** (-2 / 3)), rel=1e-6)
    assert cosine[5, 0].item() == pytest.approx(math.cos(5), rel=1e-6)


@pytest.mark.parametrize("size", [7, 1, 0, -2])
def test_bad_size_is_refused_at_construction(size):
    """B6."""
    with pytest.raises(ValueError, match=f"size must be positive and even, got {size}"):
        RotaryRelativePositionBias(size)


def test_bad_max_positions_is_refused_at_construction():
    with pytest.raises(ValueError, match="max_positions must be at least 1, got 0"):
        RotaryRelativePositionBias(8, 0)


@pytest.mark.parametrize("call", ["__call__", "last_row", "by_offset", "causal"])
def test_length_out_of_range_names_both_numbers(call):
    bias = RotaryRelativePositionBias(8, 32)

    with pytest.raises(ValueError, match="length 33 is above max_positions 32"):
        getattr(bias, call)(33)

    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        getattr(bias, call)(0)


def test_no_limit_without_max_positions(build):
    bias = build(max_positions=None)
    held = {name: id(buffer) for name, buffer in bias.named_buffers()}

    long = bias(3000)

    assert torch.equal(long[:32, :32], bias(32))
    assert torch.equal(long.diagonal(-2990), long[2990, 0].expand(10))
    assert {name: id(buffer) for name, buffer in bias.named_buffers()} == held


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_round_trip_through_a_narrow_type_leaves_the_tables_exact(dtype):
    bias = RotaryRelativePositionBias(32, 2048)
    fresh = bias.sine.clone(), bias.cosine.clone()

    bias.to(dtype)
    assert bias.sine.dtype == bias.cosine.dtype == torch.float32
    bias(512)
    bias.float()

    assert torch.equal(bias.sine, fresh[0])
    assert torch.equal(bias.cosine, fresh[1])
    assert bias.double().sine.dtype == torch.float64
    assert bias.sine[2047, 1] == math.sin(2047 * 10000 ** (-1 / 16))


def test_placeholder_is_zero_and_never_read(build):
    """B3."""
    bias = build()
    before = bias(7)

    assert torch.equal(bias._pe, torch.zeros_like(bias._pe))

    state = bias.state_dict()
    state["_pe"] = torch.full((1,), math.nan)
    bias.load_state_dict(state)

    assert torch.equal(bias(7), before)


def test_meta_device_construction_then_memory():
    with torch.device("meta"):
        bias = RotaryRelativePositionBias(16, 64)

    assert bias.sine.is_meta
    bias = bias.to_empty(device="cpu")
    bias.reset_parameters()

    normal = RotaryRelativePositionBias(16, 64)
    bias.load_state_dict(normal.state_dict())

    assert torch.equal(bias(33), normal(33))
    assert torch.equal(bias._pe, torch.zeros(1))


def test_inference_mode_leaves_nothing_behind(build):
    bias, fresh = build(), build()
    fresh.load_state_dict(bias.state_dict())

    with torch.inference_mode():
        bias(9)

    bias(9).sum().backward()
    fresh(9).sum().backward()

    assert torch.equal(bias.alpha.grad, fresh.alpha.grad)


def test_autocast_keeps_the_bias_in_float32(build):
    bias = build(dtype=torch.float32)
    expected = bias(33)

    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(bias(33), expected)


def test_copies_and_pickles_give_the_same_bias(build):
    bias = build()
    stored = io.BytesIO()
    torch.save(bias, stored)
    stored.seek(0)

    assert torch.equal(copy.deepcopy(bias)(33), bias(33))
    assert torch.equal(torch.load(stored, weights_only=False)(33), bias(33))


@pytest.mark.slow
def test_compiles_without_a_break_at_changing_lengths(build):
    bias = build(dtype=torch.float32)
    compiled = torch.compile(bias, fullgraph=True)

    for length in (1, 7, 64, 12, 7):
        torch.testing.assert_close(compiled(length), bias(length), rtol=0, atol=1e-5)
