"""Environments with the plugin installed as users install it, from a source tree.

Each is a bare virtual environment that sees the heavy packages of the environment
that runs the tests through a line of path. Python does not read the start-up files
of a folder added that way, so nothing of a plugin installed there takes effect.
"""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "Makefile",
    "MANIFEST.in",
    "README.md",
    "espnet_mega_bias",
    "pyproject.toml",
    "setup.py",
    "espnet_mega_bias_autoload.py",
    "startup",
)
# Read before any other: those of setuptools and of editable installs import.
HEAVY_FILE = "_heavy.pth"
STARTUP_FILES = ("espnet_mega_bias.pth", "espnet_mega_bias.start")


def environ(**changes):
    """Return this process's variables without those that would help the plugin."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "ESPNET_MEGA_BIAS_AUTOLOAD")
    }
    return {**env, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **changes}


class Environment:
    """A virtual environment for one way of installing the plugin."""

    def __init__(self, folder, source):
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
        self.folder = folder
        self.source = source
        self.python = folder / "bin" / "python"
        self.site_packages = Path(
            self.output("import sysconfig; print(sysconfig.get_path('purelib'))")
        )
        heavy = [Path(p) for p in sys.path if Path(p).name == "site-packages"]
        assert heavy, "the tests' own packages are in no site-packages"
        (self.site_packages / HEAVY_FILE).write_text(
            "".join(f"{path}\n" for path in heavy)
        )
        # ESPnet imports distutils, which setuptools brings from Python 3.12 on.
        for path in heavy:
            for shim in path.glob("distutils-precedence.pth"):
                shutil.copy(shim, self.site_packages)

    def run(self, *args, cwd=None, **variables):
        """Run the interpreter; return the completed process with its output."""
        return subprocess.run(
            [self.python, *map(str, args)],
            cwd=cwd or self.folder,
            env=environ(**variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def output(self, code, **options):
        """Run code that must succeed and be silent on stderr; return its output."""
        done = self.run("-c", code, **options)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout.strip()

    def pip(self, *args):
        """Run pip, which must succeed, without the network."""
        done = self.run("-m", "pip", "--disable-pip-version-check", *args)
        assert done.returncode == 0, done.stdout + done.stderr

    def install(self, *args):
        """Install with this environment's setuptools, and nothing else."""
        self.pip(
            "install", "--no-index", "--no-deps", "--no-build-isolation",
            "--force-reinstall", *args,
        )  # fmt: skip

    def uninstall(self):
        self.pip("uninstall", "--yes", "espnet-mega-bias")


def make_environment_in(folder, kind):
    """Install the plugin from a copy of its sources: "wheel", "sdist", "editable"."""
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            # other processes write there as they import
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, source / name)
    environment = Environment(folder / "env", source)
    if kind == "wheel":
        environment.install(source)
    elif kind == "editable":
        environment.install("--editable", source)
    else:
        code = "from setuptools.build_meta import build_sdist; build_sdist('dist')"
        done = environment.run("-c", code, cwd=source)
        assert done.returncode == 0, done.stderr
        (archive,) = (source / "dist").iterdir()
        environment.install(archive)
    return environment
