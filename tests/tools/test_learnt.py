import pytest
import reference.block
import torch
from reference.attention import causal_attention
from reference.decoder import mega_decoder
from reference.ema import damped_ema
from reference.position_bias import rotary_bias, simple_bias

from espnet_mega_bias import MEGABiasDecoder
from espnet_mega_bias.tools.learnt import (
    attention_weights,
    bias_by_offset,
    ema_kernel,
    read_learnt,
)

VOCAB = 11


@pytest.fixture
def build(redraw):
    def make(dtype=torch.float64, **conf):
        conf = {
            "block_size": 6,
            "linear_size": 8,
            "qk_size": 4,
            "v_size": 5,
            "num_heads": 2,
            "num_blocks": 3,
            "max_positions": 40,
            "rel_pos_bias_type": "rotary",
            **conf,
        }

        return redraw(MEGABiasDecoder(VOCAB, **conf)).to(dtype).eval()

    return make


@pytest.fixture
def naive_weights(monkeypatch):
    """Return a function that reads the weights out of the reference's loops."""
    recorded = []

    def record(query, key, value, bias, padding):
        one_hot = torch.eye(len(key), dtype=key.dtype)
        recorded.append(causal_attention(query, key, one_hot, bias, padding))

        return causal_attention(query, key, value, bias, padding)

    monkeypatch.setattr(reference.block, "causal_attention", record)

    def compute(decoder, labels, bias_type, chunk, truncation):
        recorded.clear()
        mega_decoder(
            labels,
            dict(decoder.named_parameters()),
            decoder.num_blocks,
            bias_type,
            chunk if chunk > 0 else None,
            truncation,
        )
        per_block = len(recorded) // decoder.num_blocks

        return [
            torch.block_diag(*recorded[n * per_block : (n + 1) * per_block]).detach()
            for n in range(decoder.num_blocks)
        ]

    return compute


def draw_labels(length, pads=False):
    return [0, *torch.randint(0 if pads else 1, VOCAB, (length - 1,)).tolist()]


@pytest.mark.parametrize("bias_type", ["rotary", "simple"])
@pytest.mark.parametrize("length", [1, 2, 7, 33])
def test_bias_is_the_last_row_of_the_reference(
    build, assert_close64, bias_type, length
):
    decoder = build(rel_pos_bias_type=bias_type)

    for (mega, _), actual in zip(
        decoder.mega_blocks, bias_by_offset(decoder, length), strict=True
    ):
        weights = [p.detach().flatten() for p in mega.rel_pos_bias.parameters()]
        naive = rotary_bias if bias_type == "rotary" else simple_bias

        assert_close64(torch.from_numpy(actual), naive(*weights, length)[-1])


@pytest.mark.parametrize(
    ("conf", "longest"),
    [
        ({}, 40),
        ({"rel_pos_bias_type": "simple"}, 40),
        ({"chunk_size": 5}, 5),
        ({"max_positions": None}, 100),
    ],
)
def test_bias_ends_where_the_attention_does(build, conf, longest):
    decoder = build(**conf)
    whole = bias_by_offset(decoder, 100)

    assert [len(values) for values in whole] == [longest] * 3

    for short, long in zip(bias_by_offset(decoder, 4), whole, strict=True):
        assert (short == long[-4:]).all()


@pytest.mark.parametrize("truncation", [None, 1, 4, 100])
def test_kernel_is_what_the_reference_answers_to_an_impulse(
    build, assert_close64, truncation
):
    decoder = build(truncation_length=truncation)
    impulse = torch.zeros(9, 6, dtype=torch.float64)
    impulse[0] = 1.0

    for (mega, _), actual in zip(
        decoder.mega_blocks, ema_kernel(decoder, 9), strict=True
    ):
        ema = mega.multihead_damped_ema
        expected = damped_ema(
            impulse,
            ema.damping_factor.squeeze(-1),
            ema.decay_factor.squeeze(-1),
            ema.ema_expansion_matrix.squeeze(-1),
            ema.kernel_projection_matrix,
            truncation,
        )

        assert_close64(torch.from_numpy(actual), expected.T.detach())


@pytest.mark.parametrize("bias_type", ["rotary", "simple"])
@pytest.mark.parametrize("chunk", [-1, 1, 4, 33])
@pytest.mark.parametrize("truncation", [None, 3])
@pytest.mark.parametrize("pads", [False, True])
def test_attention_equals_the_reference(
    build, naive_weights, assert_close64, bias_type, chunk, truncation, pads
):
    decoder = build(
        rel_pos_bias_type=bias_type, chunk_size=chunk, truncation_length=truncation
    )
    labels = draw_labels(13, pads)
    expected = naive_weights(decoder, labels, bias_type, chunk, truncation)
    actual = attention_weights(decoder, labels)

    assert len(actual) == len(expected) == 3

    for weights, naive in zip(actual, expected, strict=True):
        assert_close64(torch.from_numpy(weights), naive)


@pytest.mark.parametrize("chunk", [-1, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_attention_times_values_is_what_each_block_puts_out(build, chunk, dtype):
    decoder = build(dtype, chunk_size=chunk)
    labels = draw_labels(150 if chunk > 0 else 40, pads=True)
    seen = []

    for mega, _ in decoder.mega_blocks:
        mega.register_forward_hook(lambda *args: seen.append(args))

    all_weights = attention_weights(decoder, labels)

    for (mega, (x, padding), out), weights in zip(seen, all_weights, strict=True):
        update, _, gate, candidate = mega.gates(mega.multihead_damped_ema(x, padding))
        value = mega.activation(mega.proj_v(x))
        attended = torch.from_numpy(weights) @ value

        torch.testing.assert_close(
            mega.output(x, update, attended, gate, candidate), out
        )


def test_attention_rows_sum_to_one_and_see_no_padding_and_nothing_later(build):
    labels = [0, 3, 0, 0, 5, 6, 0]

    for weights in map(torch.from_numpy, attention_weights(build(), labels)):
        torch.testing.assert_close(weights.sum(1), torch.ones_like(weights[0]))
        assert (weights[:, [2, 3, 6]] == 0.0).all()
        assert (weights[1:, 0] > 0.0).all()  # the first blank is no padding
        assert (weights.triu(1) == 0.0).all()


def test_attention_leaves_the_decoder_alone(build):
    decoder = build()
    before = {name: value.clone() for name, value in decoder.state_dict().items()}
    attention_weights(decoder, draw_labels(5))

    with pytest.raises(ValueError, match=r"41 positions .* max_positions 40"):
        attention_weights(decoder, draw_labels(41))

    assert all(not mega._forward_pre_hooks for mega, _ in decoder.mega_blocks)
    assert all(p.grad is None for p in decoder.parameters())
    assert all((before[k] == v).all() for k, v in decoder.state_dict().items())
    assert not decoder.training


def test_attention_needs_a_decoder_without_dropout(build):
    decoder = build(ema_dropout_rate=0.5).train()

    with pytest.raises(ValueError, match="evaluation mode"):
        attention_weights(decoder, [0, 1])


def test_half_precision_is_read_in_float32(build):
    learnt = read_learnt(build(torch.bfloat16), 8)

    assert {str(a.dtype) for a in learnt.bias + learnt.kernel} == {"float32"}
    assert [a.shape for a in learnt.kernel] == [(6, 8)] * 3
