"""Fixtures: mini_an4's archive, and the modules of the ESPnet2 recipe."""

import importlib.util
import sys
from pathlib import Path

import pytest

EGS = Path(__file__).resolve().parents[2] / "egs" / "mini_an4"


def load_module(path):
    """Import a script by its path, under a name that no other module has."""
    name = f"mini_an4_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def recipe_dir():
    return EGS / "asr_transducer1"


@pytest.fixture(scope="session")
def corpus(recipe_dir):
    # the scripts import each other by name, and so share corpus.CorpusError
    folders = [str(EGS / "local"), str(recipe_dir / "local")]
    sys.path[:0] = folders
    yield importlib.import_module("corpus")
    for folder in folders:
        sys.path.remove(folder)


@pytest.fixture(scope="session")
def local(corpus, recipe_dir):
    """Return a function that imports a script of asr_transducer1/local."""
    return lambda name: load_module(recipe_dir / "local" / f"{name}.py")


@pytest.fixture(scope="session")
def archive(corpus, tmp_path_factory):
    """The archive of the installed ESPnet, else of the wheel that pip fetches."""
    try:
        return corpus.fetch_archive(tmp_path_factory.mktemp("archive"))
    except corpus.CorpusError as error:
        pytest.skip(f"the installed ESPnet has no mini_an4, and {error}")
