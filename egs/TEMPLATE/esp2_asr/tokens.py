"""Tokens: the text that they are made of, and characters as tokens."""

from __future__ import annotations

from pathlib import Path

from espnet2.bin import tokenize_text

from esp2_asr.manifest import read_manifest


def training_text(manifest: Path | str) -> list[str]:
    """Return the transcript of each utterance in a manifest.

    Raises:
        FileNotFoundError: If the manifest, or a recording in it, is missing.
        ValueError: If the manifest is malformed or has an empty transcript.
    """
    return [row.text for row in read_manifest(manifest)]


def write_characters(texts: list[str], text_file: Path, token_list: Path) -> None:
    """Write the list of characters, as ESPnet2's recipes do.

    Args:
        texts: What they are taken from.
        text_file: Where the text is put for ESPnet's command.
        token_list: Gets <blank>, <unk>, the characters, frequent ones first and the
            space as <space>, and <sos/eos>, one a line.
    """
    text_file.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    options = ["--input", str(text_file), "--output", str(token_list)]
    options += ["--token_type", "char", "--write_vocabulary", "true"]
    for symbol in ("<blank>:0", "<unk>:1", "<sos/eos>:-1"):
        options += ["--add_symbol", symbol]
    tokenize_text.main(options)
