"""The decoder under what torch offers: casts, modes, compilers, copies, replicas."""

import copy
import io
import pickle
import shutil
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from espnet2.asr_transducer.beam_search_transducer import Hypothesis
from espnet2.main_funcs.average_nbest_models import average_nbest_models
from espnet2.train.reporter import Reporter
from reference.decoder import mega_decoder

from espnet_mega_bias import (
    MEGABiasDecoder,
    RelativePositionBias,
    RotaryRelativePositionBias,
)

VOCAB = 11
SMALL = {
    "block_size": 6,
    "linear_size": 8,
    "qk_size": 4,
    "v_size": 5,
    "num_heads": 2,
    "num_blocks": 2,
    "max_positions": 160,
    "rel_pos_bias_type": "rotary",
}
# Wide enough that an error relative to the size of the output means something.
WIDE = {"block_size": 32, "linear_size": 32, "qk_size": 16, "v_size": 32}

CONFS = [
    pytest.param({}, id="rotary"),
    pytest.param({"rel_pos_bias_type": "simple"}, id="simple"),
    pytest.param({"chunk_size": 4, "truncation_length": 3}, id="chunk-truncation"),
]

# Shorter than, and not a multiple of, one block of the EMA; and several of them.
LENGTHS = [5, 48, 129]

# Largest relative error: about twice what is seen, in either direction of the pass.
ROUNDING = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def build(redraw):
    def make(dtype=torch.float64, **conf):
        return redraw(MEGABiasDecoder(VOCAB, **{**SMALL, **conf})).to(dtype).eval()

    return make


def near_start(**conf):
    """A decoder as at the start of training, but with a bias that shows.

    Parameters at std 1 leave one key with all the weight, and which one it is can hang
    on a rounding.
    """
    model = MEGABiasDecoder(VOCAB, **{**SMALL, **WIDE, **conf}).eval()

    for mega, _ in model.mega_blocks:
        mega.rel_pos_bias.reset_parameters(std=0.5)

    return model


def fresh(model, **conf):
    """A new decoder with the parameters of another, and tables of its own."""
    other = MEGABiasDecoder(VOCAB, **{**SMALL, **conf}).to(model.embed.weight.dtype)
    other.load_state_dict(model.state_dict())

    return other.eval()


def draw_labels(length, batch=1):
    """Label sequences that start with the blank, with labels 0 inside."""
    labels = torch.randint(VOCAB, (batch, length))
    labels[:, 0] = 0

    return labels


def advance(model, labels, state, start=0):
    """Outputs for the labels from `start` on, and the last state."""
    outs = []

    for t in range(start + 1, len(labels) + 1):
        out, state = model.score(labels[:t], state)
        outs.append(out[0])

    return torch.stack(outs), state


def advance_in_batches(model, labels, state):
    """The same through `batch_score`, beside a hypothesis that never grows."""
    outs = []
    waiting = Hypothesis(0.0, [0], model.init_state())

    for t in range(1, len(labels) + 1):
        out, states = model.batch_score([Hypothesis(0.0, labels[:t], state), waiting])
        state = model.select_state(states, 0)
        outs.append(out[0])

    return torch.stack(outs), state


@torch.no_grad()
def step_through(model, labels):
    return advance(model, labels[0].tolist(), model.init_state())[0]


@torch.no_grad()
def step_through_in_batches(model, labels):
    return advance_in_batches(model, labels[0].tolist(), model.init_state())[0]


def gradients(model, labels, cotangent):
    """Gradients in the order of the parameters, none of them missing."""
    out = model(labels)

    return torch.autograd.grad(out, list(model.parameters()), cotangent.to(out.dtype))


def tables(model):
    return {name: table for name, table in model.named_buffers() if "_pe" not in name}


def assert_equal(actual, expected):
    """The same bits, and values that say something."""
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert theirs.isfinite().all()
        assert torch.equal(ours, theirs)

    assert any(theirs.abs().max() > 0 for theirs in expected)


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def relative_error(actual, expected):
    """Root mean square error as a share of the expected values' size."""
    actual, expected = actual.detach().double(), expected.detach().double()

    return ((actual - expected).norm() / expected.norm()).item()


# Casts and autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("conf", CONFS)
def test_narrow_types_stay_near_float64_of_the_same_weights(conf, dtype):
    """A5, for modules cast as a whole."""
    model = near_start(**conf).to(dtype)
    exact = fresh(copy.deepcopy(model).double(), **WIDE, **conf)

    for length in LENGTHS:
        labels = draw_labels(length, batch=2)
        out = model(labels)

        assert out.dtype == dtype
        assert relative_error(out, exact(labels)) < ROUNDING[dtype]

    steps = step_through(model, labels[:, :20])

    assert steps.dtype == dtype
    assert relative_error(steps, exact(labels)[0, :20]) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("conf", CONFS)
def test_a_cast_and_back_equals_a_decoder_built_with_those_weights(build, conf, dtype):
    """B1: the weights keep the rounding of the narrowest type, the tables do not."""
    model = build(torch.float32, **conf)
    labels = draw_labels(33)

    rounded = {
        name: value.to(dtype).float() for name, value in model.state_dict().items()
    }
    expected = build(torch.float32, **conf)
    expected.load_state_dict(rounded)

    model.to(dtype)
    model(labels)
    step_through(model, labels[:, :5])
    model.float()

    assert_equal([model(labels)], [expected(labels)])
    assert_equal([step_through(model, labels)], [step_through(expected, labels)])

    if tables(expected):
        assert_equal(tables(model).values(), tables(expected).values())


@pytest.mark.parametrize("conf", CONFS)
def test_autocast_trains_like_float32(conf):
    """A5: bfloat16 inside, float32 gradients that point the same way."""
    model = near_start(**conf).train()

    for length in LENGTHS:
        labels = draw_labels(length, batch=2)
        expected = model(labels)
        cotangent = torch.randn_like(expected)

        with torch.autocast("cpu", torch.bfloat16):
            actual = model(labels)

        assert relative_error(actual, expected) < ROUNDING[torch.bfloat16]

        ours = torch.autograd.grad(
            actual, list(model.parameters()), cotangent.to(actual.dtype)
        )
        theirs = gradients(model, labels, cotangent)

        assert all(grad.dtype == torch.float32 for grad in ours)
        assert relative_error(flat(ours), flat(theirs)) < ROUNDING[torch.bfloat16]


@pytest.mark.parametrize("conf", CONFS)
def test_autocast_search_steps_stay_near_float32(conf):
    """A5, one label at a time."""
    model = near_start(**conf)
    labels = draw_labels(33)
    expected = model(labels)[0]

    with torch.autocast("cpu", torch.bfloat16):
        for outs in (
            step_through(model, labels),
            step_through_in_batches(model, labels),
        ):
            assert relative_error(outs, expected) < ROUNDING[torch.bfloat16]


# Meta device


def test_meta_construction_then_reset_equals_a_normal_construction():
    """B5: `Module.apply` resets children first, which is the constructor's order.

    A loop over `modules()` would go the other way round, and leave the projections
    with the initialisation of `torch.nn.Linear`.
    """
    torch.manual_seed(1)
    expected = MEGABiasDecoder(VOCAB, **SMALL)

    with torch.device("meta"):
        model = MEGABiasDecoder(VOCAB, **SMALL)

    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])

    model.to_empty(device="cpu")
    torch.manual_seed(1)
    model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else 0)

    assert list(model.state_dict()) == list(expected.state_dict())
    assert_equal(model.state_dict().values(), expected.state_dict().values())
    assert_equal(tables(model).values(), tables(expected).values())


@pytest.mark.parametrize("norm", ["layer_norm", "basic_norm", "rms_norm", "scale_norm"])
@pytest.mark.parametrize("conf", CONFS)
def test_meta_construction_then_loading_equals_the_loaded_decoder(build, conf, norm):
    """B5: no reset is needed, with norms of ESPnet's that have none."""
    conf = {**conf, "normalization_type": norm}
    expected = build(torch.float32, **conf)
    labels = draw_labels(33)

    with torch.device("meta"):
        model = MEGABiasDecoder(VOCAB, **{**SMALL, **conf}).eval()

    model.to_empty(device="cpu")
    model.load_state_dict(expected.state_dict())

    assert_equal(model.state_dict().values(), expected.state_dict().values())
    assert list(tables(model)) == list(tables(expected))
    assert_equal([model(labels)], [expected(labels)])
    assert_equal([step_through(model, labels)], [step_through(expected, labels)])

    if tables(expected):
        assert_equal(tables(model).values(), tables(expected).values())


@pytest.mark.parametrize("conf", CONFS)
def test_everything_made_on_the_way_is_on_the_device_of_the_weights(build, conf):
    """B2, D2: a tensor made on the CPU would not combine with one on the meta device.

    The decoder that stays behind shares no table with the one that moves.
    """
    model = build(**conf)
    labels = draw_labels(9)
    expected = model(labels)

    moved = copy.deepcopy(model).to("meta")

    assert all(tensor.is_meta for tensor in [*moved.parameters(), *moved.buffers()])
    assert moved(labels.to("meta")).is_meta
    assert step_through(moved, labels).is_meta
    assert step_through_in_batches(moved, labels).is_meta

    assert_equal([model(labels)], [expected])


# Autograd modes


@pytest.mark.parametrize("conf", CONFS)
def test_inference_mode_leaves_training_as_it_was(build, conf):
    """B4: full passes and steps before, gradients of a decoder that never saw them."""
    model = build(**conf)
    labels = draw_labels(33, batch=2)
    cotangent = torch.randn(2, 33, 6, dtype=torch.float64)
    expected = gradients(fresh(model, **conf), labels, cotangent)

    with torch.inference_mode():
        model(labels)
        step_through(model, labels)
        step_through_in_batches(model, labels)

    assert_equal(gradients(model.train(), labels, cotangent), expected)


def test_inference_mode_past_the_table_leaves_training_as_it_was(redraw):
    """B4, for a bias without a limit, where the table does not reach."""
    bias = redraw(RotaryRelativePositionBias(16, None))
    other = RotaryRelativePositionBias(16, None)
    other.load_state_dict(bias.state_dict())
    length = bias.sine.size(0) + 5

    with torch.inference_mode():
        bias.by_offset(length)

    assert_equal(
        torch.autograd.grad(bias.by_offset(length).square().sum(), bias.parameters()),
        torch.autograd.grad(other.by_offset(length).square().sum(), other.parameters()),
    )


@pytest.mark.parametrize("conf", CONFS)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (torch.inference_mode, torch.no_grad),
        (torch.no_grad, torch.inference_mode),
        (torch.inference_mode, torch.enable_grad),
        (torch.enable_grad, torch.inference_mode),
        (torch.enable_grad, torch.no_grad),
    ],
)
def test_a_search_goes_on_in_another_autograd_mode(
    build, assert_close64, conf, first, then
):
    """B4, for states: those made in one mode serve in the other, and stay as good."""
    model = build(**conf)
    labels, other = draw_labels(13), draw_labels(7)
    other[0, :6] = labels[0, :6]
    sequence = labels[0].tolist()
    expected = step_through(model, labels)[6:]

    with first():
        _, state = advance(model, sequence[:6], model.init_state())

    with then():
        branches = [Hypothesis(0.0, other[0].tolist(), state)] * 2
        branch, _ = model.batch_score(branches)
        later, _ = advance(model, sequence, state, start=6)

    with first():
        model.score_cache.clear()
        again, _ = advance(model, sequence, state, start=6)

    assert_close64(later, expected)
    assert_close64(again, expected)
    assert_close64(branch, step_through(model, other)[-1].expand(2, -1))


@pytest.mark.parametrize("conf", CONFS)
def test_gradients_through_the_steps_equal_those_of_the_full_pass(
    build, assert_close64, conf
):
    """B4: also where a search goes on from the states before the backward pass."""
    model = build(**conf)
    labels = draw_labels(9)
    cotangent = torch.randn(9, 6, dtype=torch.float64)
    expected = gradients(model, labels, cotangent.unsqueeze(0))

    for search in (False, True):
        sequence = labels[0].tolist()
        outs, state = advance(model, sequence[:6], model.init_state())

        if search:
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    advance(model, [*sequence[:6], 3, 5, 8], state, start=6)

        more, _ = advance(model, sequence, state, start=6)
        actual = torch.autograd.grad(
            torch.cat([outs, more]), list(model.parameters()), cotangent
        )

        assert_close64(flat(actual), flat(expected))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_score_without_a_graph_does_not_answer_for_one_with_it(build, mode):
    """B4: the same hypothesis is scored in a search, then in training."""
    model = build()

    with mode():
        out, _ = model.score([0], model.init_state())

    again, _ = model.score([0], model.init_state())

    assert_equal([again.detach()], [out])
    again.sum().backward()
    assert model.final_norm.bias.grad is not None


# Compilers


def compile_afresh(function, **options):
    """Compile with no graphs of earlier tests counted against torch's limit of 8."""
    torch.compiler.reset()

    return torch.compile(function, fullgraph=True, **options)


@pytest.mark.parametrize(
    "build_bias",
    [
        pytest.param(lambda: RotaryRelativePositionBias(16, 64), id="rotary"),
        pytest.param(lambda: RelativePositionBias(64), id="simple"),
    ],
)
@pytest.mark.parametrize("form", ["forward", "causal", "last_row"])
def test_compiled_bias_serves_every_length_without_a_break(redraw, build_bias, form):
    """B7: more lengths than torch recompiles for, values and gradients."""
    bias = redraw(build_bias())
    held = [*vars(bias), *(id(buffer) for buffer in bias.buffers())]
    eager = getattr(bias, form)
    compiled = compile_afresh(eager, backend="aot_eager")

    for length in (1, 7, 64, 7, 12, 2, 33, 3, 34, 5, 63):
        expected = eager(length)
        actual = compiled(length)
        seen = expected.isfinite()

        assert torch.equal(actual, expected)
        assert_equal(
            torch.autograd.grad(actual[seen].square().sum(), bias.parameters()),
            torch.autograd.grad(expected[seen].square().sum(), bias.parameters()),
        )

    assert [*vars(bias), *(id(buffer) for buffer in bias.buffers())] == held


def test_compiled_bias_without_a_limit_grows_past_its_table(redraw):
    """B7: five positions past the table, and back."""
    bias = redraw(RotaryRelativePositionBias(16, None))
    rows = bias.sine.size(0)
    compiled = compile_afresh(bias, backend="aot_eager")

    with torch.no_grad():
        for length in (1, 7, rows, rows + 5, 7):
            assert torch.equal(compiled(length), bias(length))

    assert bias.sine.size(0) == rows


@pytest.mark.slow
def test_compiled_decoder_serves_every_length_without_a_break(build, assert_close64):
    """B7: more lengths than torch recompiles for, values and gradients."""
    model = build(num_blocks=1, max_positions=64)
    compiled = compile_afresh(model, backend="aot_eager")

    for length in (5, 7, 33, 1, 2, 3, 4, 9, 20, 64):
        labels = draw_labels(length, batch=2)
        cotangent = torch.randn(2, length, 6, dtype=torch.float64)

        assert_close64(compiled(labels), model(labels))
        assert_close64(
            flat(gradients(compiled, labels, cotangent)),
            flat(gradients(model, labels, cotangent)),
        )


@pytest.mark.parametrize(
    ("conf", "lengths"),
    [
        ({"truncation_length": 3}, [5, 6, 7, 8, 9, 10, 11, 33, 12, 13]),
        ({"chunk_size": 4}, [3, 5, 6, 7, 8, 9, 10, 11, 33, 13]),
    ],
)
def test_compiled_decoder_follows_chunks_and_truncation(
    build, assert_close64, conf, lengths
):
    """B7, without gradients: each takes a path of its own where it sets in."""
    model = build(num_blocks=1, **conf)
    compiled = compile_afresh(model, backend="aot_eager")

    with torch.no_grad():
        for length in lengths:
            labels = draw_labels(length, batch=2)
            assert_close64(compiled(labels), model(labels))


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler"
)
def test_inductor_computes_the_same_decoder(build):
    """B7, with the code that users run."""
    model = build(torch.float32, num_blocks=1)
    compiled = compile_afresh(model)
    labels = draw_labels(9, batch=2)

    with torch.no_grad():
        torch.testing.assert_close(compiled(labels), model(labels), rtol=0, atol=1e-5)


@pytest.mark.parametrize("conf", CONFS[:2])
def test_exported_decoder_runs_at_other_lengths_and_batch_sizes(
    build, assert_close64, conf
):
    """B12: traced at 8 positions, run from 1 to the end of the table."""
    model = build(num_blocks=1, max_positions=64, **conf)
    exported = torch.export.export(
        model,
        (draw_labels(8, batch=2),),
        dynamic_shapes=(
            {0: torch.export.Dim("B"), 1: torch.export.Dim("U", min=1, max=64)},
        ),
    ).module()

    for length in (1, 3, 20, 64):
        for batch in (1, 3):
            labels = draw_labels(length, batch)
            assert_close64(exported(labels), model(labels))


@pytest.mark.parametrize("conf", CONFS)
def test_functional_call_differentiates_the_full_pass(build, assert_close64, conf):
    model = build(**conf)
    other = build(**conf)
    labels = draw_labels(9, batch=2)
    cotangent = torch.randn(2, 9, 6, dtype=torch.float64)

    def loss(parameters):
        out = torch.func.functional_call(model, parameters, (labels,))
        return (out * cotangent).sum()

    actual = torch.func.grad(loss)(dict(other.named_parameters()))
    expected = gradients(other, labels, cotangent)

    assert_close64(flat(actual.values()), flat(expected))


# Copies and changed weights


def copy_all(everything):
    return copy.deepcopy(everything)


def pickle_all(everything):
    return pickle.loads(pickle.dumps(everything))


def save_and_load_all(everything):
    stored = io.BytesIO()
    torch.save(everything, stored)
    stored.seek(0)

    return torch.load(stored, weights_only=False)


@pytest.mark.parametrize("copied", [copy_all, pickle_all, save_and_load_all])
@pytest.mark.parametrize("conf", CONFS)
@torch.no_grad()
def test_a_search_goes_on_from_copied_states(build, assert_close64, conf, copied):
    """Of two branches and a batch; neither side's steps show on the other."""
    model = build(**conf)
    left, right = draw_labels(13), draw_labels(13)
    right[0, :4] = left[0, :4]
    expected = [step_through(model, labels)[5:] for labels in (left, right)]
    sequences = [left[0].tolist(), right[0].tolist()]

    _, common = advance(model, sequences[0][:4], model.init_state())
    _, batch = model.batch_score([Hypothesis(0.0, s[:5], common) for s in sequences])
    states = [model.select_state(batch, i) for i in range(2)]

    twin, twin_states, twin_batch = copied((model, states, batch))

    def go_on(decoder, states):
        decoder.score_cache.clear()

        return [
            advance(decoder, sequence, state, start=5)[0]
            for sequence, state in zip(sequences, states, strict=True)
        ]

    # The same operations on the same numbers.
    there, here = go_on(twin, twin_states), go_on(model, states)
    assert_equal(there, here)

    # Again, each after the steps of the other, and with the other's decoder.
    selected = [twin.select_state(twin_batch, i) for i in range(2)]

    for outs in (there, go_on(twin, selected), go_on(model, twin_states)):
        for actual, wanted in zip(outs, expected, strict=True):
            assert_close64(actual, wanted)


def load(model, other):
    model.load_state_dict(other.state_dict())


def load_by_assignment(model, other):
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)


def load_by_assignment_twice(model, other):
    # The memory of what is replaced first may serve what comes second.
    for source in (model, other):
        weights = copy.deepcopy(source.state_dict())
        model.load_state_dict(weights, assign=True)
        del weights


def step_of_an_optimizer(model, other):
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        ours.grad = ours.detach() - theirs.detach()

    torch.optim.SGD(model.parameters(), lr=1.0).step()


@torch.no_grad()
def copy_in_place(model, other):
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        ours.copy_(theirs)


def copy_into_data(model, other):
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        ours.data.copy_(theirs.data)

    # torch counts no version for this, but ESPnet's search starts with a new cache.
    model.score_cache = {}


def set_data(model, other):
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        ours.data = theirs.data.clone()


def replace_parameters(model, other):
    for name, theirs in other.named_parameters():
        module, _, key = name.rpartition(".")
        setattr(
            model.get_submodule(module),
            key,
            torch.nn.Parameter(theirs.detach().clone()),
        )


def change_in_inference_mode(model, other):
    with torch.inference_mode():
        copy_in_place(model, other)


@pytest.mark.parametrize(
    "change",
    [
        load,
        load_by_assignment,
        load_by_assignment_twice,
        step_of_an_optimizer,
        copy_in_place,
        copy_into_data,
        set_data,
        replace_parameters,
        change_in_inference_mode,
    ],
)
@pytest.mark.parametrize("conf", CONFS)
def test_new_weights_take_effect_at_the_next_step(build, assert_close64, conf, change):
    """C4: for the label asked for again, for the next one, and from the start."""
    model, other = build(**conf), build(**conf)
    labels = draw_labels(9)
    sequence = labels[0].tolist()

    with torch.no_grad():
        _, state = advance(model, sequence[:5], model.init_state())
        before, _ = model.score(sequence[:6], state)

        change(model, other)

        expected, _ = fresh(other, **conf).score(sequence[:6], copy.deepcopy(state))
        later, _ = model.score(sequence[:6], state)

        assert_close64(later, expected)
        assert not torch.allclose(later, before)

        assert_close64(step_through(model, labels), other(labels)[0])
        assert_close64(model(labels), other(labels))


# Parts put in another's place


class LowRank(torch.nn.Module):
    """A linear layer with a low-rank addition, as adapters put around it."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.down = torch.nn.Linear(linear.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


def replace_linear(module, wrap):
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear):
            setattr(module, name, wrap(child))
        else:
            replace_linear(child, wrap)


@pytest.mark.parametrize("conf", CONFS)
@pytest.mark.parametrize("wrap", [LowRank, torch.nn.utils.parametrizations.weight_norm])
def test_replaced_linear_layers_act_in_the_full_pass_and_in_steps(
    build, redraw, assert_close64, conf, wrap
):
    model = build(**conf)
    labels = draw_labels(9)
    before = model(labels)[0]

    replace_linear(model, wrap)
    redraw(model.double())
    full = model(labels)[0]

    assert not torch.allclose(full, before)
    assert_close64(step_through(model, labels), full)
    assert_close64(step_through_in_batches(model, labels), full)


@pytest.mark.skipif(
    set(torch.backends.quantized.supported_engines) <= {"none"},
    reason="torch was built without quantised kernels",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("conf", CONFS)
def test_quantised_linear_layers_work_in_the_full_pass_and_in_steps(conf):
    """Each call quantises its inputs by their largest: equal for the first label only.

    A later step sees one row, the full pass all of them; both are near float32.
    """
    model = near_start(**conf)
    quantised = torch.ao.quantization.quantize_dynamic(
        model, {torch.nn.Linear}, dtype=torch.qint8
    )
    labels = draw_labels(20)

    with torch.no_grad():
        expected = model(labels)[0]
        full = quantised(labels)[0]
        first = quantised(labels[:, :1])[0]

    steps = step_through(quantised, labels)

    assert not any(isinstance(m, torch.nn.Linear) for m in quantised.modules())
    assert not torch.equal(full, expected)
    assert relative_error(full, expected) < 0.1
    assert relative_error(steps, expected) < 0.1
    assert relative_error(steps[:1], first) < 1e-2


# Training with more than one of something


@pytest.mark.parametrize("conf", CONFS)
def test_checkpointed_activations_give_the_same_gradients(build, conf):
    """The whole decoder, and block by block, with dropout."""
    rates = {f"{part}dropout_rate": 0.3 for part in ("", "att_", "ema_", "ffn_")}
    model = build(**conf, **rates, embed_dropout_rate=0.3).train()
    labels = draw_labels(9, batch=2)
    cotangent = torch.randn(2, 9, 6, dtype=torch.float64)

    def checkpoint(function, *args):
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

    def block_by_block(labels):
        # What a hook around each block sees: the block's own arguments.
        forwards = [block.forward for block, _ in model.mega_blocks]

        for (block, _), forward in zip(model.mega_blocks, forwards, strict=True):
            block.forward = lambda *args, run=forward: checkpoint(run, *args)

        try:
            return model(labels)
        finally:
            for block, _ in model.mega_blocks:
                del block.forward

    results = []

    for run in (model, lambda labels: checkpoint(model, labels), block_by_block):
        torch.manual_seed(1)
        out = run(labels)
        results.append(
            [out, *torch.autograd.grad(out, list(model.parameters()), cotangent)]
        )

    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


# Label sequences of each process in three steps, one of them the blank alone.
REPLICA_LENGTHS = [(1, 1), (7, 4), (4, 12)]


def train_a_replica(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    model, batches = torch.load(f"{folder}/start.pt", weights_only=False)
    replica = torch.nn.parallel.DistributedDataParallel(
        model, find_unused_parameters=False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    history = []

    for labels, cotangent in batches[rank]:
        optimizer.zero_grad(set_to_none=True)
        (replica(labels) * cotangent).sum().backward()
        history.append([p.grad for p in model.parameters()])
        optimizer.step()

    torch.save((history, model.state_dict()), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)
def test_two_processes_train_like_one_with_the_joint_batch(
    build, assert_close64, tmp_path
):
    """B11: no parameter is unused, whatever the lengths."""
    model = build().train()
    batches = [
        [
            (draw_labels(length), torch.randn(1, length, 6, dtype=torch.float64))
            for length in lengths
        ]
        for lengths in zip(*REPLICA_LENGTHS, strict=True)
    ]
    torch.save((model, batches), tmp_path / "start.pt")

    torch.multiprocessing.spawn(train_a_replica, (str(tmp_path),), nprocs=2)

    (ours, weights), (others, other_weights) = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    for step, pair in enumerate(zip(*batches, strict=True)):
        longest = max(REPLICA_LENGTHS[step])
        labels = torch.zeros(2, longest, dtype=torch.int64)
        cotangent = torch.zeros(2, longest, 6, dtype=torch.float64)

        for row, (sequence, weight) in enumerate(pair):
            labels[row, : sequence.size(1)] = sequence[0]
            cotangent[row, : sequence.size(1)] = weight[0]

        optimizer.zero_grad(set_to_none=True)
        (model(labels) * cotangent / 2).sum().backward()

        assert all(grad is not None for grad in ours[step] + others[step])
        assert_equal(ours[step], others[step])
        assert_close64(flat(ours[step]), flat([p.grad for p in model.parameters()]))

        optimizer.step()

    assert_equal(weights.values(), other_weights.values())


def espnet2_average(folder, models):
    """ESPnet2's average of checkpoints, as its trainer takes it at the end."""
    reporter = Reporter()

    for epoch, model in enumerate(models, start=1):
        torch.save(model.state_dict(), folder / f"{epoch}epoch.pth")

        reporter.set_epoch(epoch)
        with reporter.observe("valid") as sub:
            sub.register({"loss": float(epoch)})
            sub.next()

    average_nbest_models(folder, reporter, [("valid", "loss", "min")], len(models))

    return torch.load(folder / f"valid.loss.ave_{len(models)}best.pth")


def espnet3_average(folder, models):
    """ESPnet3's, of what Lightning saves, whose names begin with `model.`."""
    callbacks = pytest.importorskip(
        "espnet3.components.callbacks.default_callbacks", reason="ESPnet 202511"
    )
    paths = [folder / f"epoch{number}.ckpt" for number in range(len(models))]
    for path, model in zip(paths, models, strict=True):
        states = {f"model.{name}": value for name, value in model.state_dict().items()}
        torch.save({"state_dict": states}, path)
    best = SimpleNamespace(best_k_models=dict.fromkeys(paths), monitor="valid/loss")

    callbacks.AverageCheckpointsCallback(folder, [best]).on_validation_end(
        SimpleNamespace(is_global_zero=True), models[0]
    )

    return torch.load(folder / f"valid.loss.ave_{len(models)}best.pth")


averages = pytest.mark.parametrize("average", [espnet2_average, espnet3_average])


@averages
@pytest.mark.parametrize("bias_type", ["rotary", "simple"])
def test_average_of_one_checkpoint_with_itself_is_that_checkpoint(
    build, tmp_path, bias_type, average
):
    """D4."""
    model = build(torch.float32, rel_pos_bias_type=bias_type)
    averaged = average(tmp_path, [model, model])

    assert list(averaged) == list(model.state_dict())
    assert_equal(averaged.values(), model.state_dict().values())


@averages
@pytest.mark.parametrize("bias_type", ["rotary", "simple"])
def test_average_of_checkpoints_is_the_decoder_of_the_average_weights(
    build, assert_close64, tmp_path, bias_type, average
):
    """D4: nothing but weights is averaged, and what follows from them is computed."""
    models = [build(rel_pos_bias_type=bias_type) for _ in range(3)]
    averaged = average(tmp_path, models)
    labels = draw_labels(12)

    assert list(averaged) == list(models[0].state_dict())
    assert all(value.isfinite().all() for value in averaged.values())

    decoder = build(rel_pos_bias_type=bias_type)
    step_through(decoder, labels)
    decoder.load_state_dict(averaged)

    mean = {
        name: sum(dict(m.named_parameters())[name].detach() for m in models) / 3
        for name, _ in decoder.named_parameters()
    }
    expected = mega_decoder(labels[0].tolist(), mean, 2, bias_type)

    assert_close64(decoder(labels)[0], expected)
    assert_close64(step_through(decoder, labels), expected)

    if tables(decoder):
        built = tables(MEGABiasDecoder(VOCAB, **SMALL).double())
        assert_equal(tables(decoder).values(), built.values())


# CUDA


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("conf", CONFS)
def test_cuda_autocast_trains_and_searches_like_float32(conf, dtype):
    """A5."""
    model = near_start(**conf).cuda()

    for length in LENGTHS:
        labels = draw_labels(length, batch=2)
        expected = copy.deepcopy(model).cpu()(labels)

        with torch.autocast("cuda", dtype):
            out = model(labels.cuda())

        assert relative_error(out.cpu(), expected) < ROUNDING[dtype]

        model.zero_grad()
        out.float().square().sum().backward()

        for parameter in model.parameters():
            assert parameter.grad.dtype == torch.float32
            assert parameter.grad.isfinite().all()

    with torch.autocast("cuda", dtype):
        steps = step_through(model, labels[:, :33])
        batched = step_through_in_batches(model, labels[:, :33])

    for outs in (steps, batched):
        assert relative_error(outs.cpu(), expected[0, :33]) < ROUNDING[dtype]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("conf", CONFS)
def test_moves_to_a_gpu_and_back_change_nothing(build, assert_close64, conf):
    """B2, D2: also between two steps of the original, and beside a second replica."""
    model = build(**conf)
    labels = draw_labels(33)
    expected = model(labels)

    moved = copy.deepcopy(model).cuda()

    assert all(t.is_cuda for t in [*moved.parameters(), *moved.buffers()])
    assert_close64(moved(labels.cuda()).cpu(), expected)
    assert_close64(step_through(moved, labels).cpu(), expected[0])
    assert_close64(step_through_in_batches(moved, labels).cpu(), expected[0])

    assert_equal([model(labels)], [expected])
    assert_equal([moved.cpu()(labels)], [expected])
