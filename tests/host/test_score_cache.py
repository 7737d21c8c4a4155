"""The caches of a search: no result depends on them, and both are bounded.

The score cache keeps the outputs and states of the latest steps, the key/value caches
what the labels of many hypotheses are attended to by.
"""

import copy
import functools
import json
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from espnet2.asr_transducer.beam_search_transducer import Hypothesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from searching import (
    ENCODER_SIZE,
    SEARCHES,
    VOCAB,
    OneLabelAFrame,
    frame_numbers,
    labels_and_scores,
    make_search,
    search,
    small_decoder,
    small_model,
)

from espnet_mega_bias import decoder as decoder_module
from espnet_mega_bias import key_value_cache

pytestmark = pytest.mark.host

CONFS = [
    {"max_positions": None},
    {"chunk_size": 3},
    {"max_positions": 4},
    {"truncation_length": 2, "max_positions": None},
    {"rel_pos_bias_type": "simple"},
]


@pytest.fixture
def build(redraw):
    def make(**conf):
        return redraw(small_decoder(**conf)).double().eval().requires_grad_(False)

    return make


@torch.enable_grad()
def from_the_start(decoder, sequence):
    """Output and state after the last label, by a decoder that has seen no other.

    In autograd's mode, no two steps share anything: each copies keys and values.
    """
    decoder, state = copy.deepcopy(decoder), decoder.init_state()

    for end in range(1, len(sequence) + 1):
        out, state = decoder.score(sequence[:end], state)

    return out[0], state


@pytest.fixture
def free_rows(monkeypatch):
    return functools.partial(monkeypatch.setattr, key_value_cache, "_FREE_ROWS")


@pytest.fixture
def score_cache_size(monkeypatch):
    return functools.partial(monkeypatch.setattr, decoder_module, "SCORE_CACHE_SIZE")


@pytest.mark.parametrize("search_type", SEARCHES)
@pytest.mark.parametrize("conf", CONFS, ids=str)
def test_nbest_depends_on_no_cache(
    redraw, assert_close64, free_rows, score_cache_size, search_type, conf
):
    decoder, joint = small_model(redraw, **conf)

    if search_type == "default":
        joint, frames = OneLabelAFrame(decoder), frame_numbers(0, 25)
    else:
        frames = 2.0 * torch.randn(25, ENCODER_SIZE).double()

        with torch.no_grad():
            joint.lin_out.bias[0] = 1.0  # else, there are few labels

    expected = labels_and_scores(search(decoder, joint, frames, search_type, 4))
    assert max(map(len, expected[0])) > 5

    for rows, size in ((0, 256), (500, 256), (32, 1), (32, 10000), (0, 1)):
        free_rows(rows)
        score_cache_size(size)
        sequences, scores = labels_and_scores(
            search(decoder, joint, frames, search_type, 4)
        )

        assert sequences == expected[0]
        assert_close64(scores, expected[1])


# Where a hypothesis goes on from, counted back from the newest, and its next label.
BRANCH = st.tuples(st.integers(0, 30), st.integers(0, VOCAB - 1))
ACTIONS = st.one_of(
    st.tuples(st.just("score"), BRANCH),
    st.tuples(st.just("batch_score"), st.lists(BRANCH, min_size=1, max_size=6)),
    st.tuples(st.just("drop"), st.integers(0, 30)),
    st.tuples(st.sampled_from(["copy", "pickle"]), st.integers(0, 30)),
    st.tuples(st.just("new search"), st.none()),
)
# What, by which of two decoders with the same weights, and in which mode.
STEPS = st.tuples(
    ACTIONS,
    st.integers(0, 1),
    st.sampled_from([torch.no_grad, torch.inference_mode, torch.enable_grad]),
)


@settings(
    deadline=None,
    derandomize=True,
    max_examples=40,
    # The fixtures are functions that keep nothing.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    steps=st.lists(STEPS, min_size=10, max_size=40),
    rows=st.sampled_from([0, 1, 5]),
    size=st.sampled_from([1, 4, 256]),
)
@pytest.mark.parametrize("conf", CONFS, ids=str)
def test_any_tree_of_hypotheses_gives_the_full_pass_at_every_node(
    build, assert_close64, free_rows, score_cache_size, conf, steps, rows, size
):
    """C2. Fork, drop, go back, score alone or beside others, copy and pickle."""
    free_rows(rows)
    score_cache_size(size)
    torch.manual_seed(0)

    decoders = [build(**conf)]
    decoders.append(copy.deepcopy(decoders[0]))

    @functools.cache
    def expected(labels):
        # The full pass ends at `max_positions`; decoding goes on.
        if len(labels) <= (conf.get("max_positions") or len(labels)):
            return decoders[0](torch.tensor([labels]))[0, -1]

        return from_the_start(decoders[0], list(labels))[0]

    nodes = [([], decoders[0].init_state())]

    def node_at(back):
        return -1 - back % len(nodes)

    def branch(back, label):
        sequence, state = nodes[node_at(back)]

        return [*sequence, label if sequence else 0], state

    def keep(sequence, out, state):
        assert_close64(out, expected(tuple(sequence)))
        nodes.append((sequence, state))

    for (action, what), which, mode in steps:
        model = decoders[which]

        with mode():
            if action == "score":
                sequence, state = branch(*what)
                out, state = model.score(sequence, state)
                keep(sequence, out[0], state)
            elif action == "batch_score":
                branches = [branch(*each) for each in what]
                outs, states = model.batch_score(
                    [Hypothesis(0.0, *each) for each in branches]
                )
                states = model.create_batch_states(states)

                for i, (sequence, _) in enumerate(branches):
                    keep(sequence, outs[i], model.select_state(states, i))
            elif action == "drop" and len(nodes) > 1:
                del nodes[node_at(what)]
            elif action == "copy":
                nodes[node_at(what)] = copy.deepcopy(nodes[node_at(what)])
            elif action == "pickle":
                nodes[node_at(what)] = pickle.loads(pickle.dumps(nodes[node_at(what)]))
            elif action == "new search":
                model.score_cache = {}


@pytest.mark.parametrize(
    ("conf", "rows"), [(CONFS[0], 0), (CONFS[0], 32), (CONFS[1], 0), (CONFS[2], 0)]
)
@torch.no_grad()
def test_early_state_goes_on_the_same_after_thousands_of_steps(
    build, assert_close64, free_rows, conf, rows
):
    """The keys and values of the state have moved on, more than once, since then."""
    free_rows(rows)
    decoder = build(**conf)
    start = decoder.init_state()
    early, sequence, state = [([0], start)], [0], start

    for label in (1, 4, 0, 2, 2, 3, 1):
        _, state = decoder.score(sequence, state)
        sequence = [*sequence, label]
        early.append((sequence, state))

    expected = [from_the_start(decoder, sequence)[0] for sequence, _ in early]

    for step in range(2000):
        # A second one takes rows too, and is dropped.
        _, states = decoder.batch_score(
            [
                Hypothesis(0.0, sequence, state),
                Hypothesis(0.0, [*sequence[:-1], 0], state),
            ]
        )
        state = decoder.select_state(states, 0)
        sequence = [*sequence, 1 + (step * step) % 4]

    alone = [decoder.score(*each)[0][0] for each in early]
    assert_close64(torch.stack(alone), torch.stack(expected))

    # Among themselves, the latest first and last, and then all of them once more.
    out, after = from_the_start(decoder, sequence)
    late = Hypothesis(0.0, sequence, state)
    hyps = [late, *(Hypothesis(0.0, *each) for each in early[::-1]), late]
    together, states = decoder.batch_score(hyps)
    assert_close64(together, torch.stack([out, *expected[::-1], out]))

    again, _ = decoder.batch_score(
        [
            Hypothesis(0.0, [*hyp.yseq, 3], state)
            for hyp, state in zip(hyps, states, strict=True)
        ]
    )
    out = decoder.score([*sequence, 3], after)[0][0]
    expected = [from_the_start(decoder, [*hyp.yseq, 3])[0] for hyp in hyps[1:-1]]
    assert_close64(again, torch.stack([out, *expected, out]))


@pytest.mark.parametrize("conf", CONFS[:3], ids=str)
@torch.no_grad()
def test_states_of_several_searches_and_copies_of_them_mix_in_one_batch(
    build, assert_close64, conf
):
    """C2. In any order, twice, and by a decoder that has not made them."""
    decoder = build(**conf)
    pool = []

    for labels in ([1], [2, 0, 3, 4, 4, 1, 2], [], [3, 3, 3, 3, 3], [4] * 40):
        _, state = from_the_start(decoder, [0, *labels])
        sequence = [0, *labels, 2]
        pool += [
            (sequence, state),
            (sequence, copy.deepcopy(state)),
            (sequence, pickle.loads(pickle.dumps(state))),
        ]

    expected = torch.stack(
        [from_the_start(decoder, sequence)[0] for sequence, _ in pool]
    )

    for order in (range(15), range(14, -1, -1), [7, 0, 14, 7, 3, 11, 4], [2]):
        out, _ = decoder.batch_score([Hypothesis(0.0, *pool[i]) for i in order])
        assert_close64(out, expected[list(order)])

    assert expected[::3].std(0).max() > 0.05


@pytest.mark.parametrize(
    ("conf", "per_label"), [*zip(CONFS[:3], [32, 0, 0], strict=True)]
)
@torch.no_grad()
def test_rows_that_live_are_bounded_by_what_is_attended_to(
    build, monkeypatch, conf, per_label
):
    """By a constant where the attention is, else by the labels of one hypothesis."""
    living = weakref.WeakSet()
    construct = key_value_cache.KeyValueCache.__init__

    def note(self, *args):
        construct(self, *args)
        living.add(self)

    monkeypatch.setattr(key_value_cache.KeyValueCache, "__init__", note)

    decoder = build(**conf)
    search = make_search(decoder, OneLabelAFrame(decoder), "default", 4, streaming=True)
    held = []

    for start in range(0, 400, 100):
        hyps = search(frame_numbers(start, start + 100), is_final=False)
        assert min(len(hyp.yseq) for hyp in hyps) == start + 101

        held.append(sum(cache.buffer.size(1) for cache in living))

    if per_label:
        assert all(rows < per_label * 100 * n for n, rows in enumerate(held, start=1))
    else:
        assert max(held) < 10_000
        assert held[-1] < 1.5 * held[1]


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads memory from /proc"
)
def test_5000_labels_take_little_memory_and_are_right(assert_close64, tmp_path):
    """In a new process, where memory that others have used does not hide any."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("long_stream.py"), "5000"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])

    # A score cache without a bound takes over 350, and more with each wider beam.
    assert found["mebibytes"] < 150
    assert len(found["labels"]) == 5001
    assert set(found["labels"][1:]) == set(range(1, 20))

    # Each label is a row in the caches: one that was lost or moved wrongly shows here.
    assert_close64(
        *(torch.tensor(found[key], dtype=torch.float64) for key in ("out", "full_pass"))
    )

    assert found["nbest"] == found["nbest_with_a_large_cache"]
    assert {len(sequence) for sequence in found["nbest"]} == {301}


@torch.no_grad()
def keep_busy(decoder, sequence, state, steps):
    """Take many steps from a state on, with eight hypotheses beside each other."""
    for step in range(steps):
        _, states = decoder.batch_score(
            [Hypothesis(0.0, [*sequence[:-1], n % VOCAB], state) for n in range(8)]
        )
        state = states[step * step % 5]
        sequence = [*sequence[:-1], step * step % 5, 0]


@pytest.mark.parametrize("conf", CONFS[:3], ids=str)
def test_copies_of_an_early_state_hold_nothing_of_the_thousands_of_steps_after_it(
    build, assert_close64, conf
):
    decoder = build(**conf)
    sequence, early = [0, 1], from_the_start(decoder, [0])[1]
    keep_busy(decoder, sequence, early, 1)
    size = len(pickle.dumps(early))

    keep_busy(decoder, sequence, early, 2000)

    assert len(pickle.dumps(early)) < 2 * size

    for other in (copy.deepcopy(early), pickle.loads(pickle.dumps(early))):
        with torch.no_grad():
            out, _ = decoder.score(sequence, other)

        assert_close64(out[0], from_the_start(decoder, sequence)[0])


@torch.no_grad()
def test_early_state_that_attends_to_padding_goes_on_after_thousands_of_steps(
    build, assert_close64, free_rows
):
    """With `max_positions` labels in a row that are padding, no label is left."""
    free_rows(0)
    decoder = build(max_positions=4)
    sequence = [0, 1, 0, 0, 0, 0, 1]
    _, early = from_the_start(decoder, sequence[:-1])
    keep_busy(decoder, sequence, early, 3000)

    out, _ = decoder.score(sequence, early)
    assert_close64(out[0], from_the_start(decoder, sequence)[0])
