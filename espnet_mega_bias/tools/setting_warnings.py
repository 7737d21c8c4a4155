"""Settings of a decoder that hurt, each with what to write instead."""

from dataclasses import dataclass

from espnet_mega_bias.tools import decoder_cost
from espnet_mega_bias.tools.label_lengths import LabelLengths
from espnet_mega_bias.tools.training_config import TrainingConfig

# Labels that 9 of 10 English words have, where there is no text to look at: by letters
# and phonemes as in running text, by pieces with a vocabulary of some hundreds or more.
TYPICAL_WORD = {"char": 9, "phn": 8, "word": 1}
TYPICAL_WORD_IN_PIECES = 4

# Tables of sines and cosines, or of learned values, that are small beside a model.
SMALL_TABLES = 100_000_000  # bytes, of all blocks

# A chunk as long as this many typical words cuts few of them.
WORDS_PER_CHUNK = 4

_RATES = {
    "dropout_rate": "the MEGA blocks pass on nothing but their input",
    "embed_dropout_rate": "the decoder sees no label",
    "att_dropout_rate": "attention finds nothing",
    "ema_dropout_rate": "gates, queries and keys do not depend on the labels",
    "ffn_dropout_rate": "the feed-forward modules do nothing",
}


@dataclass(frozen=True)
class SettingWarning:
    """A setting that hurts.

    Args:
        text: Setting and consequence.
        instead: What to write in `decoder_conf`, or to leave out.

    """

    text: str
    instead: str


def warn(config: TrainingConfig, lengths: LabelLengths | None) -> list[SettingWarning]:
    """Look for settings that hurt.

    Args:
        config: Configuration.
        lengths: Lengths of training texts; None where they are not known, and without
            words where only the longest utterance is known.

    Returns:
        : Warnings; none where nothing hurts.

    """
    found = [
        _max_positions(config, lengths),
        _tables(config),
        _chunk_of_one(config),
        _chunk_size(config, lengths),
        _max_positions_beside_chunk(config),
        _truncation(config),
        *(_rate(config, key) for key in _RATES),
        _embed_pad(config),
    ]

    return [warning for warning in found if warning is not None]


def _max_positions(
    config: TrainingConfig, lengths: LabelLengths | None
) -> SettingWarning | None:
    held = config.settings["max_positions"]

    if lengths is None or held is None or config.settings["chunk_size"] > 0:
        return None

    needed = lengths.longest + 1

    if needed <= held:
        return None

    grows = (
        config.decoder == "mega" and config.settings["rel_pos_bias_type"] == "rotary"
    )
    consequence = "grows its tables without a word" if grows else "stops with an error"

    return SettingWarning(
        f"max_positions: {held} is less than the {needed} positions of {lengths.where} "
        f"({lengths.longest} labels and the blank in front): training {consequence}",
        f"max_positions: {needed}",
    )


def _tables(config: TrainingConfig) -> SettingWarning | None:
    settings = config.settings
    # The learned table is among the parameters instead.
    learned = decoder_cost.FLOAT * (2 * (decoder_cost.limit(settings) or 0) - 1)
    size = settings["num_blocks"] * (decoder_cost.table_bytes(settings) or learned)

    if size <= SMALL_TABLES:
        return None

    key = "chunk_size" if settings["chunk_size"] > 0 else "max_positions"

    return SettingWarning(
        f"{key}: {settings[key]} makes tables of {size / 1e9:,.1f} GB for the bias",
        f"{key}: 1 more than the longest training text has labels",
    )


def _chunk_of_one(config: TrainingConfig) -> SettingWarning | None:
    if config.settings["chunk_size"] != 1:
        return None

    if config.decoder == "mega":
        return SettingWarning(
            "chunk_size: 1 stops the search of ESPnet's mega with an error",
            "decoder: mega_bias, or chunk_size: -1",
        )

    return SettingWarning(
        "chunk_size: 1 lets each label attend to itself alone: attention does nothing",
        "chunk_size: -1 (full context)",
    )


def _chunk_size(
    config: TrainingConfig, lengths: LabelLengths | None
) -> SettingWarning | None:
    chunk = config.settings["chunk_size"]

    if chunk <= 1:
        return None

    if lengths is not None and lengths.words:
        typical, source = lengths.typical_word(), "in the texts given"
    else:
        # ESPnet's default is bpe.
        token_type = config.config.get("token_type") or "bpe"
        typical = TYPICAL_WORD.get(token_type, TYPICAL_WORD_IN_PIECES)
        source = f"of English, by rule of thumb for token_type {token_type}"

    if chunk >= typical:
        return None

    return SettingWarning(
        f"chunk_size: {chunk} is shorter than typical words ({source}, 9 of 10 have up "
        f"to {typical} labels): attention does not reach from their end to their start",
        f"chunk_size: {WORDS_PER_CHUNK * typical}",
    )


def _max_positions_beside_chunk(config: TrainingConfig) -> SettingWarning | None:
    chunk, given = config.settings["chunk_size"], config.given.get("max_positions")

    if chunk <= 0 or given is None or given == chunk:
        return None

    return SettingWarning(
        f"max_positions: {given} has no effect beside chunk_size: {chunk}, which takes "
        "its place",
        "leave max_positions out",
    )


def _truncation(config: TrainingConfig) -> SettingWarning | None:
    settings = config.settings
    reach = settings["truncation_length"]

    if reach is None:
        return None

    if config.decoder == "mega":
        return SettingWarning(
            f"truncation_length: {reach} shortens the EMA of ESPnet's mega in training "
            "only: the search goes on with another function",
            "truncation_length: null, or decoder: mega_bias",
        )

    block = {**settings, "num_blocks": 1}
    whole = {**block, "truncation_length": None}
    more, less = (
        decoder_cost.step("mega_bias", conf, reach).ema for conf in (block, whole)
    )
    held, sums = (decoder_cost.ema_bytes("mega_bias", conf) for conf in (block, whole))

    return SettingWarning(
        f"truncation_length: {reach} lets an EMA output depend on the last {reach} "
        f"labels alone; in each block, the search then pays {more:,} multiply-adds per "
        f"label for the EMA instead of {less:,}, and keeps {held:,} bytes of state "
        f"instead of {sums:,}",
        "truncation_length: null",
    )


def _rate(config: TrainingConfig, key: str) -> SettingWarning | None:
    if config.settings[key] < 1:
        return None

    return SettingWarning(f"{key}: 1 drops everything: {_RATES[key]}", f"{key}: 0.1")


def _embed_pad(config: TrainingConfig) -> SettingWarning | None:
    label = config.settings["embed_pad"]

    if label == 0:
        return None

    return SettingWarning(
        f"embed_pad: {label} makes label {label} padding, which is kept out of the EMA "
        "and never attended to, while ESPnet pads with its blank, label 0",
        "embed_pad: 0",
    )
