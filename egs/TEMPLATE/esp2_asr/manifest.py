"""The list of a set's utterances: name, recording and words, one utterance a line."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """One line of a manifest.

    Args:
        utt_id: Name of the utterance.
        path: Its recording.
        text: The words, separated by single spaces.
    """

    utt_id: str
    path: Path
    text: str


def manifest_path(data_dir: Path | str, split: str) -> Path:
    """Return where the manifest of `split` lies below `data_dir`."""
    return Path(data_dir) / "manifest" / f"{split}.tsv"


def format_manifest(rows: list[Row]) -> str:
    """Return the text of a manifest file; `read_manifest` is its inverse."""
    return "".join(f"{row.utt_id}\t{row.path}\t{row.text}\n" for row in rows)


def read_manifest(path: Path | str) -> list[Row]:
    """Read a manifest, and check that every utterance has words and a recording.

    Raises:
        FileNotFoundError: If the manifest, or a recording in it, is missing.
        ValueError: If a line is malformed, a transcript is empty, or the
            manifest has no line at all.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no manifest {path}: run the create_dataset stage")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{path}, line {number}"
        columns = line.split("\t")
        if len(columns) != 3 or not all(columns[:2]):
            raise ValueError(
                f"{where}: wanted name, recording and words with tabs between, "
                f"got {line!r}"
            )
        row = Row(columns[0], Path(columns[1]), columns[2].strip())
        if not row.text:
            raise ValueError(f"{where}: utterance {row.utt_id} has an empty transcript")
        if not row.path.is_file():
            raise FileNotFoundError(
                f"{where}: utterance {row.utt_id} has no recording: {row.path} is "
                "missing; the create_dataset stage restores it"
            )
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} lists no utterance")
    return rows
