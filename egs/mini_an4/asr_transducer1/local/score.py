"""Count word and character errors for each set and search, and write the table.

score.py --datadir DIR --output RESULTS.md [--picture FILE] DECODE_DIR ...
score.py --show RESULTS.md [--max_train_wer X]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "local"))
from corpus import CorpusError, replacing

SETS = ("train", "valid", "test")
HEADER = (
    "| search | set | utterances | words | word errors | WER % "
    "| characters | character errors | CER % |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|\n"
)
TRAIN_ROW = re.compile(
    r"^\| (?P<search>[^|]+) \| train \|(?:[^|]*\|){3} *(?P<wer>[\d.]+) \|"
)
CAVEAT = (
    "Four training utterances show that everything runs, not how good a model can be: "
    "learnt by heart, they come out right, and the others cannot."
)


@dataclass(frozen=True)
class Errors:
    """Errors on one set: substitutions, deletions and insertions together.

    Args:
        utterances: Number of utterances.
        words: Number of words that were said.
        word_errors: Number of wrong words.
        characters: Number of characters that were said, spaces included.
        character_errors: Number of wrong characters.
    """

    utterances: int
    words: int
    word_errors: int
    characters: int
    character_errors: int

    @property
    def wer(self) -> float:
        """Word error rate in %."""
        return 100 * self.word_errors / self.words

    @property
    def cer(self) -> float:
        """Character error rate in %."""
        return 100 * self.character_errors / self.characters


def read_text(path: Path) -> dict[str, str]:
    """Read a file of lines that are an utterance's name and its words."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(" ") for line in lines if line.strip())
    return {utt_id: " ".join(text.split()) for utt_id, _, text in pairs}


def count_errors(references: dict[str, str], hypotheses: dict[str, str]) -> Errors:
    """Align hypotheses with references.

    Raises:
        ValueError: If an utterance has no hypothesis (an empty one is one).
    """
    import jiwer

    missing = sorted(references.keys() - hypotheses.keys())
    if missing:
        raise ValueError(f"not decoded: {', '.join(missing)}")
    said = list(references.values())
    heard = [hypotheses[utt_id] for utt_id in references]
    words = jiwer.process_words(said, heard)
    characters = jiwer.process_characters(said, heard)

    def totals(output: object) -> tuple[int, int]:
        errors = output.substitutions + output.deletions
        return output.hits + errors, errors + output.insertions

    return Errors(len(references), *totals(words), *totals(characters))


def report(datadir: Path, decode_dirs: list[Path], pictures: list[Path]) -> str:
    """Return the results in Markdown.

    Raises:
        ValueError: If an utterance was not decoded.
    """
    references = {name: read_text(datadir / name / "text") for name in SETS}
    hypotheses = {
        directory.name: read_text(directory / "1best_recog" / "text")
        for directory in decode_dirs
    }
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("espnet", "torch", "torchaudio", "espnet-mega-bias")
    )
    lines = [f"# mini_an4\n\nPython {sys.version.split()[0]}, {versions}.\n\n", HEADER]
    for search, heard in hypotheses.items():
        for name, said in references.items():
            found = count_errors(said, heard)
            lines.append(
                f"| {search} | {name} | {found.utterances} | {found.words} "
                f"| {found.word_errors} | {found.wer:.1f} | {found.characters} "
                f"| {found.character_errors} | {found.cer:.1f} |\n"
            )
    lines.append(
        f"\n{CAVEAT}\n\n| set | utterance | said | {' | '.join(hypotheses)} |\n"
    )
    lines.append("|---" * (3 + len(hypotheses)) + "|\n")
    for name, said in references.items():
        for utt_id, text in said.items():
            heard = " | ".join(texts[utt_id] for texts in hypotheses.values())
            lines.append(f"| {name} | {utt_id} | {text} | {heard} |\n")
    lines.append("\nPictures:\n\n")
    lines += [f"- {picture}\n" for picture in pictures]
    return "".join(lines)


def check_train_wer(results: str, limit: float) -> None:
    """Compare the training set's word error rates in a report with `limit`, in %.

    Raises:
        ValueError: If one is above it; names the search.
    """
    rows = [match for match in map(TRAIN_ROW.match, results.splitlines()) if match]
    if not rows:
        raise ValueError("the results have no row for the training set")
    for row in rows:
        if float(row["wer"]) > limit:
            raise ValueError(
                f"the training set was not learnt: WER {row['wer']} % with "
                f"{row['search']}, above {limit:g} %"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--datadir", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path, action="append", default=[])
    parser.add_argument("--show", type=Path)
    parser.add_argument("--max_train_wer", type=float)
    parser.add_argument("decode_dirs", nargs="*", type=Path)
    args = parser.parse_args()
    try:
        if args.show is None:
            results = report(args.datadir, args.decode_dirs, args.picture)
            with replacing(args.output) as partial:
                partial.write_text(results, encoding="utf-8")
        else:
            results = args.show.read_text(encoding="utf-8")
            print(f"\n{results}\nThis table: {args.show}")
        if args.max_train_wer is not None:
            check_train_wer(results, args.max_train_wer)
    except FileNotFoundError as exc:
        error = f"{exc.filename} is missing; an earlier stage makes it"
    except (CorpusError, ValueError, OSError) as exc:
        error = exc
    else:
        return 0
    print(f"score.py: error: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
