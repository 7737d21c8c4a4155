"""Measure what the start-up hook costs each start of the interpreter.

    python benchmarks/bench_startup.py

Two virtual environments, equal but for the plugin, start `python -E -c pass` in turn.
Their site-packages hold as many entries as an environment with ESPnet, because the
hook's import has to list the folder.
"""

import argparse
import compileall
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOAL_MS = 1.0


def make_environment(folder, entries):
    """Create a bare environment; return its interpreter and its site-packages."""
    venv.EnvBuilder(with_pip=False, symlinks=os.name != "nt").create(folder)
    scripts, name = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    python = folder / scripts / name
    site_packages = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            text=True,
        ).strip()
    )
    for i in range(entries):
        (site_packages / f"package_{i}").mkdir()
    return python, site_packages


def add_plugin(site_packages):
    """Put the package and its start-up files where pip would put them, compiled."""
    for source in (ROOT / "startup").iterdir():
        shutil.copy(source, site_packages)
    shutil.copy(ROOT / "espnet_mega_bias_autoload.py", site_packages)
    shutil.copytree(
        ROOT / "espnet_mega_bias",
        site_packages / "espnet_mega_bias",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    compileall.compile_dir(site_packages, quiet=1)


def hook_is_installed(python):
    """Say whether a new process has the finder."""
    code = "import sys; print([type(f).__module__ for f in sys.meta_path])"
    return "_autoload" in subprocess.check_output([python, "-E", "-c", code], text=True)


def time_once(python):
    """Return the seconds that one start takes, without what PYTHONPATH would add."""
    start = time.perf_counter()
    subprocess.run([python, "-E", "-c", "pass"], check=True)
    return time.perf_counter() - start


def measure(runs, entries):
    """Return the seconds of each environment's starts, taken in turn."""
    with tempfile.TemporaryDirectory() as folder:
        without, _ = make_environment(Path(folder, "without"), entries)
        with_hook, site_packages = make_environment(Path(folder, "with"), entries)
        add_plugin(site_packages)
        if hook_is_installed(without) or not hook_is_installed(with_hook):
            raise RuntimeError("the two environments do not differ by the hook")
        times = {"without": [], "with": []}
        for _ in range(runs):
            times["without"].append(time_once(without))
            times["with"].append(time_once(with_hook))
    return times


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="starts of each kind")
    parser.add_argument(
        "--entries", type=int, default=300, help="entries in site-packages"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--smoke", action="store_true", help="five starts of each kind")
    args = parser.parse_args()

    times = measure(5 if args.smoke else args.runs, args.entries)
    # Neighbours in time share what else the machine does.
    times["difference"] = [
        a - b for a, b in zip(times["with"], times["without"], strict=True)
    ]
    median_ms = {name: 1e3 * statistics.median(ts) for name, ts in times.items()}
    print(
        f"CPU {platform.processor() or platform.machine()} x {os.cpu_count()}, "
        f"Python {platform.python_version()}, {platform.system()}"
    )
    print("python -c pass, median ms")
    for name, value in median_ms.items():
        print(f"{name:12} {value:7.2f}")
    print(f"goal: a difference under {GOAL_MS} ms")
    if args.json:
        args.json.write_text(json.dumps({"median_ms": median_ms}, indent=1) + "\n")


if __name__ == "__main__":
    main()
