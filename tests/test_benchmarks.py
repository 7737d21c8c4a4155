import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tools.conftest import make_experiment

__all__ = ["make_experiment"]

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.mark.parametrize("name", ["bias", "linear", "step", "training"])
def test_benchmark_runs_and_writes_what_it_prints(name, tmp_path):
    report, picture = tmp_path / "report.json", tmp_path / "cost.svg"
    command = [sys.executable, BENCHMARKS / f"bench_{name}.py", "--smoke"]
    command += ["--threads", "1", "--json", report]
    command += ["--plot", picture] if name == "step" else []

    printed = subprocess.check_output(
        command, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    written = json.loads(report.read_text())

    assert printed.splitlines()[0] == written["machine"]

    for work, row in written["rows"].items():
        assert min(row.values()) > 0
        assert f"| {work} | {row['espnet']:.2f} | {row['ours']:.2f} |" in printed

    assert name != "step" or "</svg>" in picture.read_text()


def test_training_benchmark_says_where_the_time_goes():
    printed = subprocess.check_output(
        [sys.executable, BENCHMARKS / "bench_training.py", "--smoke", "--parts"],
        text=True,
    )

    assert "linear layers: " in printed
    assert "attention: " in printed


def test_onnx_benchmark_counts_what_is_the_same(make_experiment, tmp_path):
    folder = make_experiment(token_type="char")
    (checkpoint,) = folder.glob("*.pth")
    state = torch.load(checkpoint, weights_only=True)
    # The search leaves a frame only once blanks win.
    state["joint_network.lin_out.bias"][0] += 4.0
    torch.save(state, checkpoint)

    np.save(tmp_path / "a.npy", np.random.default_rng(0).normal(size=(40, 10)))
    (tmp_path / "feats.scp").write_text(f"a {tmp_path / 'a.npy'}\n")
    (tmp_path / "text").write_text("a ABC\n")
    report = tmp_path / "report.json"
    command = [sys.executable, BENCHMARKS / "bench_onnx.py", "--smoke"]
    command += ["--threads", "1", "--json", report, "--train", folder]
    command += ["--scp", tmp_path / "feats.scp", "--text", tmp_path / "text"]

    printed = subprocess.check_output(command, text=True)
    written = json.loads(report.read_text())

    assert printed.splitlines()[0] == written["machine"]
    assert set(written["rows"]) == {"beam 1", "beam 2"}

    for rows in written["rows"].values():
        assert set(rows) == {"PyTorch", "onnxruntime, float32", "onnxruntime, int8"}
        assert rows["onnxruntime, float32"]["same_tokens"] == 1
        assert min(row["seconds"] for row in rows.values()) > 0.0
        # The one word is not among what random weights say.
        assert rows["PyTorch"]["wer"] >= 100.0
