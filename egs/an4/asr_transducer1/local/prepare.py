"""Write the data directories of AN4: the lists of each set, and features of cepstra."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "local"))
import cepstra
import corpus
from recipe.audio import check_audio
from recipe.datadir import Item, write_set
from recipe.files import RecipeError, replacing


def audio_item(utterance: corpus.Utterance) -> Item:
    """Check a recording, and list it as it is."""
    seconds = check_audio(utterance.utt_id, utterance.path)
    return Item(utterance.utt_id, utterance.path, utterance.text, seconds)


def cepstra_item(utterance: corpus.Utterance, folder: Path) -> Item:
    """Make features of a recording's cepstra, and list these."""
    frames = cepstra.read_mfc(utterance.utt_id, utterance.path)
    path = folder / f"{utterance.utt_id}.npy"
    with replacing(path) as partial, partial.open("wb") as sink:
        np.save(sink, cepstra.features(frames))
    seconds = len(frames) * cepstra.FRAME_SECONDS
    return Item(utterance.utt_id, path, utterance.text, seconds)


def write_sets(corpus_dir: Path, datadir: Path) -> dict[str, list[Item]]:
    """Check what was unpacked, and list it.

    Args:
        corpus_dir: What `corpus.extract` returned.
        datadir: Gets the lists of each set in ``train_nodev/``, ``train_dev/`` and
            ``test/``; of cepstra, the features in ``feats/`` too.

    Returns:
        The utterances of each set.

    Raises:
        RecipeError: If the data cannot be used, or no space is left.
    """
    is_audio = corpus.kind_of(corpus_dir) == "audio"
    items = {
        name: [
            audio_item(utterance)
            if is_audio
            else cepstra_item(utterance, datadir / "feats")
            for utterance in utterances
        ]
        for name, utterances in corpus.splits(corpus_dir).items()
    }
    for name, listed in items.items():
        write_set(datadir / name, listed, None if is_audio else cepstra.FILTERS)
    return items


def prepare(datadir: Path, archive: Path | None = None) -> dict[str, list[Item]]:
    """Fetch, unpack, check and list the corpus.

    Args:
        datadir: Gets the download, ``corpus/``, and what `write_sets` writes.
        archive: As for `corpus.fetch_archive`.

    Returns:
        The utterances of each set.

    Raises:
        RecipeError: If the data cannot be had, used or written.
    """
    fetched = corpus.fetch_archive(datadir, archive)
    return write_sets(corpus.extract(fetched, datadir / "corpus"), datadir)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datadir", type=Path, required=True)
    parser.add_argument("--archive", type=Path)
    args = parser.parse_args()
    try:
        items = prepare(args.datadir.absolute(), args.archive)
    except (RecipeError, OSError) as exc:
        print(f"prepare.py: error: {exc}", file=sys.stderr)
        return 1
    for name, listed in items.items():
        minutes = sum(item.seconds for item in listed) / 60
        print(f"  {name}: {len(listed)} utterances, {minutes:.1f} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
