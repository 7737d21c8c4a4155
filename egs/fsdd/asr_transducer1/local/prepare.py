"""Compose digit strings of FSDD, and write the lists of each set."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import corpus
import numpy as np
import perturbation
from recipe.datadir import Item, write_set
from recipe.files import RecipeError, writing
from strings import LENGTHS, SINGLE, draw_strings, join, level

# of the training speakers' recordings, all but the first one perturbed
ROUNDS = 8
SINGLE_ROUNDS = 2  # further ones, of single digits: without, no training gets started


def division(test_speaker: str, dev_speaker: str) -> dict[str, tuple[str, ...]]:
    """Give the speakers of each set.

    Raises:
        RecipeError: If a speaker is unknown, or both are the same.
    """
    for speaker in (test_speaker, dev_speaker):
        if speaker not in corpus.SPEAKERS:
            raise RecipeError(
                f"FSDD has no speaker {speaker}, but {', '.join(corpus.SPEAKERS)}"
            )
    if test_speaker == dev_speaker:
        raise RecipeError(f"{test_speaker} cannot be the dev and the test speaker")
    rest = tuple(
        speaker
        for speaker in corpus.SPEAKERS
        if speaker not in (test_speaker, dev_speaker)
    )
    return {"train": rest, "dev": (dev_speaker,), "test": (test_speaker,)}


def compose(
    recordings: list[corpus.Recording],
    lengths: Sequence[int],
    rng: np.random.Generator,
    perturbed: bool,
) -> Iterator[tuple[np.ndarray, str]]:
    """Use each recording of a speaker once.

    Args:
        recordings: The speaker's.
        lengths: Digits of each string.
        rng: Decides everything that is left to chance.
        perturbed: Whether each string gets a voice and a room of its own.

    Yields:
        Audio and words of a string.
    """
    for string in draw_strings(recordings, lengths, rng):
        pieces = [recording.samples for recording in string]
        if perturbed:
            percent = int(rng.integers(*perturbation.SPEED, endpoint=True))
            pieces = [perturbation.change_speed(piece, percent) for piece in pieces]
        samples = join(pieces, rng)
        if perturbed:
            samples = perturbation.change_channel(samples, rng)
            samples = perturbation.add_noise(samples, rng)
        yield (
            level(samples),
            " ".join(corpus.WORDS[recording.digit] for recording in string),
        )


def wav(samples: np.ndarray) -> bytes:
    """Encode audio as 16 bit."""
    import soundfile

    # in memory, as libsndfile does not tell of a full disk
    file = io.BytesIO()
    values = np.round(np.clip(samples, -1, 1) * 32767).astype(np.int16)
    soundfile.write(file, values, corpus.SAMPLE_RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()


def write_audio(
    recordings: dict[str, list[corpus.Recording]],
    sets: dict[str, tuple[str, ...]],
    folder: Path,
    seed: int,
    rounds: int,
    single_rounds: int,
) -> dict[str, list[Item]]:
    """Write the strings of all sets; see `prepare`.

    A speaker's strings are the same whatever the division, but for the rounds.
    """
    items: dict[str, list[Item]] = {}
    partial = folder.with_name(f".{folder.name}.partial")
    with writing(folder):
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            for name, speakers in sets.items():
                items[name] = []
                for speaker in speakers:
                    for number in range(
                        rounds + single_rounds if name == "train" else 1
                    ):
                        single = name == "train" and number >= rounds
                        place = corpus.SPEAKERS.index(speaker)
                        rng = np.random.default_rng([seed, place, number])
                        strings = compose(
                            recordings[speaker],
                            SINGLE if single else LENGTHS,
                            rng,
                            number > 0,
                        )
                        for index, (samples, text) in enumerate(strings):
                            utt_id = f"{speaker}-{number:02d}-{index:03d}"
                            (partial / f"{utt_id}.wav").write_bytes(wav(samples))
                            seconds = len(samples) / corpus.SAMPLE_RATE
                            path = folder / f"{utt_id}.wav"
                            items[name].append(Item(utt_id, path, text, seconds))
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return items


def prepare(
    datadir: Path,
    test_speaker: str,
    dev_speaker: str,
    archive: Path | None = None,
    seed: int = 0,
    rounds: int = ROUNDS,
    single_rounds: int = SINGLE_ROUNDS,
) -> dict[str, list[Item]]:
    """Fetch, unpack and check the corpus, compose the strings and list them.

    Args:
        datadir: Gets the strings in ``wav/`` and the lists in ``train/``, ``dev/`` and
            ``test/``. The download and the recordings lie beside it, for all divisions.
        test_speaker: Who is tested on.
        dev_speaker: Who is chosen on; the other four are trained on.
        archive: As for `corpus.fetch`.
        seed: Decides everything that is left to chance.
        rounds: How often the recordings of the training speakers are used in strings;
            all but the first time with perturbations.
        single_rounds: How often each of them is used for itself, with perturbations.

    Returns:
        The strings of each set.

    Raises:
        RecipeError: If the data cannot be had, used or written.
    """
    sets = division(test_speaker, dev_speaker)
    folder = corpus.fetch(datadir.parent, archive)
    recordings = {
        speaker: corpus.read_speaker(folder, speaker) for speaker in corpus.SPEAKERS
    }
    items = write_audio(recordings, sets, datadir / "wav", seed, rounds, single_rounds)
    for name, listed in items.items():
        write_set(datadir / name, listed)
    return items


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datadir", type=Path, required=True)
    parser.add_argument("--archive", type=Path)
    parser.add_argument("--test_speaker", required=True)
    parser.add_argument("--dev_speaker", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--single_rounds", type=int, default=SINGLE_ROUNDS)
    args = parser.parse_args()
    try:
        items = prepare(
            args.datadir.absolute(),
            args.test_speaker,
            args.dev_speaker,
            args.archive,
            args.seed,
            args.rounds,
            args.single_rounds,
        )
    except (RecipeError, OSError) as exc:
        print(f"prepare.py: error: {exc}", file=sys.stderr)
        return 1
    for name, listed in items.items():
        minutes = sum(item.seconds for item in listed) / 60
        print(f"  {name}: {len(listed)} strings, {minutes:.1f} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
