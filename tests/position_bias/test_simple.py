import pytest
import torch
from espnet2.asr_transducer.decoder.modules.mega import positional_bias
from reference.position_bias import simple_bias

from espnet_mega_bias import RelativePositionBias


@pytest.mark.parametrize("length", [1, 2, 7, 33])
def test_values_and_gradient_equal_the_reference(redraw, assert_close64, length):
    bias = redraw(RelativePositionBias(40)).double()
    table = bias.relative_position_bias.detach().clone().requires_grad_()
    cotangent = torch.randn(length, length, dtype=torch.float64)

    expected, actual = simple_bias(table, length), bias(length)

    assert torch.equal(actual, expected)

    expected.backward(cotangent)
    actual.backward(cotangent)

    assert_close64(bias.relative_position_bias.grad, table.grad)


@pytest.mark.parametrize("length", [1, 2, 7, 40])
def test_equals_espnet_bit_for_bit(length):
    theirs, ours = positional_bias.RelativePositionBias(40), RelativePositionBias(40)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)

    assert torch.equal(ours(length), theirs(length))


def test_last_row_is_the_last_row(redraw):
    bias = redraw(RelativePositionBias(40))

    assert torch.equal(bias.last_row(7), bias(7)[-1])
    assert not torch.equal(bias(7)[-1], bias(7)[0].flip(0))


def test_errors_name_the_numbers():
    with pytest.raises(ValueError, match="length 41 is above max_positions 40"):
        RelativePositionBias(40)(41)

    with pytest.raises(ValueError, match="max_positions must be at least 1, got -3"):
        RelativePositionBias(-3)
