"""Fixtures: mini_an4's archive, and the modules that the recipes share."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

EGS = Path(__file__).resolve().parents[2] / "egs"
TEMPLATE = EGS / "TEMPLATE"


@pytest.fixture(scope="session")
def import_from():
    """Return a function that imports a module from a folder, beside others."""

    def load(folder, name, *more):
        before = set(sys.modules)
        folders = [str(path) for path in (folder, *more, TEMPLATE)]
        sys.path[:0] = folders
        try:
            return importlib.import_module(name)
        finally:
            del sys.path[: len(folders)]
            # The recipes have modules of the same names.
            for found in set(sys.modules) - before:
                if not found.startswith("recipe") and str(EGS) in str(
                    getattr(sys.modules[found], "__file__", "")
                ):
                    del sys.modules[found]

    return load


@pytest.fixture(scope="session")
def local(import_from):
    """Return a function that imports a tool of the recipes."""
    return lambda name: import_from(TEMPLATE, f"recipe.{name}")


def command(name, arguments):
    return {
        "args": [sys.executable, "-m", f"recipe.{name}", *map(str, arguments)],
        "env": {**os.environ, "PYTHONPATH": str(TEMPLATE)},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }


@pytest.fixture(scope="session")
def run_tool():
    """Return a function that runs a tool of the recipes in a new process."""
    return lambda name, *arguments: subprocess.run(
        **command(name, arguments), check=False
    )


@pytest.fixture(scope="session")
def start_tool():
    """Return a function that starts a tool of the recipes in a new process."""
    return lambda name, *arguments: subprocess.Popen(**command(name, arguments))


@pytest.fixture(scope="session")
def corpus(import_from):
    return import_from(EGS / "mini_an4" / "local", "corpus")


@pytest.fixture(scope="session")
def archive(corpus, tmp_path_factory):
    """The archive of the installed ESPnet, else of the wheel that pip fetches."""
    try:
        return corpus.fetch_archive(tmp_path_factory.mktemp("archive"))
    except corpus.RecipeError as error:
        pytest.skip(f"the installed ESPnet has no mini_an4, and {error}")
