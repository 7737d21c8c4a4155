"""Write the data directories of mini_an4: wav.scp and text for each set."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "local"))
import corpus
from recipe.audio import check_audio
from recipe.datadir import Item, write_set


def prepare(datadir: Path, archive: Path | None = None) -> dict[str, int]:
    """Fetch, unpack and list the corpus under `datadir`.

    Args:
        datadir: Gets ``downloads.tar.gz``, ``corpus/``, and the lists of each set in
            ``train/``, ``valid/`` and ``test/``.
        archive: As for `corpus.fetch_archive`.

    Returns:
        The number of utterances in each set.

    Raises:
        RecipeError: If the data cannot be had, used or written.
    """
    fetched = corpus.fetch_archive(datadir, archive)
    sets = corpus.splits(corpus.extract(fetched, datadir / "corpus"))
    for name, utterances in sets.items():
        items = [
            Item(utt.utt_id, utt.path, utt.text, check_audio(utt.utt_id, utt.path))
            for utt in utterances
        ]
        write_set(datadir / name, items)
    return {name: len(utterances) for name, utterances in sets.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datadir", type=Path, required=True)
    parser.add_argument("--archive", type=Path)
    args = parser.parse_args()
    try:
        counts = prepare(args.datadir.absolute(), args.archive)
    except (corpus.RecipeError, OSError) as exc:
        print(f"prepare.py: error: {exc}", file=sys.stderr)
        return 1
    print(
        f"  {counts['train']} utterances to train on, {counts['valid']} to validate, "
        f"{counts['test']} to test"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
