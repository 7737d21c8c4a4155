"""Every YAML under conf/, through ESPnet's own parser and model builder."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from espnet2.asr_transducer.beam_search_transducer import BeamSearchTransducer
from espnet2.asr_transducer.decoder.mega_decoder import MEGADecoder
from espnet2.asr_transducer.decoder.rnn_decoder import RNNDecoder
from espnet2.asr_transducer.decoder.stateless_decoder import StatelessDecoder
from espnet2.bin.asr_transducer_inference import get_parser
from espnet2.tasks.asr_transducer import ASRTransducerTask

import espnet_mega_bias

pytestmark = pytest.mark.host

ROOT = Path(__file__).parents[2]
AN4 = ROOT / "egs" / "an4" / "asr_transducer1"
CONF = ROOT / "conf"
TRAINING = sorted([*CONF.glob("train_*.yaml"), *ROOT.glob("egs/*/*/conf/train_*.yaml")])
DECODING = sorted(CONF.glob("decode_*.yaml"))

DECODERS = {
    "mega_bias": espnet_mega_bias.MEGABiasDecoder,
    "mega": MEGADecoder,
    "rnn": RNNDecoder,
    "stateless": StatelessDecoder,
}
TOKENS = ["<blank>", "<unk>", "<space>", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", "<sos/eos>"]


@pytest.fixture(scope="module", autouse=True)
def _registered():
    espnet_mega_bias.register()


@pytest.fixture
def parse(tmp_path):
    (tmp_path / "tokens.txt").write_text("\n".join(TOKENS) + "\n")

    def read(path, *more):
        return ASRTransducerTask.get_parser().parse_args(
            [
                "--config",
                str(path),
                "--token_list",
                str(tmp_path / "tokens.txt"),
                "--token_type",
                "char",
                "--output_dir",
                str(tmp_path),
                *more,
            ]
        )

    return read


def test_the_folder_holds_what_it_should():
    assert len(TRAINING) >= 3
    assert {path.stem for path in DECODING} >= {
        f"decode_{search}" for search in ("default", "tsd", "alsd", "maes")
    }


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_training_configuration_builds_and_takes_a_step(parse, path):
    conf = yaml.safe_load(path.read_text())
    model = ASRTransducerTask.build_model(parse(path))

    assert type(model.decoder) is DECODERS[conf["decoder"]]

    loss, _, _ = model(
        torch.randn(2, 16000),
        torch.tensor([16000, 12000]),
        torch.tensor([[3, 4, 5], [6, 7, -1]]),
        torch.tensor([3, 2]),
    )
    loss.backward()

    assert loss.isfinite()
    if conf["decoder"] == "mega_bias":
        assert model.decoder.chunk_size == conf["decoder_conf"].get("chunk_size", -1)
        bias = model.decoder.mega_blocks[0][0].rel_pos_bias
        assert all(p.grad.abs().max() > 0 for p in bias.parameters())


def trainings(script):
    """Give what a comparison trains: names with seeds, and the configurations."""
    listed = re.findall(r"--training (\w+):(\d+)", (AN4 / script).read_text())
    assert len(set(listed)) == len(listed)
    confs = {
        name: yaml.safe_load((AN4 / "conf" / f"{name}.yaml").read_text())
        for name, _ in listed
    }
    return listed, confs


def decoders(confs):
    """Take the decoders out of configurations that are the same otherwise."""
    found = {
        name: (conf.pop("decoder"), conf.pop("decoder_conf"))
        for name, conf in confs.items()
    }
    first = next(iter(confs.values()))
    assert all(conf == first for conf in confs.values())
    return found


def test_compared_trainings_differ_in_the_decoder_alone():
    _, confs = trainings("compare.sh")

    found = decoders(confs)

    kind, ours = found["train_mega_bias_rotary"]
    assert (kind, ours["rel_pos_bias_type"]) == ("mega_bias", "rotary")
    assert found["train_mega_rotary"] == ("mega", ours)
    simple = {**ours, "rel_pos_bias_type": "simple"}
    assert found["train_mega_bias_simple"] == ("mega_bias", simple)


def test_the_longer_trainings_differ_in_the_decoder_alone_and_have_the_shorter_ones():
    listed, confs = trainings("compare_110_epochs.sh")
    shorter = decoders(trainings("compare.sh")[1])

    rotary, rnn = "train_mega_bias_rotary_110_epochs", "train_rnn_110_epochs"
    assert listed == [*((rotary, seed) for seed in "123"), (rnn, "1")]
    longer = decoders(confs)
    assert longer[rotary] == shorter["train_mega_bias_rotary"]
    assert longer[rnn] == shorter["train_rnn"]


def test_the_trainings_with_vggs_convolutions_have_the_rest_of_the_longer_ones():
    listed, confs = trainings("compare_vgg.sh")
    longer = trainings("compare_110_epochs.sh")[1]

    rotary, rnn = "train_mega_bias_rotary_vgg_90_epochs", "train_rnn_vgg_90_epochs"
    assert listed == [*((rotary, seed) for seed in "123"), (rnn, "1")]
    for name in rotary, rnn:
        expected = longer[name.replace("vgg_90", "110")]
        expected["encoder_conf"]["input_conf"].update(vgg_like=True, conv_size=[32, 64])
        expected["max_epoch"] = 90
        expected["scheduler_conf"]["total_steps"] = 90 * 106 + 1
        assert confs[name] == expected


def test_each_training_configuration_of_an4_is_compared():
    scripts = sorted(path.name for path in AN4.glob("compare*.sh"))
    compared = [trainings(script)[1] for script in scripts]

    in_folder = {path.stem for path in AN4.glob("conf/train_*.yaml")}
    assert in_folder == {name for confs in compared for name in confs}


@pytest.mark.parametrize("path", DECODING, ids=lambda path: path.stem)
def test_decoding_configuration_searches(parse, path):
    args = get_parser().parse_args(
        [
            "--config",
            str(path),
            "--output_dir",
            "unused",
            "--data_path_and_name_and_type",
            "wav.scp,speech,sound",
        ]
    )
    search_type, *window = path.stem.removeprefix("decode_").split("_streaming_")
    assert args.beam_search_config["search_type"] == search_type
    assert args.streaming == bool(window)
    assert window in ([], [str(args.decoding_window)])

    model = ASRTransducerTask.build_model(parse(CONF / "train_mini_an4_mega_bias.yaml"))
    search = BeamSearchTransducer(
        model.decoder,
        model.joint_network,
        args.beam_size,
        nbest=5,
        **args.beam_search_config,
    )

    with torch.no_grad():
        nbest = search(torch.randn(9, model.encoder.output_size))

    sequences = [tuple(hyp.yseq) for hyp in nbest]
    assert sequences
    # ESPnet's default search keeps a sequence once for each alignment it followed.
    assert "default" in path.stem or len(set(sequences)) == len(sequences)
    assert all(torch.isfinite(torch.tensor(float(hyp.score))) for hyp in nbest)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("qk_sise", 32, "qk_sise"),
        ("qk_size", "large", r'"qk_size".*(str).*int'),
        ("qk_size", 31, "qk_size must be even"),
        ("rel_pos_bias_type", "alibi", "simple, rotary"),
        ("normalization_type", "batch_norm", "layer_norm"),
        ("activation_type", "gelu", "swish"),
    ],
)
def test_bad_decoder_conf_stops_before_training(parse, key, value, message):
    path = CONF / "train_mini_an4_mega_bias.yaml"
    args = parse(path, "--decoder_conf", f"{key}={value}")

    with pytest.raises(Exception, match=message):
        ASRTransducerTask.build_model(args)
