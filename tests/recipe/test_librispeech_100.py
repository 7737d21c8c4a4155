"""egs/librispeech_100/asr_transducer1: run.sh on a stub of an ESPnet checkout, and its
configurations at full size.

What the stub stands for is not here: the corpus, Kaldi's scripts, and ESPnet's egs2.
"""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from espnet2.asr_transducer.beam_search_transducer import BeamSearchTransducer
from espnet2.bin.asr_transducer_inference import get_parser as inference_parser
from espnet2.schedulers.warmup_lr import WarmupLR
from espnet2.tasks.asr_transducer import ASRTransducerTask

import espnet_mega_bias

ROOT = Path(__file__).resolve().parents[2]
RUN_SH = ROOT / "egs" / "librispeech_100" / "asr_transducer1" / "run.sh"
CONF = ROOT / "conf"
TRAINING = sorted(CONF.glob("train_librispeech_100_*.yaml"))

# All options of espnet/espnet@f48416b egs2/TEMPLATE/asr1/asr.sh
OPTIONS = re.findall(
    r"\w+",
    """
    stage stop_stage skip_data_prep skip_train skip_eval skip_upload skip_upload_hf
    ngpu num_nodes nj inference_nj gpu_inference dumpdir expdir python
    local_data_opts speed_perturb_factors feats_type audio_format fs
    min_wav_duration max_wav_duration token_type nbpe bpemode oov blank sos_eos
    bpe_input_sentence_size bpe_nlsyms bpe_char_cover
    hugging_face_model_name_or_path use_ngram ngram_exp ngram_num use_lm lm_tag
    lm_exp lm_stats_dir lm_config lm_args use_word_lm num_splits_lm word_vocab_size
    asr_task asr_tag asr_exp asr_stats_dir asr_config asr_args pretrained_model
    ignore_init_mismatch feats_normalize num_splits_asr num_ref num_inf hf_repo
    use_k2 k2_ctc_decoding use_nbest_rescoring num_paths nll_batch_size k2_config
    use_streaming use_maskctc batch_size inference_tag inference_config
    inference_args inference_lm inference_ngram inference_asr_model download_model
    train_set valid_set test_sets bpe_train_text lm_train_text lm_dev_text
    lm_test_text nlsyms_txt cleaner g2p lang score_opts local_score_opts
    asr_speech_fold_length asr_text_fold_length lm_fold_length
    """,
)

# It tells what it was called with, where, and what it finds there.
ASR_SH = """#!/usr/bin/env bash
set -euo pipefail
{variables}
printf '%s\\n' "$@" >arguments
. ./path.sh
. ./cmd.sh
. ./db.sh
[ -f utils/parse_options.sh ] && [ -x local/data.sh ] && [ -f conf/slurm.conf ]
printf '%s\\n' "$LIBRISPEECH" "$train_cmd" "$MAIN_ROOT" "$(command -v python3)" >found
"""
PATH_SH = """MAIN_ROOT=$PWD/../../..
export PATH=$PWD/utils/:$PATH
. "$MAIN_ROOT"/tools/activate_python.sh
"""


def write(path, text, executable=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if executable:
        path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the links that ESPnet's has, set up for the tests' Python."""
    root = tmp_path / "espnet"
    template = root / "egs2" / "TEMPLATE" / "asr1"
    recipe = root / "egs2" / "librispeech_100" / "asr_transducer1"
    variables = "\n".join(f"{name}=" for name in OPTIONS)
    write(template / "asr.sh", ASR_SH.format(variables=variables), executable=True)
    write(template / "path.sh", PATH_SH)
    write(template / "cmd.sh", "train_cmd=run.pl\n")
    write(template / "db.sh", "AN4=downloads\nLIBRISPEECH=downloads\n")
    kaldi = root / "tools" / "kaldi" / "egs" / "wsj" / "s5"
    write(kaldi / "utils" / "parse_options.sh", "")
    write(kaldi / "steps" / "make_fbank.sh", "")
    python = Path(sys.executable).parent
    write(root / "tools" / "activate_python.sh", f"export PATH={python}:$PATH\n")
    write(recipe / "local" / "data.sh", "", executable=True)
    write(recipe / "conf" / "slurm.conf", "")
    write(recipe / "run.sh", "false\n", executable=True)
    for name in ("utils", "steps"):
        (template / name).symlink_to(f"../../../tools/kaldi/egs/wsj/s5/{name}")
    for name in ("asr.sh", "path.sh", "cmd.sh", "db.sh", "utils", "steps"):
        (recipe / name).symlink_to(f"../../TEMPLATE/asr1/{name}")
    return root


def run(folder, *arguments, **variables):
    env = {
        k: v for k, v in os.environ.items() if k not in ("ESPNET_ROOT", "PYTHONPATH")
    }
    return subprocess.run(
        [RUN_SH, "--workdir", folder / "work", *map(str, arguments)],
        cwd=folder,
        env={**env, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def fails(done, message):
    assert done.returncode == 1
    assert done.stderr == f"run.sh: error: {message}\n"
    assert done.stdout == ""


def test_the_script_is_bash():
    subprocess.run(["bash", "-n", RUN_SH], check=True)


def passed_by_default(printed):
    return [
        line.split()[0]
        for line in printed.partition("All others go to asr.sh")[2].splitlines()[1:]
    ]


def test_every_option_that_is_passed_is_one_of_asr_sh(tmp_path):
    done = run(tmp_path, "--help")

    passed = passed_by_default(done.stdout)
    assert done.returncode == 0
    assert "--asr_task" in passed
    assert len(passed) > 15
    assert {option.removeprefix("--") for option in passed} <= {*OPTIONS}


def test_a_checkout_is_needed(tmp_path):
    fails(
        run(tmp_path),
        "which ESPnet checkout? --espnet_root DIR, or ESPNET_ROOT=DIR in the "
        "environment",
    )
    fails(
        run(tmp_path, "--espnet_root", "missing"),
        f"no such folder: {tmp_path}/missing (--espnet_root, or the variable "
        "ESPNET_ROOT)",
    )
    (tmp_path / "empty").mkdir()
    fails(
        run(tmp_path, ESPNET_ROOT="empty"),
        f"{tmp_path}/empty is no ESPnet checkout with this recipe: "
        "egs2/librispeech_100/asr_transducer1/asr.sh is missing (the pip package has "
        "no egs2; git clone https://github.com/espnet/espnet)",
    )


def test_kaldi_is_needed(tmp_path, checkout):
    (checkout / "tools" / "kaldi").rename(tmp_path / "kaldi")

    fails(
        run(tmp_path, "--espnet_root", checkout),
        "egs2/librispeech_100/asr_transducer1/utils/parse_options.sh in "
        f"{checkout} leads nowhere: Kaldi is not there; link a Kaldi checkout as "
        f"{checkout}/tools/kaldi",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--nbbpe", "500"],
            "neither run.sh nor the asr.sh of {root} has an option --nbbpe (--help)",
        ),
        (["--stage"], "option --stage needs a value"),
        (["--stage=3"], "write '--stage 3', not '--stage=3'"),
        (["5"], "unknown option '5' (--help lists the options)"),
        (["--asr_config", "t.yaml"], "no such file: {cwd}/t.yaml"),
        (["--inference_config", "/no/d.yaml"], "no such file: /no/d.yaml"),
        (["--librispeech", "l"], "no such folder: {cwd}/l (--librispeech)"),
        (
            ["--workdir", "a b"],
            "asr.sh takes no path with a space: move what has one in its path",
        ),
    ],
)
def test_says_in_one_line_what_is_wrong_with_an_option(
    tmp_path, checkout, arguments, message
):
    done = run(tmp_path, "--espnet_root", checkout, *arguments)

    fails(done, message.format(root=checkout, cwd=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["espnet"]


def test_an_asr_sh_without_an_option_of_ours_is_told(tmp_path, checkout):
    path = checkout / "egs2" / "TEMPLATE" / "asr1" / "asr.sh"
    path.write_text(path.read_text().replace("asr_task=\n", ""))

    fails(
        run(tmp_path, "--espnet_root", checkout),
        f"the asr.sh of {checkout} has no option --asr_task: too old or too new an "
        "ESPnet",
    )


def test_a_checkout_without_its_python_is_told(tmp_path, checkout):
    (checkout / "tools" / "activate_python.sh").unlink()

    done = run(tmp_path, "--espnet_root", checkout)

    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith(
        f"run.sh: error: path.sh of {checkout} fails, which sets up its Python: "
    )
    assert line.endswith("activate_python.sh: No such file or directory")


def test_a_python_without_the_plugin_is_told(tmp_path, checkout):
    # -S leaves site-packages out
    python = tmp_path / "bin" / "python3"
    write(python, f'#!/bin/sh\nexec {sys.executable} -S "$@"\n', executable=True)
    activate = checkout / "tools" / "activate_python.sh"
    activate.write_text(f"export PATH={python.parent}:$PATH\n")

    done = run(tmp_path, "--espnet_root", checkout)

    assert done.returncode == 1
    assert f"Checks, with {python}\n" in done.stdout
    assert done.stderr.splitlines()[-1] == (
        "check.py: error: espnet-mega-bias is not installed in "
        f"{sys.executable}; pip install 'espnet-mega-bias[recipe]'"
    )
    assert not (tmp_path / "work" / "arguments").exists()


def snapshot(folder):
    return {
        path: os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


@pytest.fixture
def python(tmp_path, checkout):
    """A stand-in for the checkout's Python, which notes how it is called."""
    path = tmp_path / "bin" / "python3"
    note = '#!/bin/sh\nprintf "%s\\n" "$PYTHONPATH" "$@" >checked\n'
    write(path, note, executable=True)
    activate = checkout / "tools" / "activate_python.sh"
    activate.write_text(f"export PATH={path.parent}:$PATH\n")
    return path


def test_asr_sh_is_run_in_the_workdir_and_the_checkout_stays_as_it_is(
    tmp_path, checkout, python
):
    before = snapshot(checkout)
    work = tmp_path / "work"
    (tmp_path / "corpus").mkdir()
    write(work / "cmd.sh", "train_cmd=slurm.pl\n")  # the user's own
    (work / "asr.sh").symlink_to("/an/earlier/checkout/asr.sh")
    chunk = CONF / "train_librispeech_100_mega_bias_chunk.yaml"
    own = ["--asr_config", os.path.relpath(chunk, tmp_path), "--stage", "11"]

    done = run(tmp_path, "--espnet_root", "espnet", "--librispeech", "corpus", *own)

    assert done.returncode == 0, done.stderr
    words = (work / "arguments").read_text().splitlines()
    passed = dict(zip(words[::2], words[1::2], strict=True))
    assert len(words) > 2 * 15
    assert {name.removeprefix("--") for name in passed} <= {*OPTIONS}
    assert passed["--asr_task"] == "asr_transducer"
    assert passed["--stage"] == "11"
    assert os.path.samefile(passed["--asr_config"], chunk)
    assert passed["--inference_config"] == str(CONF / "decode_default.yaml")
    found = (work / "found").read_text().splitlines()
    assert found[:2] == [str(tmp_path / "corpus"), "slurm.pl"]
    assert os.path.samefile(found[2], checkout)
    assert found[3] == str(python)
    assert (work / "checked").read_text().splitlines() == [
        str(ROOT / "egs" / "TEMPLATE"),
        *("-m", "recipe.check"),
        *("--train_config", passed["--asr_config"]),
        *("--decode_config", passed["--inference_config"]),
        *("--normalize", "global_mvn"),
    ]
    assert snapshot(checkout) == before
    assert not (work / "run.sh").exists()


def test_check_stops_before_asr_sh(tmp_path, checkout, python):
    done = run(tmp_path, "--espnet_root", checkout, "--check")

    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Checks, with {python}\n"
    assert (tmp_path / "work" / "checked").is_file()
    assert not (tmp_path / "work" / "arguments").exists()


# --- the configurations, at the recipe's size

VOCABULARY = 500  # --nbpe
SECONDS, LABELS = 12, 66  # as the longer half of LibriSpeech has


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Return a function that builds the model as asr.sh's stage 11 does."""
    espnet_mega_bias.register()
    folder = tmp_path_factory.mktemp("librispeech")
    tokens = [
        "<blank>",
        "<unk>",
        *(f"▁{n}" for n in range(VOCABULARY - 3)),
        "<sos/eos>",
    ]
    (folder / "tokens.txt").write_text("\n".join(tokens) + "\n")
    np.savez(
        folder / "feats_stats.npz",
        count=np.array(100),
        sum=np.zeros(80),
        sum_square=np.full(80, 100.0),
    )

    def make(config):
        args = ASRTransducerTask.get_parser().parse_args(
            f"""
            --use_preprocessor true --token_type bpe --token_list {folder}/tokens.txt
            --bpemodel {folder}/bpe.model --non_linguistic_symbols none --cleaner none
            --g2p none --valid_data_path_and_name_and_type w,speech,kaldi_ark
            --valid_shape_file s --resume true --ignore_init_mismatch false
            --fold_length 80000 --fold_length 150 --output_dir {folder}
            --config {config} --frontend_conf fs=16k
            --normalize=global_mvn --normalize_conf stats_file={folder}/feats_stats.npz
            --ngpu 1 --multiprocessing_distributed true
            """.split()
        )
        return args, ASRTransducerTask.build_model(args)

    return make


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.parametrize("config", TRAINING, ids=lambda path: path.stem)
def test_a_training_step_and_searches_at_full_size(build, config):
    args, model = build(config)
    speech = 0.1 * torch.randn(1, SECONDS * 16000)
    labels = torch.randint(2, VOCABULARY - 1, (1, LABELS))
    (optimizer,) = ASRTransducerTask.build_optimizers(args, model)
    WarmupLR(optimizer, **args.scheduler_conf)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    loss, statistics, _ = model(
        speech, torch.tensor([speech.size(1)]), labels, torch.tensor([LABELS])
    )
    loss.backward()
    optimizer.step()

    assert torch.isfinite(loss)
    assert {"loss_transducer", "loss_aux_ctc"} <= {*statistics}
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    moved = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    assert any("rel_pos_bias" in name for name in moved)
    assert len(moved) > 0.9 * len(before)

    model.eval()
    model.encoder.dynamic_chunk_training = False
    with torch.no_grad():
        encoded, _ = model.encode(speech, torch.tensor([speech.size(1)]))
        # The default search leaves a frame only once blanks win, of which an untrained
        # model is not sure; with more of them, maes would drop every label.
        for name, blanks in {"decode_default": 7.0, "decode_maes": 2.0}.items():
            model.joint_network.lin_out.bias[0] = blanks
            conf = inference_parser().parse_args(
                f"""
                --batch_size 1 --ngpu 0 --data_path_and_name_and_type w,speech,kaldi_ark
                --key_file k --asr_train_config c --asr_model_file m --output_dir o
                --config {CONF / name}.yaml
                """.split()
            )
            search = BeamSearchTransducer(
                model.decoder,
                model.joint_network,
                conf.beam_size,
                nbest=conf.beam_size,
                **conf.beam_search_config,
            )
            nbest = search(encoded[0])
            assert len(nbest) == conf.beam_size
            assert any(len(hypothesis.yseq) > 1 for hypothesis in nbest)
            assert np.isfinite([float(hypothesis.score) for hypothesis in nbest]).all()


def test_data_and_units_are_those_of_espnets_recipe(tmp_path):
    """They are what its published results are to be compared under."""
    printed = run(tmp_path, "--help").stdout

    for line in (
        "--nbpe '500'",
        "--speed_perturb_factors '0.9 1.0 1.1'",
        "--max_wav_duration '30'",
        "--train_set 'train_clean_100'",
        "--test_sets 'test_clean test_other dev_clean dev_other'",
    ):
        assert f"  {line}\n" in printed


def test_the_configurations_average_what_run_sh_decodes_with():
    assert len(TRAINING) == 2
    for path in TRAINING:
        conf = yaml.safe_load(path.read_text())
        assert conf["best_model_criterion"] == [["valid", "loss", "min"]]
        assert conf["keep_nbest_models"] > 1
