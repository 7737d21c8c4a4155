"""AN4: find the archive, unpack it, and list its utterances.

948 training and 130 test utterances of the Census corpus (CMU, 1991): spelled words,
numbers, dates and commands.  Two archives are known: the audio (16 kHz, NIST .sph),
and Sphinx cepstra of the same recordings (13 MFCCs every 10 ms, .mfc).
"""

from __future__ import annotations

import sys
from pathlib import Path

# ESPnet3 loads this file by its path, so that the recipes' package is to be found here
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "TEMPLATE"))
from recipe import archive as archives
from recipe.an4 import SOURCES, Utterance, read_transcription
from recipe.files import RecipeError

AUDIO_ARCHIVE = "an4_sphere.tar.gz"
URLS = (
    f"http://www.speech.cs.cmu.edu/databases/an4/{AUDIO_ARCHIVE}",
    f"https://huggingface.co/datasets/espnet/an4/resolve/main/{AUDIO_ARCHIVE}",
)
UTTERANCES = {"train": 948, "test": 130}
DEV_SIZE = 100
# kind of recording: its folder below an4/, and its ending
KINDS = {"audio": ("wav", ".sph"), "cepstra": ("feat", ".mfc")}


def fetch_archive(download_dir: Path, archive: Path | None = None) -> Path:
    """Give a checked archive.

    Args:
        download_dir: Where the audio is downloaded to, unless `archive` is given; an
            interrupted download is gone on with, a broken archive fetched again.
        archive: A local archive, of audio or of cepstra.

    Returns:
        Its path.

    Raises:
        RecipeError: If there is no such file, it is broken or something else, the
            download fails, or no space is left.
    """
    wanted = [f"an4/etc/{transcript}" for transcript, _ in SOURCES.values()]
    return archives.fetch(
        URLS, download_dir / AUDIO_ARCHIVE, "an archive of AN4", wanted, archive
    )


def extract(archive: Path, corpus_dir: Path) -> Path:
    """Unpack an archive that `fetch_archive` gave; see `recipe.archive.extract`."""
    return archives.extract(archive, corpus_dir)


def kind_of(corpus_dir: Path) -> str:
    """Tell what recordings were unpacked.

    Returns:
        "audio" or "cepstra".

    Raises:
        RecipeError: If there are none.
    """
    for kind, (folder, _) in KINDS.items():
        if (corpus_dir / "an4" / folder).is_dir():
            return kind
    raise RecipeError(f"{corpus_dir / 'an4'} has neither wav/ nor feat/")


def splits(corpus_dir: Path) -> dict[str, list[Utterance]]:
    """List the utterances of each set.

    The split is that of ESPnet's recipe (espnet/espnet egs2/an4/asr1/local/data.sh):
    of the training utterances, sorted by name, the first 100 are for development.

    Args:
        corpus_dir: What `extract` returned.

    Returns:
        "train_nodev" (848 utterances), "train_dev" (100) and "test" (130), each
        sorted by `utt_id`.

    Raises:
        RecipeError: If a transcription is missing, malformed or incomplete, an
            utterance has no words, or its recording is missing.
    """
    an4 = corpus_dir / "an4"
    folder, suffix = KINDS[kind_of(corpus_dir)]
    found = {name: read_transcription(an4, name, folder, suffix) for name in SOURCES}
    for name, utterances in found.items():
        if len(utterances) != UTTERANCES[name]:
            raise RecipeError(
                f"{an4 / 'etc' / SOURCES[name][0]} lists {len(utterances)} utterances; "
                f"AN4 has {UTTERANCES[name]} there"
            )
        for utterance in utterances:
            if not utterance.path.is_file():
                raise RecipeError(
                    f"utterance {utterance.utt_id} has no recording: {utterance.path} "
                    "is missing"
                )
    train = found["train"]
    return {
        "train_nodev": train[DEV_SIZE:],
        "train_dev": train[:DEV_SIZE],
        "test": found["test"],
    }
