"""Fixtures: a small corpus for the commands of a page, and a model trained on it."""

import importlib.util
import io
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile

from docs.pages import blocks, read, run_shell

# Utterances of mini_an4 by set, and what is said in them.
CORPUS = {
    "train": {
        "cen8-fbbh-b": "MARCH THIRD NINETEEN TWENTY EIGHT",
        "an152-mwhw-b": "START",
        "cen8-mwhw-b": "ELEVEN SEVENTEEN FIFTY ONE",
        "an253-fash-b": "GO",
    },
    "valid": {"an251-fash-b": "YES"},
    "test": {
        "cen8-fcaw-b": "ELEVEN TWENTY SEVEN FIFTY SEVEN",
        "cen8-mmxg-b": "OCTOBER TWENTY FOUR NINETEEN SEVENTY",
    },
}
RATE = 16000

# Four utterances train in one short epoch; all else is as on docs/own_corpus.md.
STAND_INS = {
    "max_epoch: 60": "max_epoch: 1",
    "num_blocks: 6": "num_blocks: 1",
    "hidden_size: 144": "hidden_size: 16",
    "linear_size: 576": "linear_size: 16",
    "vocab_size=500": "vocab_size=30",
}


def _recordings():
    """The audio in the installed ESPnet; noise where it has none (202511)."""
    spec = importlib.util.find_spec("egs3")

    if spec is None:
        generator = np.random.default_rng(0)

        return {
            name: generator.uniform(-0.1, 0.1, 2 * RATE)
            for names in CORPUS.values()
            for name in names
        }

    (folder,) = spec.submodule_search_locations
    archive = Path(folder) / "mini_an4" / "esp2_asr" / "downloads.tar.gz"

    with tarfile.open(archive) as files:
        return {
            match[1]: soundfile.read(io.BytesIO(files.extractfile(name).read()))[0]
            for name in files.getnames()
            if (match := re.search(r"([\w-]+)\.sph$", name))
        }


@pytest.fixture(scope="session")
def make_corpus(tmp_path_factory):
    """Return a function that makes a folder as docs/own_corpus.md wants it.

    In it are corpus/SET/NAME.wav and corpus/SET/NAME.txt.
    """

    def make():
        folder = tmp_path_factory.mktemp("own")
        audio = _recordings()

        for part, said in CORPUS.items():
            files = folder / "corpus" / part
            files.mkdir(parents=True)

            for name, text in said.items():
                soundfile.write(files / f"{name}.wav", audio[name], RATE)
                (files / f"{name}.txt").write_text(f"{text}\n")

        return folder

    return make


@pytest.fixture(scope="session")
def own_corpus(make_corpus):
    """The folder after all commands of docs/own_corpus.md, and each block's output."""
    folder = make_corpus()
    text = read("own_corpus.md")

    for on_the_page, here in STAND_INS.items():
        assert text.count(on_the_page) == 1
        text = text.replace(on_the_page, here)

    *characters, bpe = blocks(text, "sh")
    separator = "----- next block"
    # One shell, as a reader has it: a variable set in one block is read in another.
    script = f"\necho '{separator}'\n".join(characters)
    outputs = run_shell(script, folder).split(f"{separator}\n")
    tokens = (folder / "data" / "tokens.txt").read_text().splitlines()

    run_shell(bpe, folder)

    assert len(outputs) == len(characters)

    return folder, outputs, tokens
