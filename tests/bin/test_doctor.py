"""`espnet-mega-bias doctor`: what it prints, and its exit status."""

import os
import subprocess
import sys

import pytest

from espnet_mega_bias.bin.main import main
from espnet_mega_bias.tools import installation
from espnet_mega_bias.tools.finding import note, ok, problem


@pytest.mark.parametrize(
    ("findings", "status", "lines"),
    [
        (
            [ok("Python", "3"), note("CUDA", "none")],
            0,
            [
                "ok       Python            3",
                "note     CUDA              none",
                "Everything that is needed works.",
            ],
        ),
        (
            [problem("torch", "missing", "pip install torch"), ok("Python", "3")],
            1,
            [
                "PROBLEM  torch             missing",
                "                           pip install torch",
                "ok       Python            3",
                "1 problem. Mend the first one, then run this again.",
            ],
        ),
    ],
)
def test_prints_a_line_for_each_finding_and_what_mends_a_problem(
    monkeypatch, capsys, findings, status, lines
):
    monkeypatch.setattr(installation, "examine", lambda: iter(findings))

    assert main(["doctor"]) == status
    assert capsys.readouterr().out.splitlines() == lines


def doctor(**environment):
    return subprocess.run(
        [sys.executable, "-m", "espnet_mega_bias", "doctor"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def states(done):
    return {
        line[9:26].strip(): line.split()[0]
        for line in done.stdout.splitlines()
        if line.startswith(("ok ", "note ", "PROBLEM "))
    }


@pytest.mark.slow
@pytest.mark.host
def test_this_installation_works():
    done = doctor()

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "PROBLEM" not in states(done).values()
    for subject in ("transducer loss", "start-up hook", "ESPnet2 decoders"):
        assert states(done)[subject] == "ok"
    assert states(done)["ESPnet3 decoders"] == (
        "ok" if sys.version_info >= (3, 12) else "note"
    )


@pytest.mark.slow
@pytest.mark.host
def test_the_hook_switched_off_and_torchaudio_broken_are_told_without_a_traceback(
    tmp_path,
):
    (tmp_path / "torchaudio.py").write_text("raise OSError('undefined symbol: x')\n")

    done = doctor(PYTHONPATH=str(tmp_path), ESPNET_MEGA_BIAS_AUTOLOAD="0")

    assert done.returncode == 1
    assert done.stderr == ""
    assert "Traceback" not in done.stdout
    found = states(done)
    for subject in (
        "torchaudio",
        "transducer loss",
        "start-up hook",
        "ESPnet2 decoders",
    ):
        assert found[subject] == "PROBLEM"
    assert found["torch"] == "ok"
