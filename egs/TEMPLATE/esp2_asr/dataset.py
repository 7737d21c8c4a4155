"""One set of a corpus, as ESPnet3 reads it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import soundfile
from espnet3.components.data.base_dataset import BaseDataset
from espnet3.contract import Field

from esp2_asr.manifest import Row, manifest_path, read_manifest


class ManifestDataset(BaseDataset):
    """The utterances of one set.

    An item holds "speech", which is what `read` gives, and "text". A recipe's class
    sets `SPLITS`, the names of its sets.

    Args:
        split: Name of the set.
        data_dir: Where the create_dataset stage put the manifests.
        with_utt_id: Add the utterance's name as "utt_id". Decoding wants it, to
            name its results; training cannot put a string into a batch.

    Raises:
        ValueError: If the split is unknown or its manifest is malformed.
        FileNotFoundError: If the manifest or a recording is missing.
    """

    SPLITS: ClassVar[tuple[str, ...]]

    def __init__(
        self, split: str, data_dir: Path | str, with_utt_id: bool = False
    ) -> None:
        if split not in self.SPLITS:
            raise ValueError(
                f"split must be one of {', '.join(self.SPLITS)}, got {split!r}"
            )
        self.rows = read_manifest(manifest_path(data_dir, split))
        self.with_utt_id = with_utt_id
        self.fields = (Field("speech", "audio"), Field("text", "text"))
        if with_utt_id:
            self.fields += (Field("utt_id", "text"),)

    @staticmethod
    def read(row: Row) -> np.ndarray:
        """Return the audio, float32 of shape (samples,) in [-1, 1]."""
        return soundfile.read(row.path, dtype="float32")[0]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray | str]:
        row = self.rows[int(index)]
        item = {"speech": self.read(row), "text": row.text}
        if self.with_utt_id:
            item["utt_id"] = row.utt_id
        return item
