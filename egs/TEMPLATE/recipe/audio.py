"""Recordings: what is checked before any long work begins."""

from __future__ import annotations

import re
from pathlib import Path

from recipe.files import RecipeError

NIST_SAMPLE_COUNT = re.compile(rb"\nsample_count -i (\d+)\n")


def check_audio(utt_id: str, path: Path, sample_rate: int = 16000) -> float:
    """Read an audio file to its end.

    Args:
        utt_id: The utterance, for the error.
        path: The file.
        sample_rate: The rate that it must have, in Hz.

    Returns:
        Its length in seconds.

    Raises:
        RecipeError: If it is missing, unreadable, cut short, silent of any
            frame, not mono, or at another rate.
    """
    try:
        import soundfile
    except (ImportError, OSError) as exc:  # OSError: libsndfile is missing
        raise RecipeError(f"soundfile: {exc} (pip install soundfile)") from exc

    who = f"utterance {utt_id}"
    if not path.is_file():
        raise RecipeError(f"{who} has no audio: {path} is missing")
    try:
        with soundfile.SoundFile(path) as audio:
            rate, channels = audio.samplerate, audio.channels
            frames = len(audio.read(dtype="int16"))
    except soundfile.SoundFileError as exc:
        raise RecipeError(f"{who} has unreadable audio, {path}: {exc}") from exc
    # libsndfile gives what is left of a truncated file without a complaint
    with path.open("rb") as file:
        head = file.read(1024)
    declared = NIST_SAMPLE_COUNT.search(head)
    riff = 8 + int.from_bytes(head[4:8], "little") if head[:4] == b"RIFF" else 0
    if frames == 0:
        raise RecipeError(f"{who} has no frames in its audio, {path}")
    if declared and int(declared[1]) != frames:
        raise RecipeError(
            f"{who} has {frames} of the {int(declared[1])} frames that the header of "
            f"{path} declares"
        )
    if riff > path.stat().st_size:
        raise RecipeError(
            f"{who} has {path.stat().st_size} of the {riff} bytes that the header of "
            f"{path} declares"
        )
    if rate != sample_rate:
        raise RecipeError(f"{who} is at {rate} Hz, not {sample_rate} Hz: {path}")
    if channels != 1:
        raise RecipeError(f"{who} has {channels} channels, not one: {path}")
    return frames / rate
