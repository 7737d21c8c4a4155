"""A stream as from a microphone: utterances of a set, one after the other, with pauses.

It is made while it is read, so that its length costs no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recipe.audio import check_audio
from recipe.files import RecipeError
from recipe.score import read_text

NOISE_SECONDS = 0.02


@dataclass(frozen=True)
class Spoken:
    """An utterance that can come in a stream.

    Args:
        path: Audio file.
        text: The words.
    """

    path: Path
    text: str


def read_set(folder: Path, rate: int) -> list[Spoken]:
    """Read the lists of a set, and check the audio for what a stream needs.

    Raises:
        RecipeError: If there are no utterances, one has no text, or its audio is not
            fit, see `check_audio`.
    """
    lists = {}
    for name in ("wav.scp", "text"):
        try:
            lists[name] = read_text(folder / name)
        except FileNotFoundError as exc:
            raise RecipeError(f"{exc.filename} is missing; stage 1 makes it") from exc
    if not lists["wav.scp"]:
        raise RecipeError(f"{folder / 'wav.scp'} has no utterances to make a stream of")
    spoken = []
    for utt_id, path in lists["wav.scp"].items():
        if utt_id not in lists["text"]:
            raise RecipeError(f"utterance {utt_id} has no line in {folder / 'text'}")
        check_audio(utt_id, Path(path), rate)
        spoken.append(Spoken(Path(path), lists["text"][utt_id]))
    return spoken


class Stream:
    """Utterances in random order, over and over until a stream is long enough.

    A pause is noise as loud as the quietest 20 ms of the utterance before it, and with
    their spectrum: silent only where that has silence.

    Args:
        spoken: The utterances.
        rate: Samples in a second.
        seconds: The least length; the last utterance is not cut.
        pause: Shortest and longest pause, in seconds.
        seed: Of order and pauses.
    """

    def __init__(
        self,
        spoken: list[Spoken],
        rate: int,
        seconds: float,
        pause: tuple[float, float],
        seed: int,
    ) -> None:
        self.spoken = spoken
        self.rate = rate
        self.samples = round(seconds * rate)
        self.pause = pause
        self.seed = seed
        self.texts = []  # of what has been read so far

    def __iter__(self) -> Iterator[np.ndarray]:
        """Give utterances and pauses in turn. (S,), float32"""
        import soundfile

        rng = np.random.default_rng(self.seed)
        self.texts = []
        given = 0
        while True:
            for index in rng.permutation(len(self.spoken)):
                if given >= self.samples:
                    return
                speech, _ = soundfile.read(self.spoken[index].path, dtype="float32")
                self.texts.append(self.spoken[index].text)
                pause = self._noise(speech, rng)
                given += len(speech) + len(pause)
                yield speech
                yield pause

    def _noise(self, speech: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        size = min(round(NOISE_SECONDS * self.rate), len(speech))
        frames = speech[: len(speech) // size * size].reshape(-1, size)
        quiet = frames[np.square(frames).mean(axis=1).argmin()]
        count = round(rng.uniform(*self.pause) * self.rate)
        white = rng.standard_normal(count + size - 1)
        return (np.convolve(white, quiet, "valid") / np.sqrt(size)).astype(np.float32)


def regroup(pieces: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Cut audio of any lengths into chunks of `size`, and what is left, even nothing.

    Raises:
        RecipeError: If there is no audio at all.
    """
    held, count, empty = [], 0, True
    for piece in pieces:
        empty = empty and len(piece) == 0
        held.append(piece)
        count += len(piece)
        if count >= size:
            joined = np.concatenate(held)
            whole = count - count % size
            yield from joined[:whole].reshape(-1, size)
            held, count = [joined[whole:]], count % size
    if empty:
        raise RecipeError("the stream is empty")
    yield np.concatenate(held)
