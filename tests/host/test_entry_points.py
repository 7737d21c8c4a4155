"""`decoder: mega_bias` in ESPnet's own commands, each started in a new process.

Importing ESPnet takes most of the time, so each command runs once for the wheel and
once for the editable install, both at the same time; the tests read the results.
"""

import importlib.metadata
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import soundfile
import yaml

pytestmark = [pytest.mark.host, pytest.mark.slow]

KINDS = ("wheel", "editable")
TOKENS = ("<blank>", "<unk>", "a", "b", "<sos/eos>")
RATE = 16000
TRAINING = {
    "encoder_conf": {
        "body_conf": [
            {
                "block_type": "conformer",
                "hidden_size": 8,
                "linear_size": 8,
                "heads": 2,
                "conv_mod_kernel_size": 3,
            }
        ]
    },
    "decoder": "mega_bias",
    "decoder_conf": {
        "block_size": 8,
        "linear_size": 8,
        "qk_size": 4,
        "v_size": 8,
        "num_heads": 2,
        "num_blocks": 1,
        "rel_pos_bias_type": "rotary",
        "max_positions": 32,
    },
    "joint_network_conf": {"joint_space_size": 8},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Two seconds of noise with a transcript, as ESPnet2 wants its data."""
    folder = tmp_path_factory.mktemp("corpus")
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 2 * RATE)
    soundfile.write(folder / "utt.wav", noise, RATE)
    (folder / "wav.scp").write_text(f"utt {folder / 'utt.wav'}\n")
    (folder / "text").write_text("utt abab\n")
    (folder / "shape").write_text(f"utt {len(noise)}\n")
    (folder / "tokens.txt").write_text("\n".join(TOKENS) + "\n")
    (folder / "train.yaml").write_text(yaml.safe_dump(TRAINING))
    return folder


@pytest.fixture(scope="module")
def train(in_each, corpus, tmp_path_factory):
    """Train for one epoch, validation included."""
    options = ["--token_list", corpus / "tokens.txt", "--token_type", "char"]
    for part in ("train", "valid"):
        for file, name, kind in (("wav.scp", "speech", "sound"), ("text",) * 3):
            options += [
                f"--{part}_data_path_and_name_and_type",
                f"{corpus / file},{name},{kind}",
            ]
        options += [f"--{part}_shape_file", corpus / "shape"]

    def run(kind, environment):
        folder = tmp_path_factory.mktemp(f"train_{kind}")
        done = environment.run(
            "-m", "espnet2.bin.asr_transducer_train",
            "--config", corpus / "train.yaml", "--output_dir", "exp",
            "--ngpu", 0, "--num_workers", 0, "--max_epoch", 1,
            "--batch_type", "unsorted", "--batch_size", 1,
            *options, cwd=folder,
        )  # fmt: skip
        return done, folder / "exp"

    return in_each(run)


@pytest.fixture(scope="module")
def inference(in_each, corpus, train, tmp_path_factory):
    """Decode the utterance with ESPnet2's command."""

    def run(kind, environment):
        folder = tmp_path_factory.mktemp(f"inference_{kind}")
        _, exp = train[kind]
        done = environment.run(
            "-m", "espnet2.bin.asr_transducer_inference",
            "--asr_train_config", exp / "config.yaml",
            "--asr_model_file", exp / "latest.pth",
            "--data_path_and_name_and_type", f"{corpus / 'wav.scp'},speech,sound",
            "--output_dir", "decoded", "--num_workers", 0, "--beam_size", 2,
            cwd=folder,
        )  # fmt: skip
        return done, folder / "decoded"

    return in_each(run)


# A script file, because a spawned process imports its parent's main module again.
SPEECH2TEXT = """
import multiprocessing
import sys

import numpy as np


def in_a_new_process(decoder, labels):
    from espnet2.tasks.asr_transducer import decoder_choices

    import espnet_mega_bias

    assert decoder_choices.get_class("mega_bias") is type(decoder)
    return espnet_mega_bias.__file__, decoder(labels).detach().numpy()


if __name__ == "__main__":
    from espnet2.bin.asr_transducer_inference import Speech2Text

    config, model = sys.argv[1:]
    speech2text = Speech2Text(config, model, beam_size=2)
    speech = np.random.default_rng(1).uniform(-0.5, 0.5, 16000).astype("float32")
    print("score", speech2text(speech)[0].score)

    import torch

    decoder = speech2text.asr_model.decoder.eval()
    labels = torch.tensor([[0, 2, 3, 2]])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        path, there = pool.apply(in_a_new_process, (decoder, labels))
    here = decoder(labels).detach().numpy()
    assert np.array_equal(here, there), np.abs(here - there).max()
    print("spawned", path, type(decoder).__module__, here.std())
"""


@pytest.fixture(scope="module")
def speech2text(in_each, train, tmp_path_factory):
    """Load the model in another directory, and spawn a process from there."""

    def run(kind, environment):
        folder = tmp_path_factory.mktemp(f"speech2text_{kind}")
        (folder / "script.py").write_text(SPEECH2TEXT)
        _, exp = train[kind]
        return environment.run(
            "script.py", exp / "config.yaml", exp / "latest.pth", cwd=folder
        )

    return in_each(run)


RUN_PY = """
from espnet3.systems.esp2_asr.system import ASRSystem
from espnet3.systems.launch import launch

if __name__ == "__main__":
    launch(ASRSystem)
"""
DATASET = """
import numpy as np

from espnet3.components.data.base_dataset import BaseDataset
from espnet3.contract import Field


class Dataset(BaseDataset):
    fields = (Field("speech", "audio"), Field("text", "text"))

    def __len__(self):
        return 2

    def __getitem__(self, index):
        noise = np.random.default_rng(int(index)).uniform(-0.5, 0.5, 16000)
        return {"speech": noise.astype(np.float32), "text": "abab"}
"""
ESPNET3_TRAINING = {
    "task": "espnet3.systems.esp2_asr.src.transducer_task.ASRTransducerTask",
    "dataset": {
        "train": [{"data_src_args": {}}],
        "valid": [{"data_src_args": {}}],
        "preprocessor": {
            "_target_": "espnet2.train.preprocessor.CommonPreprocessor",
            "token_type": "char",
            "token_list": "${recipe_dir}/tokens.txt",
        },
    },
    # The recipe brings its tokens: these two files are all that is asked for.
    "tokenizer": {"save_path": "${recipe_dir}", "model_type": "char"},
    "model": {**TRAINING, "token_list": "${recipe_dir}/tokens.txt"},
    "best_model_criterion": [["valid/loss", 1, "min"]],
    "dataloader": {"train": {"iter_factory": {"batches": {"batch_size": 1}}}},
    "trainer": {
        "accelerator": "cpu",
        "max_epochs": 1,
        "limit_train_batches": 1,
        "limit_val_batches": 1,
        "log_every_n_steps": 1,
    },
}


@pytest.fixture(scope="module")
def espnet3(in_each, tmp_path_factory):
    """Run ESPnet3's stage `train` in a recipe of its form."""
    if int(importlib.metadata.version("espnet").split(".")[0]) < 202609:
        pytest.skip("this ESPnet has no ESPnet3 transducer task; it came in 202609")

    def run(kind, environment):
        recipe = tmp_path_factory.mktemp(f"espnet3_{kind}")
        (recipe / "run.py").write_text(RUN_PY)
        (recipe / "dataset").mkdir()
        (recipe / "dataset" / "__init__.py").write_text(DATASET)
        (recipe / "tokens.txt").write_text("\n".join(TOKENS) + "\n")
        for suffix in ("model", "vocab"):
            (recipe / f"char.{suffix}").write_text("")
        for part in ("train", "valid"):
            stats = recipe / "exp" / "stats" / part
            stats.mkdir(parents=True)
            (stats / "feats_shape").write_text("0 126,80\n1 126,80\n")
        (recipe / "training.yaml").write_text(yaml.safe_dump(ESPNET3_TRAINING))
        done = environment.run(
            "run.py", "--stages", "train",
            "--training_config", "training.yaml", cwd=recipe,
        )  # fmt: skip
        return done, recipe / "exp" / "training"

    return in_each(run)


@pytest.fixture(scope="module")
def parser(environments, make_environment):
    """Ask ESPnet2's parser for the decoder: installed, and after `pip uninstall`."""
    code = (
        "import sys; from espnet2.bin.asr_transducer_train import get_parser, main\n"
        "print(get_parser().format_help())\n"
        # ESPnet prints the configuration of sys.argv, not of main's argument.
        "sys.argv[1:] = ['--decoder', 'mega_bias', '--print_config']; main()"
    )
    uninstalled = make_environment("wheel")
    uninstalled.uninstall()
    with ThreadPoolExecutor() as pool:
        return dict(
            zip(
                ("installed", "uninstalled"),
                pool.map(
                    lambda environment: environment.run("-c", code),
                    (environments["editable"], uninstalled),
                ),
                strict=True,
            )
        )


def succeeded(done):
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert "espnet_mega_bias is not registered" not in done.stderr
    return done


@pytest.mark.parametrize("kind", KINDS)
def test_asr_transducer_train_trains_and_says_which_loss(train, kind):
    done, exp = train[kind]
    succeeded(done)
    config = yaml.safe_load((exp / "config.yaml").read_text())
    assert config["decoder"] == "mega_bias"
    lines = re.findall(r".*the transducer loss is torchaudio's.*", done.stderr)
    assert len(lines) == 1
    assert "warprnnt_pytorch is not installed" in lines[0]
    losses = re.findall(r"loss_transducer=([0-9.e+-]+)", done.stderr)
    assert len(losses) >= 2  # training and validation
    assert all(0 < float(loss) < 1e4 for loss in losses)


@pytest.mark.parametrize("kind", KINDS)
def test_asr_transducer_inference_decodes_without_a_loss(inference, kind):
    done, decoded = inference[kind]
    succeeded(done)
    score = (decoded / "1best_recog" / "score").read_text()
    assert np.isfinite(float(score.split()[1]))
    assert "transducer loss" not in done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_speech2text_in_another_directory_and_a_spawned_process(
    speech2text, environments, kind
):
    """D5, E5."""
    done = succeeded(speech2text[kind])
    score = re.search(r"^score (\S+)$", done.stdout, re.MULTILINE)[1]
    assert np.isfinite(float(score))
    path, module, spread = re.search(
        r"^spawned (\S+) (\S+) (\S+)$", done.stdout, re.MULTILINE
    ).groups()
    assert path.startswith(str(environments[kind].folder.parent))
    assert module == "espnet_mega_bias.decoder"
    assert float(spread) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_espnet3_trains(espnet3, kind):
    done, exp = espnet3[kind]
    succeeded(done)
    config = yaml.safe_load((exp / "config.yaml").read_text())
    assert config["decoder"] == "mega_bias"
    assert (exp / "last.ckpt").stat().st_size > 0
    assert "the transducer loss is torchaudio's" in done.stderr + done.stdout


def test_the_parser_lists_the_decoder_and_prints_its_configuration(parser):
    """E7."""
    done = succeeded(parser["installed"])
    assert re.search(r"--decoder \{[^}]*\bmega_bias\b[^}]*\}", done.stdout)
    assert re.search(r"^decoder: mega_bias$", done.stdout, re.MULTILINE)


def test_without_the_plugin_espnet_says_that_the_decoder_is_unknown(parser):
    done = parser["uninstalled"]
    assert done.returncode == 2
    assert "mega_bias" not in done.stdout
    assert re.search(r"invalid choice: '?mega_bias'?", done.stderr)
