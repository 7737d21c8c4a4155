import pytest
import torch
from espnet2.asr_transducer.decoder.modules.mega import multi_head_damped_ema
from reference.ema import damped_ema

from espnet_mega_bias import MultiHeadDampedEMA

# Shorter than, as long as, and longer than one block of the sequence form.
LENGTHS = [1, 2, 7, 33]
TRUNCATIONS = [None, 1, 3, 100]


@pytest.fixture
def build(redraw):
    def make(size=3, num_heads=2, truncation=None, dtype=torch.float64):
        ema = MultiHeadDampedEMA(
            size, num_heads, torch.nn.SiLU(), truncation_length=truncation
        )
        return redraw(ema).to(dtype)

    return make


def reference(ema, x, truncation, padding=None):
    """SiLU of the looped EMA plus the residual, for a batch."""
    inputs = x if padding is None else x * ~padding.unsqueeze(-1)
    average = [
        damped_ema(
            row,
            ema.damping_factor.squeeze(-1),
            ema.decay_factor.squeeze(-1),
            ema.ema_expansion_matrix.squeeze(-1),
            ema.kernel_projection_matrix,
            truncation,
        )
        for row in inputs
    ]

    return torch.nn.functional.silu(torch.stack(average) + x * ema.residual_weight)


@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("length", LENGTHS)
def test_values_and_gradients_equal_the_reference(
    build, assert_close64, assert_gradients64, length, truncation
):
    ema = build(truncation=truncation)
    x = torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True)

    expected, actual = reference(ema, x, truncation), ema(x)

    assert_close64(actual, expected)

    assert_gradients64(actual, expected, [x, *ema.parameters()])


@pytest.mark.parametrize("truncation", [None, 70, 100, 200])
@pytest.mark.parametrize("length", [63, 64, 65, 130, 193])
def test_several_blocks_equal_the_reference(
    build, assert_close64, assert_gradients64, length, truncation
):
    ema = build(size=2, num_heads=1, truncation=truncation)
    x = torch.randn(1, length, 2, dtype=torch.float64, requires_grad=True)

    kernel = ema.kernel(length)

    if truncation is not None:
        kernel = kernel[:, :truncation]

    average = [
        sum(
            (
                kernel[:, lag] * x[0, t - lag]
                for lag in range(min(t + 1, kernel.size(1)))
            ),
            torch.zeros(2, dtype=torch.float64),
        )
        for t in range(length)
    ]
    expected = torch.nn.functional.silu(
        torch.stack(average).unsqueeze(0) + x * ema.residual_weight
    )
    actual = ema(x)

    assert_close64(actual, expected)

    assert_gradients64(actual, expected, [x, *ema.parameters()])


@pytest.mark.parametrize("truncation", [*TRUNCATIONS, 70])
@pytest.mark.parametrize("length", [1, 7, 33, 130])
def test_steps_equal_the_sequence_form(build, assert_close64, length, truncation):
    ema = build(truncation=truncation)
    x = torch.randn(2, length, 3, dtype=torch.float64)
    padding = torch.rand(2, length) < 0.3
    padding[:, 0] = False

    state = ema.init_state().expand(2, *ema.init_state().shape)
    steps = []

    for t in range(length):
        out, state = ema.step(x[:, t], state, padding[:, t])
        steps.append(out)

    assert_close64(torch.stack(steps, dim=1), ema(x, padding))


def test_padding_stays_out_of_the_average(build, assert_close64):
    ema = build()
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 3] = padding[1, 5:] = True

    assert_close64(ema(x, padding), reference(ema, x, None, padding))


def test_step_returns_a_new_state(build):
    for truncation in (None, 3):
        ema = build(truncation=truncation)
        state = ema.init_state().unsqueeze(0)
        kept = state.clone()

        _, after = ema.step(torch.ones(1, 3, dtype=torch.float64), state)
        held = after.clone()
        ema.step(torch.ones(1, 3, dtype=torch.float64), after)

        assert torch.equal(state, kept)
        assert torch.equal(after, held)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("truncation", [None, 3, 70])
def test_later_inputs_change_nothing_earlier(build, dtype, truncation):
    ema = build(truncation=truncation, dtype=dtype)
    x = torch.randn(2, 150, 3).to(dtype)

    for position in (1, 7, 64, 149):
        changed = x.clone()
        changed[:, position:] = torch.randn(2, 150 - position, 3).to(dtype) * 100

        assert torch.equal(ema(changed)[:, :position], ema(x)[:, :position])
        assert not torch.equal(ema(changed)[:, position:], ema(x)[:, position:])


@pytest.mark.parametrize("length", [1, 2, 7, 150])
@pytest.mark.parametrize("truncation", [None, 3])
def test_equals_espnet(redraw, assert_close_espnet, length, truncation):
    theirs = redraw(
        multi_head_damped_ema.MultiHeadDampedEMA(8, 4, torch.nn.SiLU(), truncation)
    )
    ours = MultiHeadDampedEMA(8, 4, torch.nn.SiLU(), truncation)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(2, length, 8)

    assert_close_espnet(ours(x), theirs(x.transpose(0, 1))[0].transpose(0, 1))


def test_errors_name_the_key():
    for key in ("size", "num_heads", "truncation_length"):
        with pytest.raises(ValueError, match=f"{key} must be at least 1.* got 0"):
            MultiHeadDampedEMA(**{"size": 4, key: 0})
