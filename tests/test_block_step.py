"""espnet_mega_bias.block_step: what the block computes, a position at a time."""

import pytest
import torch

from espnet_mega_bias import MEGA
from espnet_mega_bias.block_step import block_step


@pytest.fixture
def build(redraw):
    def make(chunk=-1, **rates):
        return redraw(
            MEGA(
                6,
                num_heads=2,
                qk_size=4,
                v_size=5,
                activation=torch.nn.SiLU(),
                rel_pos_bias_type="rotary",
                max_positions=64,
                chunk_size=chunk,
                **rates,
            )
        ).double()

    return make


def views(rows, count):
    """New rows, keys and values of a block with 4 and 5 features."""
    return rows.narrow(0, -count, count), rows[:, :4].t(), rows[:, 4:]


def step_through(block, x, padding=None):
    """Feed sequences whose rows lie between one another. (B, U, D)"""
    ema = block.multihead_damped_ema.step_coefficients()
    step = block_step(block, ema)
    state = x.new_zeros(len(x), 2, 6)
    rows, owners, outs = x.new_empty(0, 4 + 5), [], []

    for t in range(x.size(1)):
        hidden = None if padding is None else padding[:, t]
        rows = torch.cat([rows, x.new_empty(len(x), 4 + 5)])
        owners += [(b, t, hidden is not None and hidden[b]) for b in range(len(x))]
        bias = x.new_full((len(x), len(owners)), float("-inf"))

        for row, (sequence, position, is_padding) in enumerate(owners):
            near = block.chunk_size < 0 or (
                position // block.chunk_size == t // block.chunk_size
            )
            if near and not is_padding:
                offset = position - t
                bias[sequence, row] = block.rel_pos_bias.values(offset, offset)[0]

        kept, carried = ema.carry(state)
        outs.append(step(x[:, t], carried, *views(rows, len(x)), bias, hidden))
        inputs = x[:, t] if hidden is None else x[:, t] * ~hidden.unsqueeze(-1)
        state = ema.advance(kept, inputs)

    return torch.stack(outs, dim=1)


@pytest.mark.parametrize("chunk", [-1, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_steps_equal_the_sequence_form_in_value_and_gradient(
    build, assert_close64, assert_gradients64, chunk, padded
):
    block = build(chunk=chunk)
    x = torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True)
    padding = None

    if padded:
        padding = torch.zeros(2, 9, dtype=torch.bool)
        padding[1, 3:6] = padding[0, 8] = True

    steps, full = step_through(block, x, padding), block(x, padding)

    if padded:
        steps, full = steps[~padding], full[~padding]

    assert_close64(steps, full)

    assert_gradients64(steps, full, [x, *block.parameters()])


@pytest.mark.parametrize("kind", ["dropout", "att_dropout", "ema_dropout"])
def test_dropout_that_comes_later_is_heard(build, assert_close64, kind):
    """With a rate of 1, what is left is that of a block without the part."""
    block = build(**{f"{kind}_rate": 1.0}).eval()
    ema = block.multihead_damped_ema.step_coefficients()
    step = block_step(block, ema)
    x, carried = torch.randn(2, 3, 6, dtype=torch.float64)
    rows, bias = views(x.new_empty(3, 9), 3), x.new_zeros(3, 3)

    block.train()
    out = step(x, carried, *rows, bias)

    average = ema.output(x, carried)
    if kind == "ema_dropout":
        average = torch.zeros_like(average)
    update, _, gate, hidden = block.proj_mx(average).split([6, 4, 5, 6], dim=1)
    attended = torch.zeros_like(gate)
    if kind == "ema_dropout":
        # All keys are alike.
        attended = torch.nn.functional.silu(block.proj_v(x)).mean(0, keepdim=True)
    silu = torch.nn.functional.silu
    hidden = silu(hidden + block.proj_h(attended * silu(gate)))
    if kind == "dropout":
        hidden = torch.zeros_like(hidden)
    expected = block.normalization(torch.lerp(x, hidden, torch.sigmoid(update)))

    assert_close64(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_the_sequence_form(
    build, assert_no_worse, dtype
):
    block = build().to(dtype)
    x = torch.randn(20, 9, 6).to(dtype)

    steps, full = step_through(block, x), block(x)

    assert steps.dtype == dtype
    assert_no_worse(steps, full, block.double()(x.double()))
