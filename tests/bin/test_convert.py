"""`espnet-mega-bias convert`, as it is typed."""

import argparse
import shlex

import pytest
import torch
import yaml
from docs.pages import blocks, read
from espnet2.torch_utils.load_pretrained_model import load_pretrained_model
from tools.test_fairseq_mega import OPTIONS, as_model, make_layer

from espnet_mega_bias import MEGABiasDecoder
from espnet_mega_bias.bin.main import main


@pytest.fixture(autouse=True)
def _logging_stays(monkeypatch):
    monkeypatch.setattr("logging.disable", lambda level: None)


def test_both_directions_tell_what_they_did(make_experiment, tmp_path, capsys):
    folder = make_experiment(decoder="mega")

    assert main(["convert", str(folder), str(tmp_path / "a"), "--to", "mega_bias"]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/a/valid.loss.ave.pth: {folder}/valid.loss.ave.pth" in out
    assert "with decoder: mega_bias" in out
    assert "full pass, without the blank" in out
    assert "docs/differences.md" in out

    assert (
        main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "mega"]) == 0
    )
    assert "with decoder: mega\n" in capsys.readouterr().out
    assert (tmp_path / "b" / "config.yaml").read_text() == (
        folder / "config.yaml"
    ).read_text()


def test_a_refusal_is_one_line_and_status_1(make_experiment, tmp_path, capsys):
    folder = make_experiment()

    assert main(["convert", str(folder), str(tmp_path / "a"), "--to", "mega_bias"]) == 1

    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"{folder}/config.yaml: the decoder is mega_bias already" in err


def test_the_configuration_may_be_named(make_experiment, tmp_path, capsys):
    folder = make_experiment()
    (folder / "config.yaml").rename(tmp_path / "train.yaml")
    argv = ["convert", str(folder), str(tmp_path / "a"), "--to", "mega"]

    assert main(argv) == 1
    assert "--config" in capsys.readouterr().err
    assert main([*argv, "--config", str(tmp_path / "train.yaml")]) == 0
    assert yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())["decoder"] == (
        "mega"
    )


@pytest.mark.parametrize(
    "kind", [[], ["--to", "rnn"], ["--to", "mega", "--from-fairseq"]]
)
def test_one_kind_of_conversion_is_asked_for(kind, tmp_path):
    with pytest.raises(SystemExit) as end:
        main(["convert", "model", str(tmp_path / "a"), *kind])

    assert end.value.code == 2


def test_a_model_that_is_none_of_fairseqs_is_told(make_experiment, tmp_path, capsys):
    folder = make_experiment()
    path = folder / "valid.loss.ave.pth"

    assert main(["convert", str(path), str(tmp_path / "a"), "--from-fairseq"]) == 1
    assert f"{path}: no decoder layers of facebookresearch/mega" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "a").exists()


def test_a_missing_checkpoint_is_told(tmp_path, capsys):
    assert main(["convert", "no.pt", str(tmp_path / "a"), "--from-fairseq"]) == 1
    assert "no.pt" in capsys.readouterr().err


def test_help_has_examples_that_can_be_typed(capsys):
    with pytest.raises(SystemExit):
        main(["convert", "--help"])

    lines = capsys.readouterr().out.splitlines()
    examples = [line.split() for line in lines if "  espnet-mega-bias convert" in line]

    assert len(examples) == 3
    for example in examples:
        # As far as the model, which isn't there.
        assert main(example[1:]) == 1
        assert "no" in capsys.readouterr().err


def test_the_commands_of_the_page_run(make_experiment, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp").mkdir()
    make_experiment("exp/mega", decoder="mega")
    torch.save(
        {"args": argparse.Namespace(**OPTIONS), "model": as_model([make_layer()])},
        "checkpoint_best.pt",
    )

    page = read("convert.md")
    commands = "".join(blocks(page, "sh")).splitlines()
    assert len(commands) == 3

    for command in commands:
        assert main(shlex.split(command)[1:]) == 0

    # The value that is printed is the one that the page shows, and ESPnet takes it.
    option = "--init_param blocks/mega_blocks.pth::decoder"
    assert option in capsys.readouterr().out
    assert option in page

    conf = yaml.safe_load((tmp_path / "blocks" / "decoder.yaml").read_text())
    shown = yaml.safe_load("".join(blocks(page, "yaml")))
    assert shown.keys() == conf.keys()
    assert shown["init_param"] == conf["init_param"]
    assert shown["decoder_conf"].keys() <= conf["decoder_conf"].keys()

    decoder = MEGABiasDecoder(9, **conf["decoder_conf"])
    load_pretrained_model(
        option.split()[1], torch.nn.ModuleDict({"decoder": decoder}), False
    )
    saved = torch.load("blocks/mega_blocks.pth")
    assert torch.equal(
        decoder.mega_blocks[0][0].proj_h.bias,
        saved["mega_blocks.0.0.proj_h.bias"].float(),
    )


def test_the_page_names_each_weight_of_a_layer():
    page = read("convert.md")

    for name in make_layer("simple").keys() | make_layer("rotary").keys():
        name = name.removesuffix(".weight").removesuffix(".bias")
        name = name.removeprefix("mega_layer.rel_pos_bias.")
        assert name in page
