"""Fixtures: small untrained models, saved as ESPnet2's training saves them."""

import argparse
import importlib

import pytest
import torch
import yaml
from espnet2.tasks.asr_transducer import ASRTransducerTask

TOKENS = ["<blank>", "<unk>", "A", "B", "C", "<space>", "<sos/eos>"]

DECODER_CONF = {
    "rel_pos_bias_type": "rotary",
    "block_size": 12,
    "linear_size": 16,
    "qk_size": 8,
    "v_size": 10,
    "num_heads": 2,
    "max_positions": 20,
    "num_blocks": 2,
}

ENCODER_CONF = {
    "input_conf": {"conv_size": 4, "subsampling_factor": 4},
    "body_conf": [
        {
            "block_type": "conformer",
            "num_blocks": 1,
            "hidden_size": 8,
            "linear_size": 16,
            "heads": 2,
            "conv_mod_kernel_size": 3,
        }
    ],
}


@pytest.fixture
def make_experiment(tmp_path, redraw):
    """Return a function that saves a model of random weights (std 1) of features.

    Its keyword arguments replace or add keys of the configuration.
    """

    def make(name="exp", **keys):
        folder = tmp_path / name
        folder.mkdir()
        options = ["--output_dir", str(folder), "--token_list", "unused"]
        config = {
            **vars(ASRTransducerTask.get_parser().parse_args(options)),
            "token_list": TOKENS,
            "input_size": 10,
            "frontend": None,
            "encoder_conf": ENCODER_CONF,
            "decoder": "mega_bias",
            "decoder_conf": DECODER_CONF,
            "joint_network_conf": {"joint_space_size": 8},
            **keys,
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        model = redraw(ASRTransducerTask.build_model(argparse.Namespace(**config)))
        torch.save(model.state_dict(), folder / "valid.loss.ave.pth")

        return folder

    return make


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Return a function that puts a made-up distribution in front of the real ones.

    It gives the folder that stands for site-packages.
    """
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def make(name, version, requires=(), python=None, files=()):
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Python: {python}"] if python else []
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")

        for file, text in {"RECORD": "", **dict(files)}.items():
            (info / file).write_text(text)

        importlib.invalidate_caches()

        return folder

    return make
