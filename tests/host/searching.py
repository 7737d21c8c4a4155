"""Small models, and ESPnet's searches on them."""

import torch
from espnet2.asr_transducer.beam_search_transducer import BeamSearchTransducer
from espnet2.asr_transducer.joint_network import JointNetwork

from espnet_mega_bias import MEGABiasDecoder

VOCAB = 5
ENCODER_SIZE = 6

SEARCHES = {
    "default": {},
    "tsd": {"max_sym_exp": 3},
    "alsd": {"u_max": 10},
    "maes": {"nstep": 2, "expansion_beta": 1},
}


SMALL = {
    "block_size": 8,
    "linear_size": 8,
    "qk_size": 4,
    "v_size": 6,
    "num_heads": 2,
    "num_blocks": 2,
    "rel_pos_bias_type": "rotary",
}


def small_decoder(vocab=VOCAB, **conf):
    return MEGABiasDecoder(vocab, **{**SMALL, **conf})


def small_model(redraw, dtype=torch.float64, vocab=VOCAB, **conf):
    """Decoder and joint network, for encoder outputs of ENCODER_SIZE."""
    decoder = redraw(small_decoder(vocab, **conf))
    joint = redraw(JointNetwork(vocab, ENCODER_SIZE, 8, joint_space_size=8))

    # The default search leaves a frame only once blanks win: a random network that
    # says labels without end would keep it there.
    with torch.no_grad():
        joint.lin_out.bias[0] = 4.0

    return decoder.to(dtype).eval(), joint.to(dtype).eval()


def make_search(decoder, joint, search_type, beam_size, **more):
    return BeamSearchTransducer(
        decoder,
        joint,
        beam_size,
        search_type=search_type,
        nbest=beam_size,
        **{**SEARCHES[search_type], **more},
    )


@torch.no_grad()
def search(decoder, joint, frames, search_type, beam_size, **more):
    return make_search(decoder, joint, search_type, beam_size, **more)(frames)


def labels_and_scores(nbest):
    """Labels of each hypothesis, and the scores. (len(nbest),), float64"""
    return (
        [hyp.yseq for hyp in nbest],
        torch.tensor([float(hyp.score) for hyp in nbest], dtype=torch.float64),
    )


class OneLabelAFrame:
    """Stand-in joint network: the default search says one label in each frame.

    Which one is up to the decoder output, and to the frame, whose only feature is its
    number. That it is time for a blank shows in what the decoder was asked last.

    Args:
        decoder: Decoder, whose `score` is watched from now on.

    """

    def __init__(self, decoder):
        weight = decoder.embed.weight
        self.weight = torch.randn_like(weight)
        self.score = decoder.score
        self.labels = None

        decoder.score = self.watch

    def watch(self, label_sequence, states):
        self.labels = len(label_sequence) - 1

        return self.score(label_sequence, states)

    def __call__(self, enc_out, dec_out):
        logits = 2.0 * torch.sin(3.0 * dec_out @ self.weight.t() + enc_out)
        logits[:, 0] = -1e4 if self.labels <= enc_out.item() else 1e4

        return logits


def frame_numbers(start, end, dtype=torch.float64):
    """Encoder outputs for `OneLabelAFrame`. (T, 1)"""
    return torch.arange(start, end, dtype=dtype).unsqueeze(1)
