"""Transcriptions in the form of the AN4 corpus, which mini_an4 has a part of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from recipe.files import RecipeError

# set: transcription below an4/etc, and the folder of its recordings
SOURCES = {
    "train": ("an4_train.transcription", "an4_clstk"),
    "test": ("an4_test.transcription", "an4test_clstk"),
}
TRANSCRIPT_LINE = re.compile(r"^(?P<words>.*?)\s*\((?P<source>[^()\s]+)\)$")


@dataclass(frozen=True)
class Utterance:
    """One recording and what is said in it.

    Args:
        utt_id: Name of the utterance, the speaker first ("fash-an253-b").
        speaker: Name of the speaker ("fash").
        path: The audio (16 kHz, one channel) or feature file.
        text: Words in capitals, separated by single spaces.
    """

    utt_id: str
    speaker: str
    path: Path
    text: str


def read_transcription(
    an4: Path, source: str, recordings: str, suffix: str
) -> list[Utterance]:
    """List the utterances of a transcription.

    Args:
        an4: The folder that holds ``etc/``.
        source: "train" or "test".
        recordings: Folder of the recordings below `an4` ("wav" or "feat").
        suffix: Ending of a recording's name (".sph" or ".mfc").

    Returns:
        The utterances, sorted by `utt_id`.

    Raises:
        RecipeError: If the transcription is missing or has a malformed line, or an
            utterance is listed twice or has no words.
    """
    transcript, folder = SOURCES[source]
    path = an4 / "etc" / transcript
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, UnicodeDecodeError) as exc:
        raise RecipeError(f"cannot read the transcription {path}: {exc}") from exc
    utterances: dict[str, Utterance] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        utt_id, speaker, name, text = _parse_line(line.strip(), where)
        if utt_id in utterances:
            raise RecipeError(f"{where}: utterance {utt_id} is listed twice")
        file = (an4 / recordings / folder / speaker / f"{name}{suffix}").resolve()
        utterances[utt_id] = Utterance(utt_id, speaker, file, text)
    return [utterances[utt_id] for utt_id in sorted(utterances)]


def _parse_line(line: str, where: str) -> tuple[str, str, str, str]:
    """Split a transcription line into utterance, speaker, audio name and text."""
    match = TRANSCRIPT_LINE.match(line)
    parts = match["source"].split("-") if match else []
    if len(parts) != 3 or not all(parts):
        raise RecipeError(f"{where}: malformed transcript line {line!r}")
    recording, speaker, number = parts
    words = match["words"].split()
    if words[:1] == ["<s>"]:
        words = words[1:]
    if words[-1:] == ["</s>"]:
        words = words[:-1]
    utt_id = f"{speaker}-{recording}-{number}"
    if not words:
        raise RecipeError(f"{where}: utterance {utt_id} has an empty transcript")
    return utt_id, speaker, match["source"], " ".join(words)
