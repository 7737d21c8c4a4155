"""What a decoder costs, counted from its settings.

Letters: D block_size, L linear_size, S qk_size, V v_size, H num_heads, N num_blocks;
U is a number of decoder positions, the blank in front included.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FLOAT = 4  # bytes of a float32

# Part of a block: parameters whose names begin so.
_PARTS = {
    "EMA": ("0.multihead_damped_ema.",),
    "attention (W_v, W_h, w, b)": ("0.proj_v.", "0.proj_h.", "0.qk_"),
    "gates and keys (W_mx)": ("0.proj_mx.",),
    "feed-forward": ("1.linear",),
    "bias": ("0.rel_pos_bias.",),
    "normalisation": ("0.normalization.", "1.normalization."),
}


@dataclass(frozen=True)
class StepCost:
    """Multiply-adds of one label of one hypothesis, of all blocks.

    Elementwise work other than that of the EMA is left out: it is a few multiples of
    D + V.

    Args:
        linear: Linear layers.
        attention: Scores, weighted sum, and the bias where a step computes it.
        ema: EMA; multiplications, of which a sum over heads takes none.

    """

    linear: int
    attention: int
    ema: int

    @property
    def total(self) -> int:
        """Sum of the three."""
        return self.linear + self.attention + self.ema


def parameters(decoder: "torch.nn.Module") -> dict[str, int]:
    """Count the parameters of a decoder by part.

    Args:
        decoder: MEGADecoder or MEGABiasDecoder; its values are not looked at.

    Returns:
        : Number of parameters of the embedding, of each part of one block (all blocks
            are alike), of the final normalisation, and of the whole ("total").

    """
    block = {
        name: parameter.numel()
        for name, parameter in decoder.mega_blocks[0].named_parameters()
    }
    parts = {
        part: sum(count for name, count in block.items() if name.startswith(prefixes))
        for part, prefixes in _PARTS.items()
    }

    return {
        "embedding": decoder.embed.weight.numel(),
        **parts,
        "final normalisation": sum(p.numel() for p in decoder.final_norm.parameters()),
        "total": sum(p.numel() for p in decoder.parameters()),
    }


def limit(settings: Mapping[str, Any]) -> int | None:
    """Say how many positions attention reaches at most, or None where all.

    Args:
        settings: All keys of `decoder_conf`.

    """
    if settings["chunk_size"] > 0:
        return settings["chunk_size"]

    return settings["max_positions"]


def label_bytes(settings: Mapping[str, Any]) -> int:
    """Count the bytes of the key and the value of one label in one block, in float32.

    Args:
        settings: All keys of `decoder_conf`.

    """
    return FLOAT * (settings["qk_size"] + settings["v_size"])


def ema_bytes(decoder: str, settings: Mapping[str, Any]) -> int:
    """Count the bytes of the EMA state in one block, once per hypothesis, in float32.

    With `truncation_length` M, mega_bias keeps the last M - 1 inputs of size D, once so
    many have come, in place of D x H sums.

    Args:
        decoder: "mega" or "mega_bias".
        settings: All keys of `decoder_conf`.

    """
    size, reach = settings["block_size"], settings["truncation_length"]

    if decoder == "mega_bias" and reach is not None:
        return FLOAT * (reach - 1) * size

    return FLOAT * size * settings["num_heads"]


def state_bytes(decoder: str, settings: Mapping[str, Any], length: int) -> int:
    """Count the bytes of one hypothesis's state in all blocks, in float32.

    Keys and values count in full, though hypotheses of mega_bias share those of the
    labels that they have in common, which takes 16 bytes per label of each. What a
    search keeps beside its hypotheses is left out.

    Args:
        decoder: "mega" or "mega_bias".
        settings: All keys of `decoder_conf`.
        length: Number of positions U scored; with chunks, in one chunk.

    """
    labels, ema = length, ema_bytes(decoder, settings)

    if decoder == "mega":
        labels += 1  # Its key of zeros.
    elif settings["truncation_length"] is not None:
        ema = min(ema, FLOAT * settings["block_size"] * length)

    return settings["num_blocks"] * (labels * label_bytes(settings) + ema)


def table_bytes(settings: Mapping[str, Any]) -> int:
    """Count the bytes of the sines and cosines that one block keeps, in float32.

    Args:
        settings: All keys of `decoder_conf`.

    """
    if settings["rel_pos_bias_type"] != "rotary":
        return 0

    return FLOAT * (limit(settings) or 2048) * settings["qk_size"]


def step(decoder: str, settings: Mapping[str, Any], length: int) -> StepCost:
    """Count the multiply-adds of one label of one hypothesis.

    What the search adds by sharing is left out: its products also cover keys of other
    hypotheses, and for a while those out of reach, which are masked.

    Args:
        decoder: "mega" or "mega_bias".
        settings: All keys of `decoder_conf`.
        length: Number of positions U, that of the label included. With chunks, the
            chunk's.

    """
    size, keys, values = (settings[key] for key in ("block_size", "qk_size", "v_size"))
    attended, bias = min(length, limit(settings) or length), 0

    if decoder == "mega":
        # The search begins with a key of zeros, and max_positions is no limit to it ...
        attended = length + 1

        if settings["chunk_size"] > 0:
            attended = min(attended, settings["chunk_size"])

        # ... and forms the whole matrix of the bias for its last row.
        if settings["rel_pos_bias_type"] == "rotary":
            bias = attended**2 * keys

    linear = (
        size * values  # W_v
        + size * (keys + values + 2 * size)  # W_mx
        + values * size  # W_h
        + 2 * size * settings["linear_size"]  # feed-forward
    )
    blocks = settings["num_blocks"]

    return StepCost(
        linear=blocks * linear,
        attention=blocks * (attended * (keys + values) + bias),
        ema=blocks * _ema(decoder, settings, length),
    )


def _ema(decoder: str, settings: Mapping[str, Any], length: int) -> int:
    size, heads = settings["block_size"], settings["num_heads"]
    reach = settings["truncation_length"]

    if decoder == "mega":
        # Input weight, input, state, projection by its scale, projection; the residual.
        return 5 * size * heads + size

    if reach is not None:
        # The inputs within reach, of which the latest takes the residual along.
        return size * min(length, reach)

    # State and input; the output from the latter, which takes the residual along.
    return 2 * size * heads + size


def training_bytes(decoder: str, settings: Mapping[str, Any], length: int) -> int:
    """Count the bytes of attention weights that one utterance keeps for the gradient.

    A matrix of U x U in each block (of one chunk by one chunk for each chunk), in
    float32. mega_bias takes blocks of queries and leaves out keys after the last of
    each. With dropout of the weights, mega_bias keeps the noise beside them; mega
    keeps noise and product (as measured on a CPU).

    Args:
        decoder: "mega" or "mega_bias".
        settings: All keys of `decoder_conf`.
        length: Number of positions U.

    """
    from espnet_mega_bias.attention import query_blocks

    side, count = length, 1

    if 0 < settings["chunk_size"] < length:
        side = settings["chunk_size"]
        count = -(-length // side)

    dropout = settings["att_dropout_rate"] > 0

    if decoder == "mega":
        entries, copies = side**2, 3 if dropout else 1
    else:
        entries = sum((end - start) * end for start, end in query_blocks(side))
        copies = 2 if dropout else 1

    return FLOAT * settings["num_blocks"] * count * entries * copies
