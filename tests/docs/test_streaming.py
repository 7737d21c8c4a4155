"""The commands, the snippet and the claims of docs/streaming.md."""

import re

import numpy as np
import pytest
import soundfile
import torch
import yaml
from espnet2.asr_transducer.beam_search_transducer import BeamSearchTransducer
from espnet2.asr_transducer.decoder.rnn_decoder import RNNDecoder
from espnet2.asr_transducer.utils import make_chunk_mask
from espnet2.bin.asr_transducer_inference import get_parser
from espnet2.tasks.asr_transducer import ASRTransducerTask
from espnet2.utils.yaml_no_alias_safe_dump import yaml_no_alias_safe_dump

import espnet_mega_bias
from docs.pages import ROOT, blocks, read, rows, run_shell

PAGE = read("streaming.md")
TOKENS = ["<blank>", "<unk>", "a", "b", "c", "d", "e", "<space>", "<sos/eos>"]
DECODER = {
    "rel_pos_bias_type": "rotary",
    "block_size": 8,
    "linear_size": 8,
    "qk_size": 4,
    "v_size": 6,
    "num_blocks": 1,
}
RATE = 16000


def build():
    """The page's encoder in a small size, with random weights."""
    espnet_mega_bias.register()
    encoder = yaml.safe_load(blocks(PAGE, "yaml")[0])["encoder_conf"]
    encoder["input_conf"] |= {"conv_size": 4}
    encoder["body_conf"][0] |= {
        "num_blocks": 1,
        "hidden_size": 8,
        "linear_size": 8,
        "conv_mod_kernel_size": 3,
    }
    args = ASRTransducerTask.get_parser().parse_args(
        ["--output_dir", "unused", "--token_list", "unused", "--token_type", "char"]
    )
    args.token_list = TOKENS
    args.encoder_conf = encoder
    args.decoder, args.decoder_conf = "mega_bias", DECODER
    args.normalize = None

    model = ASRTransducerTask.build_model(args)
    with torch.no_grad():
        # The default search leaves a frame only once blanks win.
        model.joint_network.lin_out.bias[0] = 1.0

    return args, model


@pytest.fixture
def folder(tmp_path):
    """What the commands of the page expect beside them."""
    args, model = build()
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "config.yaml").write_text(yaml_no_alias_safe_dump(vars(args)))
    torch.save(model.state_dict(), tmp_path / "exp" / "model.pth")

    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 2 * RATE)
    soundfile.write(tmp_path / "speech.wav", noise, RATE)
    (tmp_path / "wav.scp").write_text(f"utt {tmp_path}/speech.wav\n")
    (tmp_path / "decode.yaml").write_text("beam_size: 2\n")

    return tmp_path


def test_the_snippet_prints_a_hypothesis_for_each_chunk(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (code,) = blocks(PAGE, "python")

    exec(compile(code, "streaming.md", "exec"), {})

    lines = capsys.readouterr().out.splitlines()
    times = [
        match[1] for line in lines if (match := re.match(r" +(\d.\d\d) s  ", line))
    ]
    assert times == ["0.64", "1.28", "1.92", "2.56"]


@pytest.mark.slow
def test_the_command_decodes_chunk_by_chunk(folder):
    command, _ = blocks(PAGE, "sh")

    printed = run_shell(command, folder)

    for end in (640, 1280, 1920):
        assert f"Current best hypothesis (0-{end}ms)" in printed
    assert (
        (folder / "decoded" / "1best_recog" / "score").read_text().startswith("utt -")
    )


@pytest.mark.slow
def test_the_measurement_reports(folder):
    pytest.importorskip("jiwer")
    for name in ("conf", "egs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "data" / "test").mkdir(parents=True)
    (folder / "wav.scp").rename(folder / "data" / "test" / "wav.scp")
    (folder / "data" / "test" / "text").write_text("utt ab cd\n")
    _, command = blocks(PAGE, "sh")

    printed = run_shell(command.replace("--seconds 3600", "--seconds 4"), folder)

    assert "A chunk is 640 ms" in printed
    named = re.findall(r"`(stream\.\w+)`", PAGE)
    assert {path.name for path in (folder / "exp" / "stream").iterdir()} == set(named)


@torch.no_grad()
def test_espnet_keeps_every_output_under_a_text_of_all_labels():
    decoder = RNNDecoder(9, embed_size=8, hidden_size=8).eval()
    state, labels, lengths = decoder.init_state(1), [0], []

    for label in range(1, 9):
        _, state = decoder.score(labels, state)
        labels = [*labels, label]
        lengths.append(sum(map(len, decoder.score_cache)))

    assert lengths == [label**2 for label in range(1, 9)]


def test_options_have_the_defaults_of_the_page_and_any_value_means_true():
    parser = get_parser()

    for option, default, _ in rows(PAGE, "option"):
        assert str(parser.get_default(option.strip("`-"))) == default

    required = ["--output_dir", "x", "--data_path_and_name_and_type", "a,b,c"]
    assert parser.parse_args([*required, "--streaming", "false"]).streaming is True


def test_the_encoder_is_causal_and_no_left_chunks_stands_for_all():
    _, model = build()
    convolution = model.encoder.encoders.blocks[0].conv_mod

    assert model.encoder.dynamic_chunk_training
    assert convolution.lorder == 2  # the kernel less one: all of it in the past
    assert not make_chunk_mask(6, 2, num_left_chunks=0)[-1].any()
    assert (
        make_chunk_mask(6, 2, num_left_chunks=1)[-1].tolist()
        == [True] * 2 + [False] * 4
    )


@torch.no_grad()
def test_alsd_starts_anew_with_each_chunk_unless_it_is_told_of_them():
    _, model = build()
    parts = model.eval().decoder, model.joint_network, 2
    frames = torch.randn(8, 8)

    search = BeamSearchTransducer(*parts, search_type="alsd")
    search(frames[:4], is_final=False)
    after_a_chunk = search(frames[4:])[0]
    alone = search(frames[4:])[0]

    assert after_a_chunk.yseq == alone.yseq
    assert after_a_chunk.score == alone.score

    with pytest.raises(AssertionError, match="ALSD is not available in streaming"):
        BeamSearchTransducer(*parts, search_type="alsd", streaming=True)


def test_the_memory_of_a_label_is_what_the_page_says():
    numbers = 4 * (128 + 1024)

    assert f"{numbers * 4 / 1000:.0f} kB" in PAGE


@torch.no_grad()
def test_max_positions_can_be_lowered_after_training():
    trained = espnet_mega_bias.MEGABiasDecoder(9, **DECODER, max_positions=64)
    lowered = espnet_mega_bias.MEGABiasDecoder(9, **DECODER, max_positions=4)

    lowered.load_state_dict(trained.state_dict(), strict=True)
