import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.mark.parametrize("name", ["bias", "step", "training"])
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
