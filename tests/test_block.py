import pytest
import torch
from espnet2.asr_transducer.decoder.blocks import mega as espnet_mega
from reference.block import mega_block

from espnet_mega_bias import MEGA

LENGTHS = [1, 2, 7, 33]


@pytest.fixture
def build(redraw):
    def make(bias_type="rotary", chunk=-1, truncation=None):
        block = MEGA(
            6,
            num_heads=2,
            qk_size=4,
            v_size=5,
            activation=torch.nn.SiLU(),
            rel_pos_bias_type=bias_type,
            max_positions=64,
            truncation_length=truncation,
            chunk_size=chunk,
        )

        return redraw(block).double()

    return make


def reference(block, x, padding, chunk, truncation):
    reach = min(chunk, x.size(1)) if chunk > 0 else x.size(1)
    weights = dict(block.named_parameters())

    return torch.stack(
        [
            mega_block(
                row,
                weights,
                block.rel_pos_bias(reach),
                torch.nn.functional.silu,
                block.normalization,
                hidden.tolist(),
                chunk if chunk > 0 else None,
                truncation,
            )
            for row, hidden in zip(x, padding, strict=True)
        ]
    )


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("chunk", [-1, 1, 4])
@pytest.mark.parametrize("truncation", [None, 3])
@pytest.mark.parametrize("bias_type", ["rotary", "simple"])
def test_values_and_gradients_equal_the_reference(
    build, assert_close64, assert_gradients64, length, chunk, truncation, bias_type
):
    block = build(bias_type, chunk, truncation)
    x = torch.randn(2, length, 6, dtype=torch.float64, requires_grad=True)
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[1, 3:6] = True

    expected = reference(block, x, padding, chunk, truncation)
    actual = block(x, padding)

    assert_close64(actual, expected)

    assert_gradients64(actual, expected, [x, *block.parameters()])


def test_without_padding_nothing_is_hidden(build, assert_close64):
    block = build()
    x = torch.randn(2, 7, 6, dtype=torch.float64)

    assert_close64(block(x), block(x, torch.zeros(2, 7, dtype=torch.bool)))
    assert not torch.allclose(block(x), block(x, torch.arange(7).expand(2, 7) == 3))


@pytest.mark.parametrize("mask", [torch.zeros(1, 3), torch.ones(1, 3).long()])
def test_a_mask_of_numbers_is_refused(build, mask):
    """A3."""
    with pytest.raises(TypeError, match=f"bool tensor, got {mask.dtype}"):
        build()(torch.zeros(1, 3, 6).double(), mask)


def test_all_padding_stays_finite(build):
    for chunk in (-1, 4):
        x = torch.randn(1, 9, 6, dtype=torch.float64, requires_grad=True)
        out = build(chunk=chunk)(x, torch.ones(1, 9, dtype=torch.bool))
        out.sum().backward()

        assert out.isfinite().all()
        assert x.grad.isfinite().all()


def test_defaults_build_a_working_block():
    assert MEGA()(torch.randn(1, 3, 512)).shape == (1, 3, 512)


def test_parameters_are_those_of_espnet():
    for bias_type in ("rotary", "simple"):
        theirs = espnet_mega.MEGA(
            6, 2, 4, 5, normalization=torch.nn.LayerNorm(6), rel_pos_bias_type=bias_type
        )
        ours = MEGA(6, 2, 4, 5, rel_pos_bias_type=bias_type)

        ours.load_state_dict(theirs.state_dict(), strict=True)
        theirs.load_state_dict(ours.state_dict(), strict=True)


def test_errors_name_the_value():
    with pytest.raises(ValueError, match="simple, rotary, got 'alibi'"):
        MEGA(8, rel_pos_bias_type="alibi")

    with pytest.raises(ValueError, match="max_positions must be a number"):
        MEGA(8, rel_pos_bias_type="simple", max_positions=None)
