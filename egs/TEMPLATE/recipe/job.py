"""Run a command with its output in a log file, and show how it gets on.

Progress comes from the lines that ESPnet logs.  When the command fails, the end of
the log and its path are shown.  A signal ends the command and all that it started.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0
LINES_ON_FAILURE = 15

EPOCH_STARTED = re.compile(r"INFO: (?P<epoch>\d+)/(?P<last>\d+)epoch started")
EPOCH_RESULTS = re.compile(
    r"(?P<epoch>\d+)epoch results: \[train\].*?\bloss=(?P<train>[^,]+),"
    r".*?, time=(?P<time>[^,]+), total_count.*?\[valid\] loss=(?P<valid>[^,]+),"
)
RESUMED = re.compile(r"INFO: The training was resumed using")
HYPOTHESIS = re.compile(r"Final best hypothesis: \['(?P<utt>[^']+)'\]: (?P<text>.*)")


class TrainProgress:
    """Turn the trainer's log lines into one line per epoch."""

    def __init__(self) -> None:
        self.last = "?"

    def __call__(self, line: str) -> str | None:
        if RESUMED.search(line):
            return "the training goes on from its checkpoint"
        if match := EPOCH_STARTED.search(line):
            first = self.last == "?"
            self.last = match["last"]
            return f"epoch {match['epoch']}/{self.last} started" if first else None
        if match := EPOCH_RESULTS.search(line):
            return (
                f"epoch {match['epoch']}/{self.last}: loss {match['train']} on train, "
                f"{match['valid']} on valid ({match['time']})"
            )
        return None


def decode_progress(line: str) -> str | None:
    """Turn the decoder's log line into utterance and words."""
    match = HYPOTHESIS.search(line)
    return f"{match['utt']}: {match['text']}" if match else None


class LockedError(Exception):
    """Another job has the lock."""


def take_lock(path: Path) -> int:
    """Lock a file, for as long as it stays open here or in a child that inherits it.

    Raises:
        LockedError: If another job has it; names the file.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(lock)
        raise LockedError(f"another run is at work here; it holds {path}") from exc
    return lock


def stop(process: subprocess.Popen) -> None:
    """End a process and its children, by force after a while."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
            return


def follow(
    command: list[str],
    log: Path,
    progress: Callable[[str], str | None],
    lock: int | None,
) -> int:
    """Run `command` and print what `progress` makes of each new line of `log`.

    Args:
        command: The command; its output is appended to `log` by itself, so that
            it does not depend on this process.
        log: The log file.
        progress: Gives what to print for a line, or None.
        lock: A locked file that the command inherits, or None.

    Returns:
        The command's exit status, 128 + n where signal n ended this or the command.
    """
    received = []
    woken = threading.Event()

    def note(number: int, _frame: object) -> None:
        received.append(number)
        woken.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, note)
    with log.open("a", encoding="utf-8") as sink:
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        print(f"# {started} {' '.join(command)}", file=sink, flush=True)
        seen = sink.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[] if lock is None else [lock],
        )
    try:
        with log.open(encoding="utf-8", errors="replace") as source:
            source.seek(seen)
            rest = ""
            while not received:
                running = process.poll() is None
                *lines, rest = (rest + source.read()).split("\n")
                for line in lines:
                    if shown := progress(line):
                        print(f"  {shown}", flush=True)
                if not running:
                    break
                woken.wait(POLL_SECONDS)
    finally:
        if process.poll() is None:
            stop(process)
    if received:
        return 128 + received[0]
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def show_failure(command: list[str], log: Path, status: int) -> None:
    """Print the end of the log, its path, and the reason where it is a full disk."""
    text = log.read_text(encoding="utf-8", errors="replace")
    text = text[text.rfind("\n# ") + 1 :]
    for line in text.splitlines()[-LINES_ON_FAILURE:]:
        print(f"  | {line}", file=sys.stderr)
    name = command[2] if command[1:2] == ["-m"] else command[0]
    why = "no space left on the device; " if "No space left on device" in text else ""
    print(
        f"job.py: error: {why}{name} ended with status {status}; "
        f"the whole log is in {log}",
        file=sys.stderr,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--progress", choices=["train", "decode"])
    parser.add_argument("--lock", type=Path, help="only one job at a time has this")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    progress = {
        "train": TrainProgress(),
        "decode": decode_progress,
        None: lambda line: None,
    }[args.progress]
    try:
        args.log.parent.mkdir(parents=True, exist_ok=True)
        lock = None if args.lock is None else take_lock(args.lock)
        status = follow(args.command, args.log, progress, lock)
    except (LockedError, OSError) as exc:
        print(f"job.py: error: {exc}", file=sys.stderr)
        return 1
    if 0 < status < 128:
        show_failure(args.command, args.log, status)
    elif status >= 128:
        print(f"job.py: ended by signal {status - 128}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
