"""ESPnet's beam searches with the decoder."""

import itertools

import pytest
import torch
from espnet2.asr_transducer.beam_search_transducer import BeamSearchTransducer
from espnet2.asr_transducer.joint_network import JointNetwork
from reference.rnnt_loss import transducer_loss

from espnet_mega_bias import MEGABiasDecoder

pytestmark = pytest.mark.host

VOCAB = 5
SEARCHES = {
    "default": {},
    "tsd": {"max_sym_exp": 3},
    "alsd": {"u_max": 10},
    "maes": {"nstep": 2, "expansion_beta": 1},
}


@pytest.fixture
def build(redraw):
    def make(dtype=torch.float64, **conf):
        decoder = MEGABiasDecoder(
            VOCAB,
            block_size=8,
            linear_size=8,
            qk_size=4,
            v_size=6,
            num_heads=2,
            num_blocks=2,
            rel_pos_bias_type="rotary",
            **conf,
        )
        joint = redraw(JointNetwork(VOCAB, 6, 8, joint_space_size=8))

        # The default search leaves a frame only once blanks win: a random network
        # that says labels without end would keep it there.
        with torch.no_grad():
            joint.lin_out.bias[0] = 4.0

        return redraw(decoder).to(dtype).eval(), joint.to(dtype).eval()

    return make


def search(decoder, joint, frames, search_type, beam_size, **more):
    with torch.no_grad():
        return BeamSearchTransducer(
            decoder,
            joint,
            beam_size,
            search_type=search_type,
            nbest=beam_size,
            **{**SEARCHES[search_type], **more},
        )(frames)


@pytest.mark.parametrize("search_type", SEARCHES)
@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("frames", [1, 2, 7, 40])
@pytest.mark.parametrize("conf", [{}, {"chunk_size": 3}, {"max_positions": 4}])
def test_scores_are_finite_and_recombined(build, search_type, beam_size, frames, conf):
    decoder, joint = build(**conf)

    nbest = search(
        decoder, joint, torch.randn(frames, 6).double(), search_type, beam_size
    )

    sequences = [tuple(hyp.yseq) for hyp in nbest]
    scores = torch.tensor([float(hyp.score) for hyp in nbest])

    assert 0 < len(sequences) <= beam_size
    # ESPnet's default search keeps a sequence once for each alignment it followed.
    assert search_type == "default" or len(set(sequences)) == len(sequences)
    assert scores.isfinite().all()
    assert (scores <= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("search_type", SEARCHES)
def test_score_is_that_of_the_full_pass(build, dtype, search_type):
    """A hypothesis that one alignment leads to scores what that alignment does.

    With beam 1, none of the searches adds up alignments; the sum over all of them,
    from the full pass, bounds the score, and one frame leaves little else.
    """
    decoder, joint = build(dtype)
    frame = torch.randn(1, 6, dtype=dtype)

    (best,) = search(decoder, joint, frame, search_type, 1)

    labels = torch.tensor([best.yseq])
    logits = joint(frame[None, :, None], decoder(labels).unsqueeze(1))[0]
    expected = -transducer_loss(logits, best.yseq[1:], 0)

    # mAES adds the same hypothesis' scores of several expansion steps.
    torch.testing.assert_close(
        torch.tensor(float(best.score)).double(),
        expected.double().detach(),
        rtol=1e-4,
        atol=1e-4,
    )


def test_wide_time_synchronous_search_finds_the_most_likely_sequence(build):
    decoder, joint = build()
    frames = torch.randn(2, 6).double()

    # At most two labels per frame: all sequences of up to four.
    best = search(decoder, joint, frames, "tsd", VOCAB - 1, max_sym_exp=3)[0]

    likely = {}

    for count in range(5):
        for labels in itertools.product(range(1, VOCAB), repeat=count):
            out = decoder(torch.tensor([[0, *labels]]))
            logits = joint(frames[None, :, None], out.unsqueeze(1))[0]
            likely[labels] = -transducer_loss(logits, list(labels), 0).item()

    found = tuple(best.yseq[1:])
    assert found == max(likely, key=likely.get)
    assert float(best.score) <= likely[found] + 1e-9


@pytest.mark.parametrize("search_type", ["default", "tsd", "maes"])
def test_search_in_parts_equals_the_search_over_the_whole(build, search_type):
    decoder, joint = build()
    frames = torch.randn(12, 6).double()
    whole = search(decoder, joint, frames, search_type, 3)

    with torch.no_grad():
        streaming = BeamSearchTransducer(
            decoder,
            joint,
            3,
            search_type=search_type,
            nbest=3,
            streaming=True,
            **SEARCHES[search_type],
        )
        for start in (0, 5, 8):
            parts = streaming(
                frames[start : {0: 5, 5: 8, 8: 12}[start]], is_final=start == 8
            )

    assert [hyp.yseq for hyp in parts] == [hyp.yseq for hyp in whole]
    assert [float(h.score) for h in parts] == [float(h.score) for h in whole]
