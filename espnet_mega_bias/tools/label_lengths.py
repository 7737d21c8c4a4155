"""How long training texts and their words are, in labels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from espnet_mega_bias.tools.error import ToolError


@dataclass(frozen=True)
class LabelLengths:
    """Lengths in labels, without the blank in front.

    Args:
        longest: Length of the longest utterance.
        where: Which utterance that is.
        words: How often each length of a word comes, words being what spaces divide.

    """

    longest: int
    where: str
    words: dict[int, int]

    def typical_word(self) -> int:
        """Give the length that 9 of 10 words do not exceed; 0 without words."""
        most = 0.9 * sum(self.words.values())
        seen = 0

        for length in sorted(self.words):
            seen += self.words[length]
            if seen >= most:
                return length

        return 0


def measure(
    texts: Sequence[Path], tokens_of: Callable[[str], list[str]]
) -> LabelLengths:
    """Count the labels of each utterance and word.

    Args:
        texts: Files with an utterance in each line, after its name, as Kaldi and
            ESPnet2 have them.
        tokens_of: Divides a text into tokens.

    Returns:
        : Lengths.

    Raises:
        ToolError: If a file is missing, is no text, or holds no utterance.

    """
    longest, where = -1, ""
    words: dict[int, int] = {}
    known: dict[str, int] = {}

    for path in texts:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as exc:
            raise ToolError(f"{path} is no text: {exc}") from exc

        for line in lines:
            name, _, text = line.strip().partition(" ")

            if not name:
                continue

            length = len(tokens_of(text))

            if length > longest:
                longest, where = length, f"utterance {name} of {path}"

            for word in text.split():
                if word not in known:
                    known[word] = len(tokens_of(word))
                words[known[word]] = words.get(known[word], 0) + 1

    if longest < 0:
        raise ToolError(f"no utterance in {', '.join(map(str, texts))}")

    return LabelLengths(longest, where, words)
