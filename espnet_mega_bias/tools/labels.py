"""Text as the labels that a trained model knows."""

from collections.abc import Callable

from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.experiment import Configuration
from espnet_mega_bias.tools.quiet import quiet_imports

_BLANK = 0  # ESPnet's transducer has it nowhere else


def labels_of(configuration: Configuration, text: str) -> list[int]:
    """Divide a text into labels, as the training did with its transcripts.

    Args:
        configuration: Configuration of a trained model; it names the tokenizer.
        text: Text.

    Returns:
        : Labels, the blank in front. [U]

    Raises:
        ToolError: If the tokenizer cannot be built, or gives a token that the model
            does not have, or none.

    """
    tokens = tokenizer_of(configuration)(text)
    label_of = {token: label for label, token in enumerate(configuration.tokens)}

    if not tokens:
        raise ToolError(f"no token is left of the text {text!r}")

    if unknown := sorted({token for token in tokens if token not in label_of}):
        raise ToolError(
            f"the model has no token {', '.join(map(repr, unknown))} "
            f"(tokens of {text!r}: {' '.join(tokens)}); it was trained on: "
            f"{_excerpt(configuration.tokens)}"
        )

    return [_BLANK, *(label_of[token] for token in tokens)]


def tokenizer_of(configuration: Configuration) -> Callable[[str], list[str]]:
    """Build what divides texts into tokens, as the training does with transcripts.

    Args:
        configuration: Configuration; it names the tokenizer.

    Returns:
        : Function that gives the tokens of a text.

    Raises:
        ToolError: If the tokenizer cannot be built; the function raises it too, where
            the tokenizer refuses a text.

    """
    with quiet_imports():
        from espnet2.text.build_tokenizer import build_tokenizer
        from espnet2.text.cleaner import TextCleaner

    # ESPnet3 adds what its data set's preprocessor is built with, under other names.
    config = configuration.config
    token_type = config.get("token_type")

    if token_type is None:
        raise ToolError(
            f"{configuration.config_file}: no token_type, hence no tokenizer"
        )

    cleaner = config.get("text_cleaner") or config.get("cleaner")
    g2p = config.get("g2p_type") or config.get("g2p")
    files = {
        key: str(configuration.find_file(config[key])) if config.get(key) else None
        for key in ("bpemodel", "non_linguistic_symbols")
    }

    def error(exc: Exception) -> ToolError:
        return ToolError(
            f"{configuration.config_file}: no tokenizer of token_type "
            f"{token_type}: {type(exc).__name__}: {exc}"
        )

    try:
        tokenizer = build_tokenizer(token_type, **files, g2p_type=g2p)
        clean = TextCleaner(cleaner)
    except Exception as exc:  # from a tokenizer of any package
        raise error(exc) from exc

    def tokens_of(text: str) -> list[str]:
        try:
            return tokenizer.text2tokens(clean(text))
        except Exception as exc:  # likewise; sentencepiece reads its model only here
            raise error(exc) from exc

    return tokens_of


def _excerpt(tokens: list[str], most: int = 40) -> str:
    return " ".join(tokens[:most]) + (" ..." if len(tokens) > most else "")
