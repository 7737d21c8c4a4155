"""Train BPE units with sentencepiece, and write ESPnet's token list."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from recipe.files import RecipeError, replacing


def train(text: Path, nbpe: int, output: Path) -> int:
    """Train the units.

    Args:
        text: Lines that are an utterance's name and its words.
        nbpe: Number of units, <unk> among them.
        output: Folder that gets ``bpe.model`` and ``tokens.txt``: <blank> first, then
            the units in the model's order, <sos/eos> last.

    Returns:
        Number of tokens.

    Raises:
        RecipeError: If the text does not give so many units.
    """
    import sentencepiece

    lines = text.read_text(encoding="utf-8").splitlines()
    said = [line.partition(" ")[2] for line in lines]
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/bpe"
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(said),
                model_prefix=prefix,
                vocab_size=nbpe,
                model_type="bpe",
                character_coverage=1.0,
                bos_id=-1,
                eos_id=-1,
                unk_id=0,
                minloglevel=1,
            )
        except RuntimeError as exc:
            raise RecipeError(f"sentencepiece with --nbpe {nbpe}: {exc}") from exc
        model = Path(f"{prefix}.model").read_bytes()
    units = sentencepiece.SentencePieceProcessor(model_proto=model)
    names = [units.id_to_piece(number) for number in range(len(units))]
    tokens = ["<blank>", *names, "<sos/eos>"]
    with replacing(output / "bpe.model") as partial:
        partial.write_bytes(model)
    with replacing(output / "tokens.txt") as partial:
        partial.write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    return len(tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--nbpe", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            count = train(args.text, args.nbpe, args.output)
    except (RecipeError, OSError) as exc:
        print(f"bpe.py: error: {exc}", file=sys.stderr)
        return 1
    print(f"  {count} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
