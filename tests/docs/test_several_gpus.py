"""The commands of docs/several_gpus.md, as far as they go without GPUs."""

import importlib.util
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from espnet2.asr_transducer.encoder.blocks.conv_input import ConvInput
from espnet2.bin.asr_transducer_inference import get_parser as inference_parser
from espnet2.bin.asr_transducer_train import get_parser
from espnet2.bin.launch import get_parser as launch_parser
from espnet2.train import distributed_utils

from docs.pages import blocks, read, run_shell

PAGE = read("several_gpus.md")
COMMANDS = [text for text in blocks(PAGE, "text") if "espnet2.bin" in text]
VALUES = {"$GPUS": "4", "$NODES": "2", "$NODE": "1", "$HOST": "node0", "$PORT": "29500"}

# What a launcher sets; each process of srun gets the like.
ENVIRONMENTS = {
    "torchrun": {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"},
    "srun": {
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "node0,node1",
    },
}


def words(command):
    return [
        VALUES.get(word, word)
        for word in shlex.split(command)
        if "options[" not in word
    ]


def after(word, command):
    return command[command.index(word) + 1 :]


@pytest.mark.parametrize(
    "command",
    [text for text in COMMANDS if "bin.asr_transducer_train" in text],
    ids=lambda text: text.split()[0] + "_" + text.split()[2],
)
def test_espnet_sees_a_distributed_training(command, monkeypatch):
    launcher, *rest = words(command)

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ENVIRONMENTS.get(launcher, {}).items():
        monkeypatch.setenv(name, value)

    if "espnet2.bin.launch" in rest:
        args = launch_parser().parse_args(after("espnet2.bin.launch", rest))
        assert args.args == ["python", "-m", "espnet2.bin.asr_transducer_train"]
        assert (args.ngpu, args.num_nodes, args.master_port) == (4, 2, 29500)
        return

    args = get_parser().parse_args(
        [*after("espnet2.bin.asr_transducer_train", rest), "--output_dir", "unused"]
    )
    assert not args.unused_parameters

    distributed_utils.resolve_distributed_mode(args)

    assert args.distributed
    assert args.multiprocessing_distributed == (launcher != "torchrun")
    assert args.dist_backend == "nccl"

    if "$NODES" in command or launcher == "srun":
        assert (
            distributed_utils.get_num_nodes(args.dist_world_size, args.dist_launcher)
            == 2
        )


def test_the_decoding_command_is_taken():
    (command,) = (text for text in COMMANDS if "transducer_inference" in text)
    options = words(command)[3:]
    options = [word for word in options if word not in ("--config", "decode.yaml")]

    assert inference_parser().parse_args(options).key_file == "keys.1"


@pytest.mark.skipif(
    importlib.util.find_spec("egs3") is None, reason="ESPnet3 came with ESPnet 202611"
)
def test_the_keys_are_those_of_espnet3s_template():
    (folder,) = importlib.util.find_spec("egs3").submodule_search_locations
    template = Path(folder) / "TEMPLATE" / "esp2_asr" / "conf" / "training.yaml"
    (block,) = blocks(PAGE, "yaml")

    def check(ours, theirs):
        for key, value in ours.items():
            assert key in theirs
            if isinstance(value, dict):
                check(value, theirs[key])

    check(yaml.safe_load(block), yaml.safe_load(template.read_text()))


# What makes the losses of several processes those of one: nothing random, and no
# statistics over a batch, which BatchNorm in a Conformer's convolutions takes.
CONFIGURATION = """
input_size: 12
token_type: char
decoder: mega_bias
decoder_conf: {rel_pos_bias_type: rotary, block_size: 8, linear_size: 8, qk_size: 4,
    v_size: 8, embed_dropout_rate: 0, dropout_rate: 0, att_dropout_rate: 0,
    ffn_dropout_rate: 0}
encoder_conf:
    main_conf: {pos_enc_dropout_rate: 0}
    input_conf: {conv_size: 4, subsampling_factor: 4}
    body_conf: [{block_type: ebranchformer, hidden_size: 8, linear_size: 8, heads: 1,
        conv_mod_kernel_size: 3}]
joint_network_conf: {joint_space_size: 8}
model_conf: {auxiliary_ctc_weight: 0.3}
batch_type: unsorted
batch_size: 3  # two utterances for one process, one for the other
num_workers: 0
optim: sgd
optim_conf: {lr: 0.05}
scheduler: warmuplr
scheduler_conf: {warmup_steps: 3}
"""
OPTIONS = """
options=(--config train.yaml --token_list tokens.txt)
for part in train valid; do
    options+=(--${part}_data_path_and_name_and_type $part.scp,speech,npy
        --${part}_data_path_and_name_and_type $part.txt,text,text
        --${part}_shape_file $part.shape)
done
"""


def write_features(folder):
    """Write six utterances to train on, and three more."""
    (folder / "train.yaml").write_text(CONFIGURATION)
    (folder / "tokens.txt").write_text("<blank>\n<unk>\nA\nB\n<sos/eos>\n")
    noise = np.random.default_rng(0)
    # ESPnet 202511 counts the padding of a batch as frames of each of its utterances
    masks = hasattr(ConvInput, "get_output_lengths")
    for part, frames in {
        "train": (50, 70, 90, 60, 80, 40) if masks else (60,) * 6,
        "valid": (50, 70, 60) if masks else (60,) * 3,
    }.items():
        names = [f"{part}{number}" for number in range(len(frames))]
        for name, length in zip(names, frames, strict=True):
            np.save(folder / name, noise.normal(size=(length, 12)).astype(np.float32))
        for ending, values in {
            "scp": [folder / f"{name}.npy" for name in names],
            "txt": ["ABBA"[: 1 + number % 4] for number in range(len(names))],
            "shape": [f"{length},12" for length in frames],
        }.items():
            lines = (f"{n} {v}\n" for n, v in zip(names, values, strict=True))
            (folder / f"{part}.{ending}").write_text("".join(lines))


@pytest.mark.slow
def test_two_processes_train_like_one_and_go_on(tmp_path, assert_close_espnet):
    """Each starts anew for the second epoch, torchrun's by the form for nodes."""
    write_features(tmp_path)
    torchrun, nodes = blocks(PAGE, "sh")
    assert "torchrun" in torchrun
    assert "--multiprocessing_distributed true" in nodes
    nodes = nodes.replace("exp/two_nodes", "exp/two_processes")

    printed = run_shell(
        f"{OPTIONS}"
        "python -m espnet2.bin.asr_transducer_train"
        ' "${options[@]}" --max_epoch 2 --output_dir exp/one_process\n'
        "options+=(--resume true --max_epoch 1)\n"
        f"{torchrun}"
        "options+=(--max_epoch 2)\n"
        f"port={distributed_utils.free_port()}\n{nodes}",
        tmp_path,
    )

    # of three commands, the last two log with rank and number of processes
    started = re.findall(r"(:0/2)?\] .* (\d)/(\d)epoch started", printed)
    assert started == [
        ("", "1", "2"),
        ("", "2", "2"),
        (":0/2", "1", "1"),
        (":0/2", "2", "2"),
    ]
    one, two = (
        torch.load(tmp_path / "exp" / name / "checkpoint.pth", weights_only=False)
        for name in ("one_process", "two_processes")
    )
    for part in ("train", "valid"):
        losses = []
        for states in (one, two):
            stats = states["reporter"]["stats"]
            losses.append([stats[epoch][part]["loss"] for epoch in (1, 2)])
        ours, wanted = map(torch.tensor, reversed(losses))
        assert wanted[1] < 0.99 * wanted[0]
        assert_close_espnet(ours, wanted)
    assert_close_espnet(
        *(
            torch.cat([value.flatten().float() for value in states["model"].values()])
            for states in (two, one)
        )
    )
    assert two["schedulers"] == one["schedulers"]


# A script, because spawned processes import their parent's main module again.
SPAWNING = """
from pathlib import Path

import torch
from espnet2.bin.asr_transducer_train import main

set_device = torch.cuda.set_device


def look(number):
    from espnet2.tasks.asr_transducer import decoder_choices

    # Two that print at a time could write into each other's lines.
    decoder = decoder_choices.get_class("mega_bias")
    Path(f"worker{number}").write_text(decoder.__module__)
    torch.distributed.barrier()
    set_device(number)


torch.cuda.set_device = look

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs, it would go on")
def test_spawned_workers_know_the_decoder_and_stop_for_want_of_a_gpu(tmp_path):
    write_features(tmp_path)
    (tmp_path / "spawning.py").write_text(SPAWNING)
    command = 'python spawning.py "${options[@]}" --ngpu 2 --dist_backend gloo'
    command += " --multiprocessing_distributed true --output_dir exp"

    printed = run_shell(f"{OPTIONS}! {command}", tmp_path)

    workers = {path.name: path.read_text() for path in tmp_path.glob("worker*")}
    assert workers == dict.fromkeys(["worker0", "worker1"], "espnet_mega_bias.decoder")
    assert "set_device(number)" in printed
    assert not (tmp_path / "exp" / "config.yaml").exists()


@pytest.mark.parametrize("ngpu", [0, 1])
def test_on_one_node_without_several_gpus_one_process_trains(ngpu, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    options = ["--multiprocessing_distributed", "true", "--output_dir", "unused"]
    args = get_parser().parse_args([*options, "--ngpu", str(ngpu)])

    distributed_utils.resolve_distributed_mode(args)

    assert not args.distributed
    assert not args.multiprocessing_distributed
