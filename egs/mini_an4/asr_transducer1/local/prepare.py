"""Write the data directories of mini_an4: wav.scp and text for each set."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "local"))
import corpus


def prepare(datadir: Path, archive: Path | None = None) -> dict[str, int]:
    """Fetch, unpack and list the corpus under `datadir`.

    Args:
        datadir: Gets ``downloads.tar.gz``, ``corpus/``, and ``wav.scp`` and
            ``text`` in each of ``train/``, ``valid/``, ``test/`` and ``all/``
            (the three together, to be decoded at once).
        archive: As for `corpus.fetch_archive`.

    Returns:
        The number of utterances in each set.

    Raises:
        corpus.CorpusError: If the data cannot be had, used or written.
    """
    fetched = corpus.fetch_archive(datadir, archive)
    sets = corpus.splits(corpus.extract(fetched, datadir / "corpus"))
    sets["all"] = [
        utterance for utterances in sets.values() for utterance in utterances
    ]
    for name, utterances in sets.items():
        lines = {
            "wav.scp": [f"{utt.utt_id} {utt.path}\n" for utt in utterances],
            "text": [f"{utt.utt_id} {utt.text}\n" for utt in utterances],
        }
        for file, content in lines.items():
            with corpus.replacing(datadir / name / file) as partial:
                partial.write_text("".join(content), encoding="utf-8")
    return {name: len(utterances) for name, utterances in sets.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datadir", type=Path, required=True)
    parser.add_argument("--archive", type=Path)
    args = parser.parse_args()
    try:
        counts = prepare(args.datadir.absolute(), args.archive)
    except (corpus.CorpusError, OSError) as exc:
        print(f"prepare.py: error: {exc}", file=sys.stderr)
        return 1
    print(
        f"  {counts['train']} utterances to train on, {counts['valid']} to validate, "
        f"{counts['test']} to test"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
