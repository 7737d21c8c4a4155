"""recipe.job: the log, the progress, signals and the lock."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest


def test_a_failed_job_shows_the_end_of_its_log(run_tool, tmp_path):
    log = tmp_path / "logs" / "job.log"
    script = "for i in $(seq 40); do echo line $i; done; echo broken >&2; exit 7"

    result = run_tool("job", "--log", log, "--", "sh", "-c", script)

    assert result.returncode == 7
    *lines, last = result.stderr.splitlines()
    assert lines == [f"  | line {n}" for n in range(27, 41)] + ["  | broken"]
    assert last == f"job.py: error: sh ended with status 7; the whole log is in {log}"
    assert result.stdout == ""
    assert log.read_text().count("\nline ") == 40


def test_a_job_that_fills_the_device_is_told_apart(run_tool, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")

    script = "open('/dev/full', 'wb', buffering=0).write(b'a')"
    result = run_tool(
        "job", "--log", tmp_path / "log", "--", sys.executable, "-c", script
    )

    assert result.returncode == 1
    assert "error: no space left on the device; " in result.stderr


def test_the_log_keeps_earlier_jobs_and_only_the_last_is_shown(run_tool, tmp_path):
    log = tmp_path / "log"

    assert run_tool("job", "--log", log, "--", "echo", "first").returncode == 0
    result = run_tool("job", "--log", log, "--", "sh", "-c", "echo second; exit 1")

    assert "second" in result.stderr
    assert "first" not in result.stderr
    assert "\nfirst\n" in log.read_text()


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")  # a zombie waits to be reaped, but has ended
    return not status.exists() or status.read_text().rpartition(") ")[2][0] != "Z"


def test_a_signal_ends_a_job_and_its_children(start_tool, tmp_path):
    pid_file = tmp_path / "pid"
    script = f"sleep 300 & echo $! > {pid_file}.new; mv {pid_file}.new {pid_file}; wait"
    process = start_tool("job", "--log", tmp_path / "log", "--", "sh", "-c", script)
    deadline = time.monotonic() + 30
    while not pid_file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    grandchild = int(pid_file.read_text())
    assert is_running(grandchild)

    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)

    assert process.returncode == 128 + signal.SIGTERM
    while is_running(grandchild):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_only_one_job_at_a_time_has_the_lock(run_tool, start_tool, tmp_path):
    lock = tmp_path / "lock"
    with_lock = ("--lock", lock, "--")
    first = start_tool("job", "--log", tmp_path / "1", *with_lock, "sleep", "300")
    try:
        deadline = time.monotonic() + 30
        while "sleep" not in (tmp_path / "1").read_text() if lock.exists() else True:
            assert time.monotonic() < deadline
            time.sleep(0.05)

        second = run_tool("job", "--log", tmp_path / "2", *with_lock, "echo", "ran")
        mended = run_tool("checkpoint", "mend", tmp_path / "train", "--lock", lock)
    finally:
        first.terminate()
        first.communicate()
    third = run_tool("job", "--log", tmp_path / "3", *with_lock, "echo", "ran")

    assert second.returncode == 1
    assert f"another run is at work here; it holds {lock}" in second.stderr
    assert mended.returncode == 1
    assert f"another run is at work here; it holds {lock}" in mended.stderr
    assert third.returncode == 0


def test_progress_has_one_line_for_each_epoch(local):
    progress = local("job").TrainProgress()
    results = (
        "[host] 2026 (trainer:392) INFO: 3epoch results: [train] iter_time=0.031, "
        "forward_time=0.903, loss=0.024, loss_transducer=0.021, train_time=2.535, "
        "time=2 minutes and 6.76 seconds, total_count=300, [valid] loss=58.449, "
        "loss_transducer=35.015, time=0.46 seconds, total_count=6"
    )

    assert progress("(trainer:322) INFO: 3/8epoch started") == "epoch 3/8 started"
    assert progress("INFO: 3epoch:train:1-5batch: loss=9.9, loss_transducer=9") is None
    assert progress(results) == (
        "epoch 3/8: loss 0.024 on train, 58.449 on valid (2 minutes and 6.76 seconds)"
    )
    assert progress("(trainer:316) INFO: 4/8epoch started. Estimated time") is None
