"""The lists of a set that ESPnet reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from recipe.files import replacing


class Item(NamedTuple):
    """An utterance of a set.

    Args:
        utt_id: Its name.
        path: Audio file, or features as .npy of shape (frames, size).
        text: The words.
        seconds: Length of the recording.
    """

    utt_id: str
    path: Path
    text: str
    seconds: float


def write_set(folder: Path, items: Iterable[Item], feats_dim: int | None = None):
    """Write the lists of one set.

    Args:
        folder: Gets ``wav.scp`` (``feats.scp`` and ``feats_dim`` for features),
            ``text`` and ``utt2dur``, and no others of these.
        items: The utterances, sorted by name.
        feats_dim: Size of the features; None for audio.

    Raises:
        RecipeError: If no space is left.
    """
    items = list(items)
    scp = "wav.scp" if feats_dim is None else "feats.scp"
    contents = {
        scp: "".join(f"{item.utt_id} {item.path}\n" for item in items),
        "text": "".join(f"{item.utt_id} {item.text}\n" for item in items),
        "utt2dur": "".join(f"{item.utt_id} {item.seconds:.3f}\n" for item in items),
    }
    if feats_dim is not None:
        contents["feats_dim"] = f"{feats_dim}\n"
    for name in ("wav.scp", "feats.scp", "feats_dim"):
        if name not in contents:
            (folder / name).unlink(missing_ok=True)
    for name, content in contents.items():
        with replacing(folder / name) as partial:
            partial.write_text(content, encoding="utf-8")
