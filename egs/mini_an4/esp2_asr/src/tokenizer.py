"""The text that the tokenizer is trained on."""

from __future__ import annotations

from pathlib import Path

from dataset.manifest import read_manifest


def training_text(manifest: Path | str) -> list[str]:
    """Return the transcript of each utterance in a manifest.

    Raises:
        FileNotFoundError: If the manifest, or an audio file in it, is missing.
        ValueError: If the manifest is malformed or has an empty transcript.
    """
    return [row.text for row in read_manifest(manifest)]
