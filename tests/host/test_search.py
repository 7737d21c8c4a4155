"""ESPnet's beam searches with the decoder."""

import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from espnet2.asr_transducer.joint_network import JointNetwork
from espnet2.lm.seq_rnn_lm import SequentialRNNLM
from reference.rnnt_loss import alignments, transducer_loss
from searching import (
    ENCODER_SIZE,
    SEARCHES,
    VOCAB,
    labels_and_scores,
    make_search,
    search,
    small_decoder,
    small_model,
)

pytestmark = [
    pytest.mark.host,
    # Of NumPy, where ESPnet adds up scores that are tensors, as they are with an LM.
    pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning"),
]

# Remade by: PYTHONPATH=tests python tests/host/test_search.py
GOLDEN_VOCAB = 8
GOLDEN = Path(__file__).with_name("golden_nbest.json")
GOLDEN_CONFS = {
    "full": {},
    "chunk": {"chunk_size": 3},
    "window": {"max_positions": 4},
    "simple": {"rel_pos_bias_type": "simple", "truncation_length": 2},
}

# A vocabulary so large that a beam holds each sequence of some labels of two kinds;
# the others are out of the question.
WIDE, LIVE = 64, (1, 2)
LM_WEIGHT = 0.5


class DoubleLM(SequentialRNNLM):
    """ESPnet's RNN LM in float64; ESPnet's own zero state is always float32."""

    def __init__(self, vocab):
        super().__init__(vocab, unit=6, nlayers=2)
        self.double()

    def zero_state(self):
        return tuple(state.double() for state in super().zero_state())


@pytest.fixture
def build(redraw):
    return lambda *args, **conf: small_model(redraw, *args, **conf)


@pytest.fixture
def build_lm(redraw):
    """Build what a search takes for a language model, or for none.

    In a batch with longer ones, ESPnet's searches tsd and alsd say that the last label
    of an empty hypothesis is 0 and not sos (`create_lm_batch_inputs` pads on the right
    of sos), whatever the decoder. Here the two have one embedding.
    """

    def make(vocab, with_lm):
        if not with_lm:
            return {}

        lm = redraw(DoubleLM(vocab)).eval()

        with torch.no_grad():
            lm.encoder.weight[vocab - 1] = lm.encoder.weight[0]

        return {"lm": lm, "lm_weight": LM_WEIGHT}

    return make


@pytest.fixture
def build_wide(build):
    def make(vocab, **conf):
        decoder, joint = build(vocab=vocab, **conf)

        with torch.no_grad():
            # Blanks win soon, but not at once.
            joint.lin_out.weight.mul_(0.5)
            joint.lin_out.bias[0] = 1.0
            joint.lin_out.bias[1 + len(LIVE) :] -= 100.0

        return decoder, joint

    return make


@torch.no_grad()
def full_pass(decoder, joint, frames, labels):
    """Logits of one item. (T, U + 1, V)"""
    out = decoder(torch.tensor([[0, *labels]]))

    # What follows means nothing where the decoder does not tell labels apart.
    assert not labels or (out[0, 0] - out[0, -1]).abs().max() > 1e-3

    return joint(frames[None, :, None], out.unsqueeze(1))[0]


@torch.no_grad()
def alignment_scores(logits, labels, per_frame=None):
    """Log-probability of each alignment with at most `per_frame` labels in a frame."""
    logp = logits.log_softmax(-1)
    scores = []

    for path in alignments(len(logits), list(labels), 0):
        counts = Counter(t for t, _, symbol in path if symbol != 0)

        if per_frame is None or all(n <= per_frame for n in counts.values()):
            scores.append(sum(logp[step] for step in path))

    return torch.stack(scores)


@torch.no_grad()
def lm_score(labels, lm=None, lm_weight=0.0):
    """What a language model adds to the score of each alignment."""
    if lm is None or not labels:
        return 0.0

    logits, _ = lm(torch.tensor([[lm.encoder.num_embeddings - 1, *labels[:-1]]]), None)
    picked = logits[0].log_softmax(-1)[range(len(labels)), list(labels)]

    return lm_weight * picked.sum().item()


def live_sequences(longest):
    for count in range(longest + 1):
        yield from itertools.product(LIVE, repeat=count)


@pytest.mark.parametrize("search_type", SEARCHES)
@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("frames", [1, 2, 7, 40])
@pytest.mark.parametrize("with_lm", [False, True])
@pytest.mark.parametrize("conf", [{}, {"chunk_size": 3}, {"max_positions": 4}])
def test_scores_are_finite_and_no_sequence_comes_twice(
    build, build_lm, search_type, beam_size, frames, with_lm, conf
):
    """D3. ESPnet's RNN LM serves each search; others it refuses (no `rnn_type`)."""
    decoder, joint = build(**conf)

    nbest = search(
        decoder,
        joint,
        torch.randn(frames, ENCODER_SIZE).double(),
        search_type,
        beam_size,
        **build_lm(VOCAB, with_lm),
    )

    sequences, scores = labels_and_scores(nbest)
    distinct = {tuple(sequence) for sequence in sequences}

    assert 0 < len(sequences) <= beam_size
    # ESPnet's default search keeps a sequence once for each alignment it followed.
    assert search_type == "default" or len(distinct) == len(sequences)
    assert all(sequence[0] == 0 for sequence in sequences)
    assert all(0 < label < VOCAB for sequence in sequences for label in sequence[1:])
    assert frames < 40 or beam_size == 1 or max(map(len, sequences)) > 1
    assert scores.isfinite().all()
    assert (scores < 0).all()
    assert scores.equal(scores.sort(descending=True).values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("search_type", SEARCHES)
@pytest.mark.parametrize("beam_size", [1, 4])
def test_scores_of_one_frame_are_minus_the_loss(
    build, assert_close64, assert_close_espnet, dtype, search_type, beam_size
):
    """D3. In one frame, each sequence has one alignment: no search can lose any."""
    decoder, joint = build(dtype)

    with torch.no_grad():
        joint.lin_out.weight.mul_(0.5)
        joint.lin_out.bias[0] = 1.0

    frames = torch.randn(1, ENCODER_SIZE, dtype=dtype)
    sequences, scores = labels_and_scores(
        search(decoder, joint, frames, search_type, beam_size)
    )

    # ESPnet's alsd ends after as many labels as there are frames but one.
    assert search_type == "alsd" or beam_size == 1 or max(map(len, sequences)) > 1

    losses = [
        transducer_loss(
            full_pass(decoder, joint, frames, sequence[1:]), sequence[1:], 0
        )
        for sequence in sequences
    ]
    close = assert_close64 if dtype == torch.float64 else assert_close_espnet
    close(scores, -torch.stack(losses).double())


@pytest.mark.parametrize("search_type", SEARCHES)
@pytest.mark.parametrize("conf", [{}, {"chunk_size": 3}])
def test_scores_are_sums_over_alignments_and_no_more_than_all(build, search_type, conf):
    """D3. The default search never adds up: it scores one alignment each."""
    decoder, joint = build(**conf)
    frames = torch.randn(7, ENCODER_SIZE).double()
    nbest = search(decoder, joint, frames, search_type, 4)

    for sequence, score in zip(*labels_and_scores(nbest), strict=True):
        each = alignment_scores(
            full_pass(decoder, joint, frames, sequence[1:]), sequence[1:]
        )
        if search_type == "default":
            assert (each - score).abs().min() < 1e-9
        else:
            assert each.min() - 1e-9 < score < each.logsumexp(0) + 1e-9


@pytest.mark.parametrize(
    ("search_type", "frames", "settings", "per_frame", "longest"),
    [
        ("tsd", 3, {"max_sym_exp": 2}, 1, 3),
        ("tsd", 2, {"max_sym_exp": 3}, 2, 4),
        ("maes", 3, {"nstep": 1}, 1, 3),
        ("maes", 2, {"nstep": 2}, 2, 4),
        # Up to as many labels as there are frames but one, in any frame.
        ("alsd", 1, {}, None, 0),
        ("alsd", 3, {}, None, 2),
        ("alsd", 3, {"u_max": 1}, None, 1),
    ],
)
@pytest.mark.parametrize("with_lm", [False, True])
@pytest.mark.parametrize(
    "conf", [{}, {"chunk_size": 2}, {"truncation_length": 2}], ids=str
)
def test_wide_search_sums_all_alignments_of_every_sequence(
    build_wide,
    build_lm,
    assert_close64,
    search_type,
    frames,
    settings,
    per_frame,
    longest,
    with_lm,
    conf,
):
    """D3. With nothing pruned, these searches are exact.

    That is, over the alignments that they follow at all: tsd those with fewer than
    `max_sym_exp` labels in each frame, mAES those with at most `nstep`, alsd all.
    """
    decoder, joint = build_wide(WIDE, **conf)
    lm = build_lm(WIDE, with_lm)
    frames = torch.randn(frames, ENCODER_SIZE).double()

    if search_type == "maes":
        # All that is not out of the question.
        settings = {**settings, "expansion_beta": 1, "expansion_gamma": 60.0}

    sequences, scores = labels_and_scores(
        search(decoder, joint, frames, search_type, WIDE - 1, **settings, **lm)
    )

    expected = {
        labels: alignment_scores(
            full_pass(decoder, joint, frames, labels), labels, per_frame
        ).logsumexp(0)
        + lm_score(labels, **lm)
        for labels in live_sequences(longest)
    }
    ranked = sorted(expected, key=expected.get, reverse=True)

    assert [tuple(sequence[1:]) for sequence in sequences[: len(ranked)]] == ranked
    assert_close64(
        scores[: len(ranked)], torch.stack([expected[labels] for labels in ranked])
    )
    # What is left over, if anything, says what is out of the question.
    assert (scores[len(ranked) :] < scores[len(ranked) - 1] - 30.0).all()


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("with_lm", [False, True])
@pytest.mark.parametrize("conf", [{}, {"chunk_size": 2}], ids=str)
def test_wide_default_search_finds_the_most_likely_alignments(
    build_wide, build_lm, assert_close64, frames, with_lm, conf
):
    """D3. The default search is exact in another sense: it ranks single alignments.

    In one frame, a sequence has one only, so that its score is exact.
    """
    vocab, count = 24, 5
    decoder, joint = build_wide(vocab, **conf)
    lm = build_lm(vocab, with_lm)
    frames = torch.randn(frames, ENCODER_SIZE).double()

    sequences, scores = labels_and_scores(
        search(decoder, joint, frames, "default", vocab - 1, **lm)
    )

    expected = sorted(
        (
            (score.item(), labels)
            for labels in live_sequences(6)
            for score in alignment_scores(
                full_pass(decoder, joint, frames, labels), labels
            )
            + lm_score(labels, **lm)
        ),
        reverse=True,
    )[:count]

    assert max(len(labels) for _, labels in expected) < 6
    assert [tuple(sequence[1:]) for sequence in sequences[:count]] == [
        labels for _, labels in expected
    ]
    assert_close64(
        scores[:count],
        torch.tensor([score for score, _ in expected], dtype=torch.float64),
    )


@pytest.mark.parametrize("search_type", ["default", "tsd", "maes"])
@pytest.mark.parametrize("conf", [{}, {"chunk_size": 3}, {"max_positions": 4}], ids=str)
@pytest.mark.parametrize("with_lm", [False, True])
def test_search_in_parts_equals_the_search_over_the_whole(
    build, build_lm, search_type, conf, with_lm
):
    decoder, joint = build(**conf)
    lm = build_lm(VOCAB, with_lm)
    frames = torch.randn(24, ENCODER_SIZE).double()
    whole = search(decoder, joint, frames, search_type, 3, **lm)

    streaming = make_search(decoder, joint, search_type, 3, streaming=True, **lm)

    with torch.no_grad():
        for start, end in itertools.pairwise([0, 5, 6, 16, 24]):
            parts = streaming(frames[start:end], is_final=end == 24)

    assert labels_and_scores(parts)[0] == labels_and_scores(whole)[0]
    assert torch.equal(labels_and_scores(parts)[1], labels_and_scores(whole)[1])


def draw_uniform(model, generator):
    """Redraw parameters at std 1, with numbers that no version of torch changes."""
    width = math.sqrt(12.0)

    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            values = [
                width * (generator.random() - 0.5) for _ in range(parameter.numel())
            ]
            parameter.copy_(
                torch.tensor(values, dtype=torch.float64).view_as(parameter)
            )

    return model.double().eval()


@torch.no_grad()
def golden_nbest():
    """N-best lists of all searches, with models that are the same everywhere."""
    found = {}

    for name, conf in GOLDEN_CONFS.items():
        # Python promises that these numbers stay as they are.
        generator = random.Random(0)
        frames = torch.nn.Linear(ENCODER_SIZE, 12, dtype=torch.float64)
        joint = JointNetwork(GOLDEN_VOCAB, ENCODER_SIZE, 8, 8).double()
        decoder = small_decoder(GOLDEN_VOCAB, **conf).double()

        for model in (frames, joint, decoder):
            draw_uniform(model, generator)

        # Let frames and labels decide.
        for bias in (
            joint.lin_enc.bias,
            joint.lin_dec.bias,
            joint.lin_out.bias,
            decoder.final_norm.bias,
            decoder.embed.weight[decoder.pad_idx],
        ):
            bias.zero_()

        for search_type in SEARCHES:
            # Else, alsd says labels until its end, and reaches no last frame.
            joint.lin_out.bias[0] = 7.0 if search_type == "alsd" else 3.5

            nbest = search(decoder, joint, 2.0 * frames.weight, search_type, 4)
            found[f"{name} {search_type}"] = [
                {"labels": sequence, "score": score.item()}
                for sequence, score in zip(*labels_and_scores(nbest), strict=True)
            ]

    return found


def test_nbest_is_the_stored_one_on_every_release(assert_close64):
    """D3. With each ESPnet and torch: the weights come from Python's generator."""
    stored = json.loads(GOLDEN.read_text())
    found = golden_nbest()

    assert found.keys() == stored.keys()

    for key, nbest in found.items():
        assert [hyp["labels"] for hyp in nbest] == [
            hyp["labels"] for hyp in stored[key]
        ], key
        assert_close64(
            *(
                torch.tensor([hyp["score"] for hyp in hyps], dtype=torch.float64)
                for hyps in (nbest, stored[key])
            )
        )


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden_nbest(), indent=1) + "\n")
