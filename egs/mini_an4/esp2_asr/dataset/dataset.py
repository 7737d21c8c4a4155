"""One set of mini_an4, as ESPnet3 reads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile
from espnet3.components.data.base_dataset import BaseDataset
from espnet3.contract import Field

from .manifest import manifest_path, read_manifest


class MiniAn4Dataset(BaseDataset):
    """The utterances of one set.

    An item holds "speech", float32 of shape (samples,) at 16 kHz in [-1, 1], and
    "text".

    Args:
        split: "train", "valid" or "test".
        data_dir: Where the create_dataset stage put the manifests.
        with_utt_id: Add the utterance's name as "utt_id". Decoding wants it, to
            name its results; training cannot put a string into a batch.

    Raises:
        ValueError: If the split is unknown or its manifest is malformed.
        FileNotFoundError: If the manifest or an audio file is missing.
    """

    def __init__(
        self, split: str, data_dir: Path | str, with_utt_id: bool = False
    ) -> None:
        self.rows = read_manifest(manifest_path(data_dir, split))
        self.with_utt_id = with_utt_id
        self.fields = (Field("speech", "audio"), Field("text", "text"))
        if with_utt_id:
            self.fields += (Field("utt_id", "text"),)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray | str]:
        row = self.rows[int(index)]
        speech, _ = soundfile.read(row.path, dtype="float32")
        item = {"speech": speech, "text": row.text}
        if self.with_utt_id:
            item["utt_id"] = row.utt_id
        return item
