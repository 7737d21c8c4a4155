"""ESPnet's streaming recogniser, chunk by chunk, with the decoder."""

import copy

import pytest
import torch
from espnet2.bin.asr_transducer_inference import Speech2Text
from espnet2.tasks.asr_transducer import ASRTransducerTask
from espnet2.utils.yaml_no_alias_safe_dump import yaml_no_alias_safe_dump
from searching import SEARCHES, SMALL, labels_and_scores, make_search

import espnet_mega_bias

pytestmark = pytest.mark.host

TOKENS = ["<blank>", "<unk>", "a", "b", "c", "d", "e", "<sos/eos>"]
ENCODER = {
    "main_conf": {
        "dynamic_chunk_training": True,
        "short_chunk_size": 8,
        "num_left_chunks": 4,
    },
    "input_conf": {"vgg_like": True, "subsampling_factor": 4, "conv_size": 4},
    "body_conf": [
        {
            "block_type": "conformer",
            "hidden_size": 8,
            "linear_size": 8,
            "heads": 2,
            "conv_mod_kernel_size": 3,
            "num_blocks": 2,
        }
    ],
}
# Those that ESPnet has for streaming.
STREAMING = [name for name in SEARCHES if name != "alsd"]
CONFS = [{"max_positions": None}, {"chunk_size": 3}, {"max_positions": 4}]

BEAM = 3
WINDOW = 160  # milliseconds
RATE = 16


@pytest.fixture
def build(redraw, tmp_path):
    """Save a random model, and load it as a streaming recogniser."""

    def make(search_type, dtype, conf):
        espnet_mega_bias.register()

        (tmp_path / "tokens.txt").write_text("\n".join(TOKENS) + "\n")
        (tmp_path / "train.yaml").write_text(
            yaml_no_alias_safe_dump(
                {
                    "encoder_conf": ENCODER,
                    "decoder": "mega_bias",
                    "decoder_conf": {**SMALL, **conf},
                    "joint_network_conf": {"joint_space_size": 8},
                    "normalize": None,
                    "token_list": str(tmp_path / "tokens.txt"),
                    "token_type": "char",
                }
            )
        )
        args = ASRTransducerTask.get_parser().parse_args(
            ["--config", str(tmp_path / "train.yaml"), "--output_dir", "unused"]
        )
        model = ASRTransducerTask.build_model(args)
        redraw(model.decoder)
        redraw(model.joint_network)

        # The default search leaves a frame only once blanks win.
        with torch.no_grad():
            model.joint_network.lin_out.bias[0] = 4.0

        (tmp_path / "config.yaml").write_text(yaml_no_alias_safe_dump(vars(args)))
        torch.save(model.state_dict(), tmp_path / "model.pth")

        return Speech2Text(
            tmp_path / "config.yaml",
            tmp_path / "model.pth",
            beam_search_config={**SEARCHES[search_type], "search_type": search_type},
            beam_size=BEAM,
            nbest=BEAM,
            dtype=str(dtype).removeprefix("torch."),
            streaming=True,
            decoding_window=WINDOW,
            left_context=4,
        )

    return make


def stream(speech2text, speech):
    """N-best of each chunk, as ESPnet's command goes through an utterance."""
    size = speech2text.audio_processor.decoding_samples
    nbests = []

    for start in range(0, len(speech) + 1, size):
        nbests.append(
            # A search that goes on appends to the hypotheses that it has given.
            copy.copy(
                speech2text.streaming_decode(
                    speech[start : start + size], is_final=start + size > len(speech)
                )
            )
        )

    return nbests


@pytest.fixture
def encoded(monkeypatch):
    """Note what the encoder of a recogniser gives for each chunk."""

    def watch(speech2text):
        outs, forward = [], speech2text.asr_model.encoder.chunk_forward

        def chunk_forward(*args, **kwargs):
            outs.append(forward(*args, **kwargs))

            return outs[-1]

        monkeypatch.setattr(
            speech2text.asr_model.encoder, "chunk_forward", chunk_forward
        )

        return outs

    return watch


@pytest.mark.parametrize("search_type", STREAMING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("conf", CONFS, ids=str)
def test_streaming_equals_the_offline_search_over_the_same_encoder_output(
    build,
    encoded,
    assert_close64,
    assert_close_espnet,
    search_type,
    dtype,
    conf,
):
    """At every chunk, the last one included, and for a second utterance as well."""
    speech2text = build(search_type, dtype, conf)
    decoder, joint = speech2text.asr_model.decoder, speech2text.asr_model.joint_network
    close = assert_close64 if dtype == torch.float64 else assert_close_espnet
    outs = encoded(speech2text)

    assert type(decoder) is espnet_mega_bias.MEGABiasDecoder
    assert decoder.embed.weight.dtype == dtype

    for milliseconds in (1500, 1000):
        outs.clear()
        speech = torch.randn(milliseconds * RATE)
        nbests = stream(speech2text, speech)

        assert len(nbests) == milliseconds // WINDOW + 1 == len(outs)
        assert decoder.score_cache == {}

        for count, nbest in enumerate(nbests, start=1):
            frames = torch.cat(outs[:count], dim=1)[0]
            assert frames.dtype == dtype

            with torch.no_grad():
                offline = make_search(copy.deepcopy(decoder), joint, search_type, BEAM)(
                    frames
                )

            # Before its last chunk, a search gives its hypotheses in no order.
            ranked = sorted(nbest, key=lambda hyp: hyp.score, reverse=True)[:BEAM]

            assert labels_and_scores(ranked)[0] == labels_and_scores(offline)[0]
            close(labels_and_scores(ranked)[1], labels_and_scores(offline)[1])

        assert max(len(hyp.yseq) for hyp in nbests[-1]) > 3
        assert labels_and_scores(nbests[-1])[1].isfinite().all()
