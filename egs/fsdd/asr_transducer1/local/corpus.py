"""FSDD: find the archive, unpack it, and list and read its recordings.

The Free Spoken Digit Dataset: each digit said 50 times by each of six speakers, 8 kHz,
cut close to the digit.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "TEMPLATE"))
from recipe import archive as archives
from recipe.audio import check_audio
from recipe.files import RecipeError

VERSION = "1.0.10"
TOP = f"free-spoken-digit-dataset-{VERSION}"  # in GitHub's archive
URLS = (
    "https://github.com/Jakobovski/free-spoken-digit-dataset/archive/refs/tags/"
    f"v{VERSION}.tar.gz",
)
SPEAKERS = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")
REPETITIONS = 50
SAMPLE_RATE = 8000
SHORTEST = SAMPLE_RATE // 20
WORDS = (
    *("ZERO", "ONE", "TWO", "THREE", "FOUR"),
    *("FIVE", "SIX", "SEVEN", "EIGHT", "NINE"),
)
NAME = re.compile(r"(\d)_([a-z]+)_(\d+)")


class Recording(NamedTuple):
    """One digit.

    Args:
        digit: Which one.
        samples: float64, at most 1 in size, without a constant part.
    """

    digit: int
    samples: np.ndarray


def fetch(datadir: Path, archive: Path | None = None) -> Path:
    """Download the archive where none is given, check it, and unpack it.

    Args:
        datadir: Gets the download, and ``corpus/``.
        archive: A local archive.

    Returns:
        The folder with the recordings.

    Raises:
        RecipeError: If there is no such file, it is broken or something else, the
            download fails, or no space is left.
    """
    given = archives.fetch(
        URLS,
        datadir / f"{TOP}.tar.gz",
        "an archive of FSDD",
        [f"recordings/0_{SPEAKERS[0]}_0.wav"],
        archive,
        TOP,
    )
    return archives.extract(given, datadir / "corpus", TOP) / "recordings"


def read_speaker(folder: Path, speaker: str) -> list[Recording]:
    """Read all that a speaker said.

    Returns:
        Every recording, sorted by digit and number.

    Raises:
        RecipeError: If a recording is missing or one too many, unreadable, silent, not
            mono, or not at 8 kHz.
    """
    found = []
    for path in folder.glob("*.wav"):
        match = NAME.fullmatch(path.stem)
        if match and match[2] == speaker:
            found.append((int(match[1]), int(match[3]), path))
    counts = Counter(digit for digit, _, _ in found)
    for digit in range(10):
        if counts[digit] != REPETITIONS:
            raise RecipeError(
                f"speaker {speaker} has {counts[digit]} recordings of {digit} in "
                f"{folder}; FSDD has {REPETITIONS}"
            )
    import soundfile

    recordings = []
    for digit, _, path in sorted(found):
        check_audio(path.stem, path, SAMPLE_RATE)
        samples, _ = soundfile.read(path)
        samples -= samples.mean()
        if len(samples) < SHORTEST or not samples.any():
            raise RecipeError(
                f"utterance {path.stem} is silent, or too short for a digit "
                f"({len(samples)} samples): {path}"
            )
        recordings.append(Recording(digit, samples))
    return recordings
