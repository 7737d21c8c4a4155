"""compare.sh, with a run.sh that only writes what the real one would."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPARE_SH = ROOT / "egs/TEMPLATE/asr_transducer1/compare.sh"

RUN_SH = r"""#!/usr/bin/env bash
set -eu
here=$(cd "$(dirname "$0")" && pwd)
echo "$@" >>"$here/calls"
stop_stage=6
speaker=
while [ $# -gt 0 ]; do
    case $1 in
    --train_config) config=$2 ;;
    --seed) seed=$2 ;;
    --expdir) expdir=$2 ;;
    --stop_stage) stop_stage=$2 ;;
    --speaker) speaker=$2 ;;
    --python | --archive) ;;
    *) exit 2 ;;
    esac
    shift 2
done
[ "$stop_stage" -eq 6 ] || exit 0
name=$(basename "$config" .yaml)_$seed
if [ -f "$here/$name.slow" ]; then
    echo $$ >"$here/started"
    trap 'kill "$sleeper"; echo "$name" >"$here/interrupted"; exit 143' TERM
    sleep 60 &
    sleeper=$!
    wait
fi
if [ -f "$here/$name.broken" ]; then
    echo "the disk is full"
    exit 1
fi
mkdir -p "$expdir"
sed -e "s,CONFIG,$config," -e "s,SEED,$seed," -e "s,SPEAKER,$speaker," \
    "$here/facts.json" >"$expdir/results.json"
"""


@pytest.fixture
def recipe(tmp_path):
    errors = {"words": 2, "word_errors": 1, "characters": 8, "character_errors": 1}
    errors = {**errors, "utterances": 1, "by_utterance": {"u": 1}}
    facts = {
        "train_config": "CONFIG",
        "decoder": "rnn",
        "seed": "SEED",
        "epochs": 3,
        "minutes": 1.0,
        "parameters": 10,
        "decoder_parameters": 5,
        "versions": {"espnet": "1"},
        "fold": {"name": "SPEAKER", "options": "--speaker SPEAKER"},
        "searches": {"default": {"real_time_factor": 0.1, "sets": {"test": errors}}},
    }
    text = json.dumps(facts).replace('"SEED"', "SEED")
    (tmp_path / "facts.json").write_text(text)
    (tmp_path / "run.sh").write_text(RUN_SH)
    (tmp_path / "run.sh").chmod(0o755)
    return tmp_path


def command(recipe, *options):
    trainings = ["train_rnn:1", "train_mega_bias:1", "train_mega_bias:2"]
    return [
        COMPARE_SH,
        *("--recipe", recipe, "--title", "T", "--reference", "train_rnn"),
        *(word for training in trainings for word in ("--training", training)),
        *("--python", sys.executable, *options),
    ]


def run(recipe, *options):
    return subprocess.run(
        command(recipe, *options), text=True, capture_output=True, check=False
    )


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_all_are_trained_and_compared(recipe, jobs):
    done = run(recipe, "--jobs", jobs, "--", "--archive", "some file")

    assert done.returncode == 0, done.stdout + done.stderr
    table = (recipe / "exp/comparison/RESULTS.md").read_text()
    assert table in done.stdout
    for row in ("train_rnn | 1", "train_mega_bias | 1", "train_mega_bias | 2"):
        assert f"| {row} | 10 | 5 | 1 | default | 0.10 | 50.0 (1) |" in table
    calls = (recipe / "calls").read_text().splitlines()
    # with several at a time, the data are made once, before them
    assert len(calls) == (3 if jobs == "1" else 4)
    assert all(call.endswith("--archive some file") for call in calls)
    assert ("--stop_stage 2" in calls[0]) is (jobs == "2")


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_each_training_is_run_on_each_division(recipe, jobs):
    folds = ("--fold", "--speaker ann", "--fold", "--speaker bob")

    done = run(recipe, *folds, "--jobs", jobs)

    assert done.returncode == 0, done.stdout + done.stderr
    table = (recipe / "exp/comparison/RESULTS.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (\d) \| (\w+) \| 10 \|", table, re.MULTILINE)
    trained = [("train_rnn", "1"), ("train_mega_bias", "1"), ("train_mega_bias", "2")]
    assert rows == [(*one, name) for one in trained for name in ("ann", "bob")]
    assert len({*(recipe / "exp/comparison").glob("*/results.json")}) == 6
    assert (recipe / "exp/comparison/train_rnn_seed1_speaker_bob").is_dir()
    calls = (recipe / "calls").read_text().splitlines()
    # each division has data of its own, made before several trainings use them
    first = [call for call in calls if "--stop_stage 2" in call]
    assert first == ([] if jobs == "1" else calls[:2])
    assert [call.split("--speaker ")[1][:3] for call in calls[:2]] == ["ann", "bob"]


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_failure_is_told_and_makes_no_table(recipe, jobs):
    (recipe / "train_mega_bias_1.broken").touch()

    done = run(recipe, "--jobs", jobs)

    assert done.returncode == 1
    assert not (recipe / "exp/comparison/RESULTS.md").exists()
    assert "the disk is full" in done.stdout
    if jobs == "2":  # the others are not lost
        assert "train_mega_bias_seed1: failed: the disk is full" in done.stdout
        assert "not all trainings came to their end" in done.stderr
        for name in ("train_rnn_seed1", "train_mega_bias_seed2"):
            assert (recipe / f"exp/comparison/{name}/results.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_reaches_the_trainings(recipe, number):
    (recipe / "train_rnn_1.slow").touch()
    process = subprocess.Popen(
        command(recipe, "--jobs", "2"),
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 30
    while not (recipe / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)

    process.send_signal(number)

    assert process.wait(30) == 130
    assert (recipe / "interrupted").read_text() == "train_rnn_1\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int((recipe / "started").read_text()), 0)


def test_bad_options_are_told(recipe):
    for options, message in (
        (["--jobs", "0"], "--jobs is a number from 1 to 99, not '0'"),
        (["--job", "2"], "unknown option '--job'"),
        (["--jobs"], "option --jobs needs a value"),
    ):
        done = run(recipe, *options)
        assert done.returncode == 1
        assert done.stderr.startswith(f"compare.sh: error: {message}")


def test_a_reference_is_not_needed(recipe):
    done = run(recipe, "--reference", "")

    assert done.returncode == 0, done.stderr
    assert "## Seeds" in done.stdout
    assert "## Against" not in done.stdout


def test_a_recipes_other_comparison_has_its_own_name(recipe):
    asked = run(recipe, "--script", "compare_long.sh", "--help")
    refused = run(recipe, "--script", "compare_long.sh", "--job", "2")

    assert asked.stdout.startswith("Usage: ./compare_long.sh [options]")
    assert refused.stderr.startswith("compare_long.sh: error: unknown option '--job'")


@pytest.mark.parametrize(
    "script",
    sorted({*ROOT.glob("egs/*/*/compare*.sh")} - {COMPARE_SH}),
    ids=lambda path: path.name,
)
def test_each_recipes_comparisons_explain_themselves(script):
    done = subprocess.run(
        [script, "--help"], text=True, capture_output=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: ./{script.name} [options]")
    assert re.search(r"^  \w+:1$", done.stdout, re.MULTILINE), "what is trained"
