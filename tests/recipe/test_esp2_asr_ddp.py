"""egs/an4/esp2_asr/conf/training_ddp.yaml: two processes beside one."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

RECIPE = Path(__file__).resolve().parents[2] / "egs" / "an4" / "esp2_asr"
FRAMES = {"train_nodev": (50, 70, 90, 60, 80, 40, 55, 75), "train_dev": (50, 70)}

# A module of its own, because each process imports it by its name.
CALLBACK = """
import json
import os

import lightning


class Steps(lightning.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        model = pl_module.model
        step = {
            "process": os.getpid(),
            "step": trainer.global_step,
            "loss": outputs["loss"].item(),
            "rate": trainer.optimizers[0].param_groups[0]["lr"],
            "decoder": type(model.decoder).__module__,
            "criterion": type(model.criterion_transducer).__module__,
        }
        with open(f"{self.folder}/rank{trainer.global_rank}", "a") as file:
            print(json.dumps(step), file=file)
"""

# What makes the losses of several processes those of one: nothing random, and no
# statistics over a batch, which BatchNorm in a Conformer's convolutions takes.
SETTINGS = {
    "model": {
        "input_size": 40,
        "decoder_conf": {
            "block_size": 8,
            "linear_size": 8,
            "qk_size": 4,
            "v_size": 8,
            "dropout_rate": 0.0,
            "att_dropout_rate": 0.0,
            "ffn_dropout_rate": 0.0,
            "embed_dropout_rate": 0.0,
        },
        "encoder_conf": {
            "main_conf": {"pos_enc_dropout_rate": 0.0},
            "input_conf": {"conv_size": 4, "subsampling_factor": 4},
            "body_conf": [
                {
                    "block_type": "ebranchformer",
                    "hidden_size": 8,
                    "linear_size": 8,
                    "heads": 1,
                    "conv_mod_kernel_size": 3,
                }
            ],
        },
        "joint_network_conf": {"joint_space_size": 8},
        "specaug": None,
    },
    # AdamW turns the rounding of a gradient that is zero into whole steps
    "optimizer": {"_target_": "torch.optim.SGD"},
    "schedule": {"max_lr": 0.1, "total_steps": 9, "cycle_momentum": False},
    "dataloader": {"train": {"iter_factory": {"batches": {"batch_size": 4}}}},
}


def write_corpus(folder):
    """Write manifests, cepstra, tokens and statistics."""
    noise = np.random.default_rng(0)
    for name, frames in FRAMES.items():
        rows, shapes = [], []
        for number, length in enumerate(frames):
            values = noise.normal(size=(length, 13)).astype(">f4").tobytes()
            path = folder / f"{name}{number}.mfc"
            path.write_bytes((len(values) // 4).to_bytes(4, "big") + values)
            rows.append(f"{path.stem}\t{path}\t{'ABBA'[: 1 + number % 4]}\n")
            shapes.append(f"{number} {length},40\n")
        manifest = folder / "data" / "manifest" / f"{name}.tsv"
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text("".join(rows))
        part = {"train_nodev": "train", "train_dev": "valid"}[name]
        shape_file = folder / "stats" / part / "feats_shape"
        shape_file.parent.mkdir(parents=True)
        shape_file.write_text("".join(shapes))
    ones = np.ones(40, np.float32)
    np.savez(shape_file.parents[1] / "train/feats_stats.npz", count=9.0, sum=0 * ones,
             sum_square=90 * ones)  # fmt: skip
    tokens = folder / "data" / "char" / "tokens.txt"
    tokens.parent.mkdir()
    tokens.write_text("<blank>\n<unk>\nA\nB\n<sos/eos>\n")


def train(folder, configuration, epochs):
    """Run the stage `train`, and give what each process noted so far."""
    exp = folder / configuration
    exp.mkdir(exist_ok=True)
    moved = {"data_dir": str(folder / "data"), "stats_dir": str(folder / "stats")}
    moved["exp_dir"] = str(exp)
    steps = {"_target_": "steps.Steps", "folder": str(exp)}
    trainer = {"max_epochs": epochs, "log_every_n_steps": 1, "callbacks": [steps]}
    head = {"defaults": [str(RECIPE / "conf" / f"{configuration}.yaml"), "_self_"]}
    file = folder / "settings.yaml"
    file.write_text(yaml.safe_dump({**head, **SETTINGS, **moved, "trainer": trainer}))
    command = [sys.executable, RECIPE / "run.py", "--stages", "train"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    done = subprocess.run(
        [*command, "--training_config", file],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(exp.glob("rank*"))
    ]


def weights(folder):
    state = torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]
    return torch.cat([value.flatten().float() for value in state.values()])


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("espnet3", "lightning", "jiwer"))),
    reason="ESPnet3's recipes came with ESPnet 202611",
)
def test_two_processes_train_like_one_and_go_on(tmp_path, assert_close_espnet):
    """Two start anew for the second epoch, one does not."""
    write_corpus(tmp_path)
    (tmp_path / "steps.py").write_text(CALLBACK)

    (one,) = train(tmp_path, "training", 2)
    train(tmp_path, "training_ddp", 1)
    two = train(tmp_path, "training_ddp", 2)

    assert len(two) == 2
    for process in (one, *two):
        assert [step["step"] for step in process] == [1, 2, 3, 4]
        assert {step["decoder"] for step in process} == {"espnet_mega_bias.decoder"}
        assert {step["criterion"] for step in process} == {
            one[0]["criterion"]
        }  # the same loss
        assert [s["rate"] for s in process] == [s["rate"] for s in one]
    # two processes in each of two runs
    assert len({step["process"] for process in two for step in process}) == 4

    losses = torch.tensor([[step["loss"] for step in process] for process in two])
    assert ((losses[0] - losses[1]).abs() > 0.01 * losses[0]).all()
    wanted = torch.tensor([step["loss"] for step in one])
    assert wanted.max() > 1.01 * wanted.min()
    assert_close_espnet(losses.mean(dim=0), wanted)
    assert_close_espnet(
        weights(tmp_path / "training_ddp"), weights(tmp_path / "training")
    )
