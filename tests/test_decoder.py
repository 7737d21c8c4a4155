import copy
import io
import pickle

import pytest
import torch
import yaml
from espnet2.asr_transducer import activation, normalization
from espnet2.asr_transducer.beam_search_transducer import Hypothesis
from espnet2.asr_transducer.decoder.mega_decoder import MEGADecoder
from reference.decoder import mega_decoder
from typeguard import TypeCheckError

from espnet_mega_bias import (
    MEGABiasDecoder,
    decoder,
    few_rows_linear,
    matrix_products,
)

SMALL = {
    "block_size": 6,
    "linear_size": 8,
    "qk_size": 4,
    "v_size": 5,
    "num_heads": 2,
    "num_blocks": 2,
    "max_positions": 64,
}
# Every linear layer is one that, in float32, oneDNN computes on AMD.
WIDE = {"block_size": 256, "linear_size": 512, "qk_size": 64, "v_size": 512}
VOCAB = 11


@pytest.fixture(autouse=True)
def amd(monkeypatch):
    for part in (matrix_products, few_rows_linear):
        monkeypatch.setattr(part, "on_amd", lambda: True)


@pytest.fixture
def build(redraw):
    def make(dtype=torch.float64, **conf):
        conf = {**SMALL, "rel_pos_bias_type": "rotary", **conf}

        return redraw(MEGABiasDecoder(VOCAB, **conf)).to(dtype).eval()

    return make


def draw_labels(length, batch=1, pads=True):
    """Label sequences that start with the blank; with labels 0 inside, if `pads`."""
    labels = torch.randint(0 if pads else 1, VOCAB, (batch, length))
    labels[:, 0] = 0

    return labels


def assert_close32(actual, exact):
    # By MKL alone, wide decoders are up to 2e-4 off, and their gradients up to 6e-4 of
    # the norm (four seeds, weights at std 1).
    torch.testing.assert_close(actual.double(), exact, rtol=0, atol=1e-3)


@torch.no_grad()
def step_through(model, labels, batched=False):
    """Decoder outputs label by label, and the last state."""
    state, outs = model.init_state(), []

    for t in range(1, len(labels) + 1):
        if batched:
            out, states = model.batch_score([Hypothesis(0.0, labels[:t], state)])
            state = model.select_state(states, 0)
        else:
            out, state = model.score(labels[:t], state)

        outs.append(out[0])

    return torch.stack(outs), state


@pytest.mark.parametrize("length", [1, 2, 7, 33])
@pytest.mark.parametrize("bias_type", ["rotary", "simple"])
@pytest.mark.parametrize("chunk", [-1, 4])
def test_full_pass_equals_the_reference(
    build, assert_close64, assert_gradients64, length, bias_type, chunk
):
    model = build(rel_pos_bias_type=bias_type, chunk_size=chunk)
    labels = draw_labels(length)
    weights = dict(model.named_parameters())
    blank, others = weights["embed.weight"].split([1, VOCAB - 1])

    expected = mega_decoder(
        labels[0].tolist(),
        # The row of an embedding's padding label gets no gradient, by definition.
        weights | {"embed.weight": torch.cat([blank.detach(), others])},
        2,
        bias_type,
        chunk if chunk > 0 else None,
    )
    actual = model(labels)[0]

    assert_close64(actual, expected)
    assert_gradients64(actual, expected, model.parameters())


@pytest.mark.parametrize("bias_type", ["rotary", "simple"])
@pytest.mark.parametrize("chunk", [-1, 1, 4, 16])
@pytest.mark.parametrize("truncation", [None, 1, 3, 100])
@pytest.mark.parametrize("pads", [True, False])
def test_steps_equal_the_full_pass_at_every_position(
    build, assert_close64, bias_type, chunk, truncation, pads
):
    model = build(
        rel_pos_bias_type=bias_type, chunk_size=chunk, truncation_length=truncation
    )
    labels = draw_labels(33, pads=pads)
    full = model(labels)[0]

    for batched in (False, True):
        assert_close64(step_through(model, labels[0].tolist(), batched)[0], full)


def test_steps_equal_the_full_pass_where_the_bias_decides(build, assert_close64):
    """C1."""
    model = build()
    labels = draw_labels(33, pads=False)
    before = model(labels)[0]

    with torch.no_grad():
        for mega, _ in model.mega_blocks:
            mega.rel_pos_bias.alpha.mul_(50.0)
            mega.rel_pos_bias.beta.mul_(50.0)

    full = model(labels)[0]

    assert not torch.allclose(before[1:], full[1:], rtol=0.1)
    assert_close64(step_through(model, labels[0].tolist())[0], full)


@pytest.mark.parametrize("name", decoder.NORMALIZATION_TYPES)
@pytest.mark.parametrize("act", decoder.ACTIVATION_TYPES)
def test_steps_equal_the_full_pass_with_each_norm_and_activation(
    build, assert_close64, name, act
):
    # With every position and every parameter away from zero; the lengths that are
    # special to chunks are covered above.
    model = build(normalization_type=name, activation_type=act)
    labels = draw_labels(7)

    assert_close64(step_through(model, labels[0].tolist())[0], model(labels)[0])


@pytest.mark.parametrize("chunk", [-1, 4])
@pytest.mark.parametrize("truncation", [None, 3])
def test_ragged_batches_equal_single_hypotheses(
    build, assert_close64, chunk, truncation
):
    model = build(chunk_size=chunk, truncation_length=truncation)

    with torch.no_grad():
        for block, _ in model.mega_blocks:
            block.qk_weight[1].mul_(100.0)

    sequences = [draw_labels(n)[0].tolist() for n in (1, 4, 9, 9, 5)]
    singles, hyps = [], []

    for sequence in sequences:
        outs, _ = step_through(model, sequence)
        singles.append(outs[-1])

        state = model.init_state()
        if len(sequence) > 1:
            _, state = step_through(model, sequence[:-1])
        hyps.append(Hypothesis(0.0, sequence, state))

    out, states = model.batch_score(hyps)

    assert_close64(out, torch.stack(singles))

    # One label more from the states that came out, in another order.
    order = [3, 0, 4, 2, 1]
    longer = [[*sequences[i], 7] for i in order]
    again, _ = model.batch_score(
        [
            Hypothesis(0.0, sequence, model.select_state(states, i))
            for i, sequence in zip(order, longer, strict=True)
        ]
    )

    assert_close64(
        again, torch.stack([step_through(model, seq)[0][-1] for seq in longer])
    )


@pytest.mark.parametrize("count", [1, 3, 10, 40])
def test_steps_of_a_wide_decoder_equal_the_full_pass(build, count):
    model = build(dtype=torch.float32, **WIDE)
    exact = copy.deepcopy(model).double()
    # Long enough for weights to be copied.
    labels = draw_labels(few_rows_linear._CALLS_BEFORE_COPY + 3, batch=count)
    hyps = [Hypothesis(0.0, [0], model.init_state()) for _ in range(count)]

    with torch.no_grad():
        expected = exact(labels)
        assert_close32(model(labels), expected)

        for t in range(labels.size(1)):
            out, states = model.batch_score(hyps)
            assert_close32(out, expected[:, t])
            hyps = [
                Hypothesis(0.0, sequence[: t + 2], state)
                for sequence, state in zip(labels.tolist(), states, strict=True)
            ]


def test_gradients_of_a_wide_decoder(build):
    model = build(dtype=torch.float32, **WIDE)
    exact = copy.deepcopy(model).double()
    labels = draw_labels(9, batch=3)
    cotangent = torch.randn(3, 9, 256)

    for decoder_, grad in ((model, cotangent), (exact, cotangent.double())):
        decoder_(labels).backward(grad)

    for (name, ours), theirs in zip(
        model.named_parameters(), exact.parameters(), strict=True
    ):
        error = (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()
        assert error < 1e-3, name


def test_padded_batch_equals_single_sequences(build, assert_close64):
    """A2."""
    for chunk in (-1, 4):
        model = build(chunk_size=chunk)
        labels = draw_labels(12, batch=3, pads=False)
        lengths = [5, 12, 1]

        for row, length in enumerate(lengths):
            labels[row, length:] = 0

        out = model(labels)

        for row, length in enumerate(lengths):
            alone = model(labels[row : row + 1, :length])[0]
            assert_close64(out[row, :length], alone)


@pytest.mark.parametrize("sizes", [SMALL, WIDE], ids=["small", "wide"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk", [-1, 4])
@pytest.mark.parametrize("truncation", [None, 3])
def test_later_labels_change_nothing_earlier_bit_for_bit(
    build, dtype, chunk, truncation, sizes
):
    conf = {**sizes, "chunk_size": chunk, "truncation_length": truncation}
    model = build(dtype=dtype, **conf)
    labels = draw_labels(33, batch=4)
    out = model(labels)

    for position in (1, 7, 8, 32):
        changed = labels.clone()
        changed[:, position:] = draw_labels(34 - position, batch=4)[:, 1:]

        assert torch.equal(model(changed)[:, :position], out[:, :position])
        assert not torch.equal(model(changed)[:, position:], out[:, position:])


def test_later_labels_change_nothing_earlier_at_initialisation():
    # Here the first position is exactly zero before each normalisation, whose tiny
    # epsilon would blow any leak up to the size of the output.
    model = MEGABiasDecoder(VOCAB, **SMALL).eval()
    labels = draw_labels(33, pads=False)
    changed = labels.clone()
    changed[:, 7:] = 1

    assert torch.equal(model(changed)[:, :7], model(labels)[:, :7])

    steps, _ = step_through(model, labels[0].tolist())
    torch.testing.assert_close(steps, model(labels)[0], rtol=0, atol=1e-5)


def held(model, state):
    """All that the next step reads: EMA states, positions, keys and values by block."""
    history = state.history_from(model._first_in_reach(state.length))
    rows, positions = history[0] if history else [torch.tensor([]).long()] * 2
    attended = [state.cache.buffer[:, rows]] if history else []

    return [state.ema_state, positions, *attended]


@torch.no_grad()
def test_states_are_never_modified(build):
    for conf in ({}, {"chunk_size": 4}, {"truncation_length": 3}, {"max_positions": 5}):
        model = build(**conf)
        sequence, states = draw_labels(40)[0].tolist(), [model.init_state()]

        for t in range(1, 41):
            states.append(model.score(sequence[:t], states[-1])[1])

        kept = copy.deepcopy([held(model, state) for state in states])

        for t in range(40):
            for label in range(VOCAB):
                hyps = [
                    Hypothesis(0.0, [*sequence[:t], label], states[t]),
                    Hypothesis(0.0, [*sequence[: t // 2], label], states[t // 2]),
                ]
                model.batch_score(hyps)
                model.score([*sequence[:t], label], states[t])

        for state, before in zip(states, kept, strict=True):
            for ours, theirs in zip(held(model, state), before, strict=True):
                assert torch.equal(ours, theirs)


def test_first_state_and_each_chunk_hold_no_keys(build):
    model = build(chunk_size=4)
    assert model.init_state().cache is None

    for length in (4, 8):
        labels = draw_labels(length + 1, pads=False)[0].tolist()
        _, state = step_through(model, labels[:-1])
        assert held(model, state)[1].tolist() == []

        _, state = step_through(model, labels)
        assert held(model, state)[1].tolist() == [length]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_states_have_the_type_of_the_weights(build, dtype):
    for truncation in (None, 3):
        model = build(dtype=dtype, truncation_length=truncation)
        _, state = step_through(model, draw_labels(5)[0].tolist())

        assert model.init_state().ema_state.dtype == dtype
        assert state.ema_state.dtype == dtype
        assert state.cache.buffer.dtype == dtype


def test_decoding_goes_on_past_max_positions(build, assert_close64):
    """B9."""
    model, longer = build(max_positions=8, num_blocks=1), build(num_blocks=1)
    longer.load_state_dict(model.state_dict(), strict=True)
    labels = draw_labels(20, pads=False)[0].tolist()

    outs, state = step_through(model, labels)
    rest, all_held = step_through(longer, labels[:-1])

    assert_close64(outs[:8], rest[:8])
    assert not torch.allclose(outs[8:-1], rest[8:])
    assert held(model, state)[1].tolist() == list(range(13, 20))

    # The last 8 positions only: with the EMA state and the keys of those, as given.
    assert_close64(model.score(labels, all_held)[0][0], outs[-1])


def test_full_pass_past_max_positions_names_the_numbers_and_the_key(build):
    model = build(max_positions=32)

    with pytest.raises(
        ValueError, match=r"33 positions.*max_positions 32.*decoder_con"
    ):
        model(draw_labels(33))

    assert build(max_positions=None)(draw_labels(100)).shape == (1, 100, 6)
    assert build(max_positions=8, chunk_size=4)(draw_labels(100)).shape == (1, 100, 6)


def test_state_of_another_length_is_refused(build):
    model = build()
    _, state = step_through(model, [0, 3, 5])

    with pytest.raises(ValueError, match=r"seen 3 labels.*seen 1 to score .* 2 labels"):
        model.score([0, 4], state)


def change_by_loading(model, other):
    model.load_state_dict(other.state_dict())


def change_by_optimizer(model, other):
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        ours.grad = ours.detach() - theirs.detach()
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def change_by_copying(model, other):
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            ours.copy_(theirs)


def change_by_assigning(model, other):
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)


CHANGES = [
    change_by_loading,
    change_by_optimizer,
    change_by_copying,
    change_by_assigning,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("count", [1, 2])
def test_a_wide_decoder_forgets_what_it_made_of_other_weights(build, change, count):
    model, other = (build(dtype=torch.float32, **WIDE) for _ in range(2))
    labels = draw_labels(few_rows_linear._CALLS_BEFORE_COPY + 3, batch=count)

    for weights in (model, other):
        expected = copy.deepcopy(weights).double()(labels)
        hyps = [Hypothesis(0.0, [0], model.init_state()) for _ in range(count)]

        for t in range(labels.size(1)):
            with torch.no_grad():
                out, states = model.batch_score(hyps)

            assert_close32(out, expected[:, t])
            hyps = [
                Hypothesis(0.0, sequence[: t + 2], state)
                for sequence, state in zip(labels.tolist(), states, strict=True)
            ]

        change(model, other)


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_survives_a_change_of_the_weights(build, assert_close64, change):
    model, other = build(), build()
    labels = draw_labels(9)
    before, _ = step_through(model, labels[0].tolist())

    change(model, other)

    expected = other(labels)[0]
    assert_close64(model(labels)[0], expected)
    assert_close64(step_through(model, labels[0].tolist())[0], expected)
    assert not torch.allclose(before, expected)


@torch.no_grad()
def test_a_state_without_labels_serves_all_weights(build, assert_close64):
    model, other = build(), build()
    state = model.init_state()
    _, before = model.score([0], state)
    model.score([0, 4], before)

    change_by_copying(model, other)
    model.score([0, 4], before)

    assert_close64(model.score([0], state)[0], other(torch.tensor([[0]]))[0])


@pytest.mark.parametrize("sizes", [SMALL, WIDE], ids=["small", "wide"])
def test_nothing_survives_a_change_of_type(build, assert_close64, sizes):
    model = build(dtype=torch.float32, **sizes)
    labels = draw_labels(9)
    step_through(model, labels[0].tolist())

    model.double()

    outs, _ = step_through(model, labels[0].tolist())
    assert outs.dtype == torch.float64
    assert_close64(outs, copy.deepcopy(model)(labels)[0])


@torch.no_grad()
def test_score_cache_returns_the_same_and_stays_small(build):
    model = build()
    start = model.init_state()
    first = model.score([0], start)

    assert model.score([0], start)[1] is first[1]
    assert model.batch_score([Hypothesis(0.0, [0], start)] * 2)[1] == [first[1]] * 2

    for label in range(1, VOCAB):
        _, after = model.score([0, label], first[1])

        for other in range(1, VOCAB):
            _, last = model.score([0, label, other], after)
            model.batch_score(
                [Hypothesis(0.0, [0, label, other, n], last) for n in range(VOCAB)]
            )

    assert len(model.score_cache) <= decoder.SCORE_CACHE_SIZE + 1

    again = model.score([0], start)
    assert again[1] is not first[1]
    torch.testing.assert_close(again[0], first[0])


@torch.no_grad()
def test_score_cache_knows_states_and_not_labels_alone(build):
    model = build()
    outs = []

    for label in (3, 5):
        _, state = step_through(model, [0, label])
        outs.append(model.score([0, label, 7], state)[0])
        # Another history under the same labels: the state decides.
        assert torch.equal(model.score([0, 9, 7], state)[0], outs[-1])

    assert not torch.allclose(*outs)


def test_copies_and_pickles_leave_the_score_cache_behind(build):
    model = build()
    out, _ = model.score([0], model.init_state())
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))

    for other in (copied, pickled):
        assert other.score_cache == {}
        assert torch.equal(other.score([0], other.init_state())[0], out)

    assert model.score_cache != {}


@pytest.mark.parametrize("bias_type", ["rotary", "simple"])
@pytest.mark.parametrize("chunk", [-1, 4])
def test_equals_espnet_where_espnet_is_right(
    redraw, assert_close_espnet, bias_type, chunk
):
    conf = {**SMALL, "rel_pos_bias_type": bias_type, "chunk_size": chunk}
    theirs = redraw(MEGADecoder(VOCAB, **conf)).eval()
    ours = MEGABiasDecoder(VOCAB, **conf).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)

    # No blank: its exactly zero embedding is where ESPnet's FFT leaks.
    labels = torch.randint(1, VOCAB, (3, 12))

    assert_close_espnet(ours(labels), theirs(labels))


def test_initialisation_draws_from_espnets_distributions():
    conf = {"block_size": 64, "v_size": 128, "rel_pos_bias_type": "rotary"}
    theirs = MEGADecoder(50, **conf).state_dict()
    ours = MEGABiasDecoder(50, **conf).state_dict()

    assert set(ours) == set(theirs)

    for name, weight in theirs.items():
        # proj_h.bias: see the next test.
        if name.endswith(("_pe", "proj_h.bias")) or weight.numel() < 64:
            continue
        assert ours[name].std().item() == pytest.approx(weight.std().item(), rel=0.5)
        assert ours[name].mean().item() == pytest.approx(
            weight.mean().item(), abs=0.5 * weight.std().item() + 1e-6
        )


@pytest.mark.parametrize("name", decoder.NORMALIZATION_TYPES)
def test_gradient_at_initialisation_is_not_ruled_by_the_blank_in_front(name):
    model = MEGABiasDecoder(VOCAB, num_blocks=6, block_size=32, normalization_type=name)
    labels = draw_labels(20, batch=4, pads=False)
    norms = []

    for batch in (labels, labels[:, 1:]):
        model.zero_grad()
        out = model(batch)
        out.backward(torch.randn_like(out))
        norms.append(max(p.grad.norm().item() for p in model.parameters()))

    # ESPnet's decoder: nine digits with the blank in front, three without.
    assert norms[0] < 30.0 * norms[1]


def test_one_seed_gives_byte_equal_state_dicts():
    """B3."""
    stored = []

    for _ in range(2):
        torch.manual_seed(3)
        buffer = io.BytesIO()
        torch.save(MEGABiasDecoder(VOCAB, **SMALL).state_dict(), buffer)
        stored.append(buffer.getvalue())

    assert stored[0] == stored[1]


def test_autocast_stays_near_float32(build):
    model = build(dtype=torch.float32)
    labels = draw_labels(33, pads=False)
    expected = model(labels)

    with torch.autocast("cpu", torch.bfloat16):
        out = model(labels)
        out.float().sum().backward()
        steps, _ = step_through(model, labels[0].tolist())

    # Parameters at std 1 make attention near one-hot: compare typical positions.
    assert (out.float() - expected).abs().median() < 2e-2 * expected.abs().max()
    assert (steps.float() - expected[0]).abs().median() < 2e-2 * expected.abs().max()


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"qk_size": 7}, "qk_size must be even.* got 7"),
        ({"rel_pos_bias_type": "alibi"}, "rel_pos_bias_type.*simple, rotary.*'alibi'"),
        ({"normalization_type": "batch"}, "normalization_type.*layer_norm.*'batch'"),
        ({"activation_type": "gelu"}, "activation_type.*swish.*'gelu'"),
        ({"max_positions": 0}, "max_positions must be at least 1, got 0"),
        ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ({"num_heads": -1}, "num_heads must be at least 1, got -1"),
        ({"truncation_length": 0}, "truncation_length must be at least 1, got 0"),
        ({"dropout_rate": 1.5}, "dropout_rate must be between 0 and 1, got 1.5"),
        ({"embed_pad": VOCAB}, f"embed_pad.*vocab_size {VOCAB}, got {VOCAB}"),
    ],
)
def test_bad_values_name_the_key(conf, message):
    """B6."""
    with pytest.raises(ValueError, match=message):
        MEGABiasDecoder(VOCAB, **{**SMALL, "rel_pos_bias_type": "rotary", **conf})


def test_misspelt_key_and_wrong_type_name_the_key():
    with pytest.raises(TypeError, match="qk_sise"):
        MEGABiasDecoder(VOCAB, qk_sise=4)

    with pytest.raises(TypeCheckError, match=r'"qk_size" \(str\).*int'):
        MEGABiasDecoder(VOCAB, qk_size="4")


def test_values_that_yaml_writes_are_accepted():
    """D8."""
    conf = yaml.safe_load("{truncation_length: null, dropout_rate: 0, block_size: 8}")

    MEGABiasDecoder(VOCAB, **conf)
    MEGABiasDecoder(VOCAB)


def test_known_types_are_those_of_espnet():
    for name in decoder.ACTIVATION_TYPES:
        activation.get_activation(name)

    for name in decoder.NORMALIZATION_TYPES:
        normalization.get_normalization(name)

    # ESPnet keeps its tables inside the functions: their keys are a constant there.
    for function, names in (
        (activation.get_activation, decoder.ACTIVATION_TYPES),
        (normalization.get_normalization, decoder.NORMALIZATION_TYPES),
    ):
        constants = function.__code__.co_consts
        assert set(names) in [set(c) for c in constants if isinstance(c, tuple)]


@pytest.mark.parametrize(
    "part",
    [
        "0.proj_v",
        "0.proj_mx",
        "0.proj_h",
        "0.activation",
        "0.normalization",
        "1",
        "1.linear1",
        "1.linear2",
        "1.normalization",
    ],
)
def test_the_search_sees_hooks_that_come_and_go(build, assert_close64, part):
    model = build()
    labels = draw_labels(9)
    before = model(labels)[0]
    assert_close64(step_through(model, labels[0].tolist())[0], before)

    hook = (
        model.mega_blocks[0]
        .get_submodule(part)
        .register_forward_hook(lambda module, inputs, output: 2.0 * output)
    )
    hooked = model(labels)[0]
    assert not torch.allclose(hooked, before)
    assert_close64(step_through(model, labels[0].tolist())[0], hooked)

    hook.remove()
    assert_close64(step_through(model, labels[0].tolist())[0], before)
