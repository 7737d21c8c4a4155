"""The configuration of a training to come, or of one that was."""

import difflib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.experiment import Configuration, read_config
from espnet_mega_bias.tools.quiet import quiet_imports

if TYPE_CHECKING:
    import torch

    from espnet_mega_bias import MEGABiasDecoder

# ESPnet3's defaults, which a recipe's training.yaml completes.
_ESPNET3_DEFAULTS = ("training.yaml", "egs3.TEMPLATE.esp2_asr")

# The keys that this is about, and those that are like them.
_NAMES = ("decoder", "decoder_conf", "encoder", "encoder_conf")

_TOKENIZER_KEYS = (
    "token_type",
    "bpemodel",
    "non_linguistic_symbols",
    "cleaner",
    "text_cleaner",
    "g2p",
    "g2p_type",
)


@dataclass(frozen=True)
class TrainingConfig(Configuration):
    """A training's configuration, as far as it says something about the decoder.

    Args:
        config_file: File of the configuration.
        config: Tokenizer and token list, under ESPnet2's keys.
        decoder: "mega" or "mega_bias".
        given: The keys of `decoder_conf` that it holds, with their values.
        settings: All keys of `decoder_conf`, with their values or defaults.

    """

    decoder: str
    given: dict[str, Any]
    settings: dict[str, Any]

    @property
    def vocab_size(self) -> int | None:
        """Number of tokens, or None where the configuration does not tell."""
        try:
            return len(self.tokens)
        except ToolError:
            return None

    def build(self) -> "torch.nn.Module":
        """Build the decoder, with weights as a training starts with.

        Returns:
            : Decoder in evaluation mode. Where the number of tokens is unknown it has
                as few as it can.

        Raises:
            ToolError: If a value is refused.

        """
        return self._built(self.decoder).eval()

    def outline(self) -> "MEGABiasDecoder":
        """Build mega_bias without memory for its values, to be counted.

        ESPnet's `mega` has the same keys and parameters.

        Returns:
            : Decoder on the meta device.

        Raises:
            ToolError: If a value is refused.

        """
        import torch

        with torch.device("meta"):
            return self._built("mega_bias")

    def _built(self, decoder: str) -> "torch.nn.Module":
        size, pad = self.vocab_size, self.settings["embed_pad"]

        if size is None:
            size = max(pad + 1, 2) if isinstance(pad, int) else 2

        try:
            return _classes()[decoder](size, **self.given)
        except Exception as exc:  # whatever the class says about its arguments
            raise ToolError(f"{self.config_file}: decoder_conf: {exc}") from exc


def read(path: Path, **replaced: str | None) -> TrainingConfig:
    """Read a training's configuration, and check what it says about the decoder.

    Args:
        path: YAML as ESPnet2's training takes it, ESPnet3's training.yaml, or the
            config.yaml that a training of either wrote.
        replaced: What takes the place of a key, where it is not None: `token_list`,
            `token_type`, `bpemodel`.

    Returns:
        : Configuration. Every value of `decoder_conf` has been accepted by the
            decoder.

    Raises:
        ToolError: If the file is missing or no YAML, the decoder is another one, or
            `decoder_conf` has an unknown key or a value that is refused.

    """
    if not path.is_file():
        raise ToolError(f"no such file: {path}")

    config = read_config(path)

    if "decoder" not in config and "model" in config:
        config = _from_espnet3(path)

    decoder, given = config.get("decoder"), config.get("decoder_conf") or {}

    for key in config:
        if key not in _NAMES and (close := _close(key, _NAMES[:2], cutoff=0.8)):
            raise ToolError(f"{path}: unknown key {key!r}; did you mean {close}?")

    if decoder is None:
        raise ToolError(f"{path}: no decoder is named, mega_bias or mega is needed")

    if decoder not in ("mega", "mega_bias"):
        close = _close(decoder, ("mega_bias", "mega"))
        hint = f"; did you mean {close}?" if close else ""
        raise ToolError(
            f"{path}: the decoder is {decoder!r}, not mega_bias or mega{hint}"
        )

    if not isinstance(given, dict):
        raise ToolError(f"{path}: decoder_conf: keys expected, not {given!r}")

    config |= {key: value for key, value in replaced.items() if value is not None}
    settings = {**_defaults(decoder, given, path), **given}

    if decoder == "mega" and settings["max_positions"] is None:
        raise ToolError(
            f"{path}: decoder_conf: max_positions must be a number with mega, got None "
            "(mega_bias takes null with rel_pos_bias_type: rotary)"
        )

    read = TrainingConfig(path, config, decoder, given, settings)
    # Ours says more clearly what is wrong with a value.
    read.outline()

    if replaced.get("token_list") is not None:
        read.tokens  # noqa: B018 (raises where the file that was named is no list)

    return read


def _defaults(decoder: str, given: dict[str, Any], path: Path) -> dict[str, Any]:
    parameters = inspect.signature(_classes()[decoder]).parameters
    defaults = {
        key: parameter.default
        for key, parameter in parameters.items()
        if parameter.default is not parameter.empty
    }

    for key in given:
        if key not in defaults:
            close = _close(key, list(defaults))
            hint = (
                f"did you mean {close}?" if close else f"known: {', '.join(defaults)}"
            )
            raise ToolError(
                f"{path}: decoder_conf: {decoder} has no key {key!r}; {hint}"
            )

    return defaults


def _close(key: object, known: Sequence[str], cutoff: float = 0.6) -> str | None:
    return next(iter(difflib.get_close_matches(str(key), known, 1, cutoff)), None)


def _classes() -> "dict[str, type[torch.nn.Module]]":
    with quiet_imports():
        from espnet2.asr_transducer.decoder.mega_decoder import MEGADecoder

        from espnet_mega_bias.decoder import MEGABiasDecoder

    return {"mega": MEGADecoder, "mega_bias": MEGABiasDecoder}


def _from_espnet3(path: Path) -> dict[str, Any]:
    """Put what is needed of ESPnet3's training.yaml under ESPnet2's keys.

    Raises:
        ToolError: If a value of the decoder refers to what cannot be found.

    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with quiet_imports():
            from espnet3.utils.config_utils import load_and_merge_config

        config = load_and_merge_config(path, *_ESPNET3_DEFAULTS, resolve=False)
    except ImportError:
        # Without ESPnet3 its defaults are missing, which say nothing of a decoder.
        config = OmegaConf.load(path)
    except (OmegaConfBaseException, OSError) as exc:
        raise ToolError(f"{path}: {exc}") from exc

    def value(key: str) -> Any:
        found = OmegaConf.select(config, key)

        if OmegaConf.is_config(found):
            return OmegaConf.to_container(found, resolve=True)

        return found

    def value_or_none(key: str) -> Any:
        try:
            return value(key)
        except OmegaConfBaseException:
            return None

    try:
        decoder = {key: value(f"model.{key}") for key in ("decoder", "decoder_conf")}
    except OmegaConfBaseException as exc:
        raise ToolError(f"{path}: model: {exc}") from exc

    preprocessor = {
        key: value_or_none(f"dataset.preprocessor.{key}") for key in _TOKENIZER_KEYS
    }

    return {**preprocessor, **decoder, "token_list": value_or_none("model.token_list")}
