"""What is exported computes what ESPnet's modules and our decoder compute."""

import argparse
import copy

import pytest
import torch
from espnet2.tasks.asr_transducer import ASRTransducerTask

from espnet_mega_bias import MEGABiasDecoder
from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.onnx_graphs import DecoderStep, Encoder, Joint
from tools.conftest import DECODER_CONF, ENCODER_CONF, TOKENS

PAD = 2

# Between them, every value of each key that changes the step.
DECODERS = {
    "rotary": {},
    "simple": {"rel_pos_bias_type": "simple"},
    "no limit": {"max_positions": None},
    "chunks": {"chunk_size": 3},
    "chunks of one": {"chunk_size": 1, "rel_pos_bias_type": "simple"},
    "chunks, window not used": {"chunk_size": 25, "max_positions": 4},
    "window of one": {"max_positions": 1},
    "truncated": {"truncation_length": 3},
    "truncated to one": {"truncation_length": 1, "chunk_size": 4},
    "truncated simple": {"truncation_length": 5, "rel_pos_bias_type": "simple"},
    "blank pads": {"embed_pad": 0},
    "ftswish, basic_norm": {
        "activation_type": "ftswish",
        "normalization_type": "basic_norm",
    },
    "mish, rms_norm": {"activation_type": "mish", "normalization_type": "rms_norm"},
    "smish, scale_norm": {
        "activation_type": "smish",
        "normalization_type": "scale_norm",
    },
    "leaky_relu, part of rms_norm": {
        "activation_type": "leaky_relu",
        "normalization_type": "rms_norm",
        "normalization_args": {"partial": 0.5},
    },
}


@pytest.fixture
def make_decoder(redraw):
    def make(**conf):
        conf = {**DECODER_CONF, "max_positions": 9, "embed_pad": PAD, **conf}

        return redraw(MEGABiasDecoder(len(TOKENS), **conf)).eval()

    return make


def grow(state, ema, keys, values, positions):
    """Put what a step has given behind the state."""
    return {
        "length": state["length"] + 1,
        "ema": ema,
        "keys": torch.cat([state["keys"], keys], dim=2),
        "values": torch.cat([state["values"], values], dim=2),
        "positions": torch.cat([state["positions"], positions], dim=1),
    }


def run(step, labels):
    """Feed labels one by one; give the outputs (U, D) and the last state."""
    state = step.init_state()
    outs = []

    for label in labels:
        out, *new = step(torch.tensor([label]), **state)
        state = grow(state, *new)
        outs.append(out)

    return torch.cat(outs), state


def score(decoder, labels):
    state = decoder.init_state()
    outs = []

    for end in range(1, len(labels) + 1):
        out, state = decoder.score(labels[:end], state)
        outs.append(out)

    return torch.cat(outs)


def random_labels(length):
    labels = torch.randint(len(TOKENS), (length,)).tolist()
    labels[0] = 0
    # Inside, in a row, and where a chunk starts.
    labels[4] = labels[5] = labels[9] = PAD

    return labels


# --- decoder -----------------------------------------------------------------------


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_a_step_is_that_of_the_decoder(name, make_decoder, assert_close64):
    decoder = make_decoder(**DECODERS[name]).double()
    # Twice as long as the window.
    labels = random_labels(20)

    assert_close64(run(DecoderStep(decoder), labels)[0], score(decoder, labels))


@pytest.mark.parametrize("name", ["rotary", "no limit", "chunks", "truncated"])
@torch.no_grad()
def test_hypotheses_of_other_lengths_change_nothing(name, make_decoder, assert_close64):
    decoder = make_decoder(**DECODERS[name]).double()
    step = DecoderStep(decoder)
    sequences = [random_labels(length) for length in (11, 17, 14)]
    states = [run(step, labels)[1] for labels in sequences]
    longest = max(len(labels) for labels in sequences)

    def filled(tensor, dim, value):
        missing = list(tensor.shape)
        missing[dim] = longest - tensor.size(dim)

        return torch.cat([tensor, tensor.new_full(missing, value)], dim)

    # What fills up is not neutral by itself.
    batch = {
        "length": torch.cat([state["length"] for state in states]),
        "ema": torch.cat([state["ema"] for state in states], dim=1),
        "keys": torch.cat([filled(s["keys"], 2, 50.0) for s in states], dim=1),
        "values": torch.cat([filled(s["values"], 2, 50.0) for s in states], dim=1),
        "positions": torch.cat([filled(s["positions"], 1, -1) for s in states]),
    }
    outs, *_ = step(torch.tensor([3, PAD, 4]), **batch)

    for out, labels, label in zip(outs, sequences, [3, PAD, 4], strict=True):
        assert_close64(out, score(decoder, [*labels, label])[-1])


@pytest.mark.parametrize(
    ("conf", "history"),
    [
        ({}, 8),
        ({"chunk_size": 4}, 3),
        ({"max_positions": 1}, 0),
        ({"max_positions": None}, None),
    ],
)
@torch.no_grad()
def test_older_rows_than_the_history_may_be_left_away(
    conf, history, make_decoder, assert_close64
):
    decoder = make_decoder(**conf).double()
    step = DecoderStep(decoder)
    labels = random_labels(18)
    _, state = run(step, labels)

    assert step.history == history

    if history is not None:
        first = state["keys"].size(2) - history
        state["keys"] = state["keys"][:, :, first:]
        state["values"] = state["values"][:, :, first:]
        state["positions"] = state["positions"][:, first:]

    out, *_ = step(torch.tensor([4]), **state)

    assert_close64(out[0], score(decoder, [*labels, 4])[-1])


@torch.no_grad()
def test_the_decoder_itself_stays_as_it_is(make_decoder):
    decoder = make_decoder(max_positions=None)
    before = copy.deepcopy(decoder)

    DecoderStep(decoder).double()

    for (name, tensor), (_, old) in zip(
        decoder.named_buffers(), before.named_buffers(), strict=True
    ):
        assert torch.equal(tensor, old), name


# --- encoder -----------------------------------------------------------------------


def block(block_type, **keys):
    return {
        "block_type": block_type,
        "hidden_size": 8,
        "linear_size": 16,
        "heads": 2,
        "conv_mod_kernel_size": 3,
        **keys,
    }


ALL_BLOCKS = [block(name) for name in ("conformer", "branchformer", "ebranchformer")]
SMALL_STFT = {"n_fft": 64, "hop_length": 20, "n_mels": 10, "fs": 1000}

ENCODERS = {
    "features": {},
    "every block": {"encoder_conf": {**ENCODER_CONF, "body_conf": ALL_BLOCKS}},
    "vgg, simplified scores, other norms": {
        "encoder_conf": {
            "input_conf": {"vgg_like": True, "conv_size": [4, 4]},
            "body_conf": ALL_BLOCKS,
            "main_conf": {
                "simplified_att_score": True,
                "norm_type": "scale_norm",
                "conv_mod_norm_type": "rms_norm",
                "conv_mod_act_type": "smish",
            },
        }
    },
    "dynamic chunks": {
        "encoder_conf": {
            **ENCODER_CONF,
            "body_conf": ALL_BLOCKS,
            "main_conf": {"dynamic_chunk_training": True},
        }
    },
    "conv1d": {
        "encoder_conf": {
            "input_conf": {"conv_size": 4, "subsampling_factor": 2},
            "body_conf": [
                {"block_type": "conv1d", "output_size": 8, "kernel_size": 3},
                block("conformer"),
            ],
        }
    },
    "utterance_mvn, means": {"normalize": "utterance_mvn"},
    "utterance_mvn, both": {
        "normalize": "utterance_mvn",
        "normalize_conf": {"norm_vars": True},
    },
    "utterance_mvn, variances": {
        "normalize": "utterance_mvn",
        "normalize_conf": {"norm_means": False, "norm_vars": True},
    },
    "audio": {"frontend": "default", "frontend_conf": SMALL_STFT},
    "audio, short window": {
        "frontend": "default",
        "frontend_conf": {**SMALL_STFT, "win_length": 41, "window": "hamming"},
        "normalize": "utterance_mvn",
    },
    "audio, no window, not centred": {
        "frontend": "default",
        "frontend_conf": {
            **SMALL_STFT,
            "window": None,
            "center": False,
            "normalized": True,
        },
    },
}


@pytest.fixture
def make_model(redraw):
    def make(**keys):
        options = ["--output_dir", "unused", "--token_list", "unused"]
        config = {
            **vars(ASRTransducerTask.get_parser().parse_args(options)),
            "token_list": TOKENS,
            "encoder_conf": ENCODER_CONF,
            "decoder": "mega_bias",
            "decoder_conf": DECODER_CONF,
            "normalize": None,
            **({"frontend": None, "input_size": 10} | keys),
        }
        if config["frontend"]:
            config["input_size"] = None

        # What is filled in is that of this model alone.
        config = copy.deepcopy(config)

        return redraw(
            ASRTransducerTask.build_model(argparse.Namespace(**config))
        ).eval()

    return make


def encoded_by_espnet(model, speech):
    features, lengths = model._extract_feats(
        speech.clone(), torch.tensor([speech.size(1)])
    )
    if model.normalize is not None:
        features, lengths = model.normalize(features, lengths)

    model.encoder.dynamic_chunk_training = False

    return model.encoder(features, lengths)[0]


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_the_encoder_is_espnets(name, make_model, assert_close_espnet):
    model = make_model(**ENCODERS[name])
    encoder = Encoder(model)

    for frames in (40, 23):
        shape = (20 * frames,) if model.frontend else (frames, 10)
        speech = torch.randn(1, *shape)

        assert_close_espnet(encoder(speech), encoded_by_espnet(model, speech))


@torch.no_grad()
def test_global_statistics_are_those_of_the_checkpoint(
    make_model, tmp_path, assert_close_espnet
):
    import numpy as np

    features = 3.0 + 2.0 * torch.randn(50, 10, dtype=torch.float64).numpy()
    stats = tmp_path / "stats.npz"
    np.savez(
        stats, count=50, sum=features.sum(0), sum_square=np.square(features).sum(0)
    )
    model = make_model(
        normalize="global_mvn", normalize_conf={"stats_file": str(stats)}
    )
    speech = torch.randn(1, 30, 10)

    assert_close_espnet(Encoder(model)(speech), encoded_by_espnet(model, speech))


@torch.no_grad()
def test_log_mel_energies_are_as_exact_as_espnets(make_model, assert_no_worse):
    model = make_model(frontend="default", frontend_conf={"fs": 16000})
    speech = torch.randn(1, 4000)
    length = torch.tensor([4000])

    stft = model.frontend.stft
    spectrum = torch.stft(
        speech.double(),
        stft.n_fft,
        stft.hop_length,
        window=torch.hann_window(stft.win_length, dtype=torch.float64),
        return_complex=True,
    )
    logmel = copy.deepcopy(model.frontend.logmel).double()
    exact, _ = logmel(spectrum.abs().square().transpose(1, 2))

    assert_no_worse(
        Encoder(model).frontend(speech), model.frontend(speech, length)[0], exact
    )


def test_a_frontend_of_another_kind_is_refused(make_model):
    model = make_model(frontend="default", frontend_conf=SMALL_STFT)
    model.frontend.apply_stft = False

    with pytest.raises(ToolError, match="takes spectra"):
        Encoder(model)

    model.frontend = torch.nn.Identity()

    with pytest.raises(ToolError, match="frontend Identity cannot be exported"):
        Encoder(model)


# --- joint network -----------------------------------------------------------------


@torch.no_grad()
def test_the_joint_network_takes_every_pair(make_model, assert_close_espnet):
    joint = make_model().joint_network
    encoder, decoder = torch.randn(4, 8), torch.randn(3, 12)
    log_probs = Joint(joint)(encoder, decoder)

    assert log_probs.shape == (4, 3, len(TOKENS))

    for n in range(4):
        logits = joint(encoder[n : n + 1], decoder)
        assert_close_espnet(log_probs[n], torch.log_softmax(logits, dim=-1))
