"""The commands of docs/tools.md, on a small model of random weights."""

import importlib
import re
import shlex

import numpy as np
import pytest
import soundfile
import torch
import yaml
from espnet2.tasks.asr_transducer import ASRTransducerTask
from espnet2.utils.yaml_no_alias_safe_dump import yaml_no_alias_safe_dump

import espnet_mega_bias
from docs.pages import blocks, read, run_shell
from espnet_mega_bias.bin.main import COMMANDS, main

PAGE = read("tools.md")
TOKENS = ["<blank>", "<unk>", "<space>", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", "<sos/eos>"]
TRAINING = {
    "token_type": "char",
    "encoder_conf": {
        "input_conf": {"conv_size": 4, "subsampling_factor": 4},
        "body_conf": [
            {
                "block_type": "conformer",
                "hidden_size": 8,
                "linear_size": 8,
                "heads": 2,
                "conv_mod_kernel_size": 3,
            }
        ],
    },
    "decoder": "mega_bias",
    "decoder_conf": {
        "rel_pos_bias_type": "rotary",
        "block_size": 8,
        "linear_size": 8,
        "qk_size": 4,
        "v_size": 6,
        "num_blocks": 2,
        "max_positions": 8,
    },
    "joint_network_conf": {"joint_space_size": 8},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the commands of the page expect beside them."""
    espnet_mega_bias.register()
    folder = tmp_path_factory.mktemp("tools")

    (folder / "train.yaml").write_text(yaml.safe_dump(TRAINING))
    (folder / "data" / "train").mkdir(parents=True)
    (folder / "data" / "train" / "text").write_text("utt MARCH THIRD\n")

    args = ASRTransducerTask.get_parser().parse_args(
        ["--config", str(folder / "train.yaml"), "--output_dir", "unused"]
    )
    args.token_list = TOKENS
    args.decoder_conf = {**TRAINING["decoder_conf"], "max_positions": 64}
    model = ASRTransducerTask.build_model(args)
    with torch.no_grad():
        # The search leaves a frame only once blanks win.
        model.joint_network.lin_out.bias[0] = 4.0

    for name in ("train", "other"):
        (folder / "exp" / name).mkdir(parents=True)
        config = yaml_no_alias_safe_dump(vars(args))
        (folder / "exp" / name / "config.yaml").write_text(config)
        torch.save(model.state_dict(), folder / "exp" / name / "1epoch.pth")
        (folder / "exp" / name / "valid.loss.best.pth").symlink_to("1epoch.pth")

    noise = np.random.default_rng(0).uniform(-0.1, 0.1, 16000)
    soundfile.write(folder / "speech.wav", noise, 16000)

    return folder


def test_every_command_has_its_section():
    assert set(re.findall(r"^## (\w+):", PAGE, re.M)) == set(COMMANDS)


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """Return a function that runs the lines of a block, as they are typed.

    All in this process: to import torch and ESPnet for each of them takes longest.
    """
    monkeypatch.chdir(folder)
    # The command keeps ESPnet's remarks from the user; the other tests want them.
    monkeypatch.setattr("logging.disable", lambda level: None)

    def run_lines(block):
        for line in block.splitlines():
            program, *arguments = shlex.split(line)

            if program == "python":
                print(run_shell(line, folder))
            else:
                assert program == "espnet-mega-bias"
                assert main(arguments) == 0, capsys.readouterr()

        return capsys.readouterr().out

    return run_lines


@pytest.mark.slow
def test_the_page_runs_from_top_to_bottom(folder, run):
    doctor, explain, plot, tensorboard, convert, export = blocks(PAGE, "sh")

    assert re.search(r"^ok +ESPnet2 decoders", run(doctor), re.M)

    # The transcript has more labels than max_positions, as the page has it.
    printed = run(explain)
    assert "max_positions: 8 is less than the 12 positions of utterance utt" in printed

    run(plot)
    for name in ("bias.png", "compared.svg", "attention.svg"):
        assert (folder / name).stat().st_size > 1000

    run(tensorboard)
    assert list((folder / "exp/train/tensorboard/bias").glob("events.*"))

    run(convert)
    config = yaml.safe_load((folder / "exp/as_mega/config.yaml").read_text())
    assert config["decoder"] == "mega"

    assert "speech" in run(export).splitlines()[-2]


def test_the_callback_for_espnet3_is_there():
    pytest.importorskip("lightning")
    (block,) = blocks(PAGE, "yaml")
    (callback,) = yaml.safe_load(block)["trainer"]["callbacks"]
    module, _, name = callback["_target_"].rpartition(".")

    getattr(importlib.import_module(module), name)()
