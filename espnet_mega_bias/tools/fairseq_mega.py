"""Blocks of facebookresearch/mega as blocks of the MEGA decoder."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.experiment import read_config, read_saved
from espnet_mega_bias.tools.output import check_is_free, new_directory
from espnet_mega_bias.tools.quiet import quiet_imports

if TYPE_CHECKING:
    import torch

WEIGHTS, SNIPPET = "mega_blocks.pth", "decoder.yaml"

# Options of fairseq that decide what a block computes and leave no trace in its
# weights.
OPTIONS = (
    "activation_fn",
    "attention_activation_fn",
    "normalize_before",
    "decoder_chunk_size",
    "truncation_length",
)

# Names in a layer of facebookresearch/mega, and in a block here.
_NAMES = {
    "mega_layer.move.beta": "0.multihead_damped_ema.ema_expansion_matrix",
    "mega_layer.move.gamma": "0.multihead_damped_ema.kernel_projection_matrix",
    "mega_layer.move.omega": "0.multihead_damped_ema.residual_weight",
    "mega_layer.v_proj.weight": "0.proj_v.weight",
    "mega_layer.v_proj.bias": "0.proj_v.bias",
    "mega_layer.mx_proj.weight": "0.proj_mx.weight",
    "mega_layer.mx_proj.bias": "0.proj_mx.bias",
    "mega_layer.h_proj.weight": "0.proj_h.weight",
    "mega_layer.h_proj.bias": "0.proj_h.bias",
    "mega_layer.gamma": "0.qk_weight",
    "mega_layer.beta": "0.qk_bias",
    "mega_layer.norm.norm.weight": "0.normalization.weight",
    "mega_layer.norm.norm.bias": "0.normalization.bias",
    "nffn.fc1.weight": "1.linear1.weight",
    "nffn.fc1.bias": "1.linear1.bias",
    "nffn.fc2.weight": "1.linear2.weight",
    "nffn.fc2.bias": "1.linear2.bias",
    "nffn.norm.norm.weight": "1.normalization.weight",
    "nffn.norm.norm.bias": "1.normalization.bias",
}
_BIAS = "mega_layer.rel_pos_bias."
_BIAS_NAMES = {
    "simple": {_BIAS + "rel_pos_bias": "0.rel_pos_bias.relative_position_bias"},
    "rotary": {
        _BIAS + "alpha": "0.rel_pos_bias.alpha",
        _BIAS + "beta": "0.rel_pos_bias.beta",
        _BIAS + "_float_tensor": "0.rel_pos_bias._pe",
    },
}
_EMA_FACTORS = ("mega_layer.move.alpha", "mega_layer.move.delta")

# What SequenceNorm adds to the denominator there.
_EPS = 1e-5


@dataclass(frozen=True)
class Blocks:
    """Blocks that were converted.

    Args:
        weights: Weights, under the decoder's names (mega_blocks.N.0 and .1).
        decoder_conf: Keys of ESPnet's configuration that they need.

    """

    weights: "dict[str, torch.Tensor]"
    decoder_conf: dict[str, Any]


def convert_file(
    checkpoint: Path | str, output: Path | str, options: Path | str | None = None
) -> Blocks:
    """Write the blocks of a decoder of facebookresearch/mega for a training to start.

    Args:
        checkpoint: What fairseq saved, or the weights of the model alone.
        output: Directory to be made, or an empty one: weights (WEIGHTS), and the keys
            of a training's configuration (SNIPPET).
        options: YAML of fairseq's options (OPTIONS), where the checkpoint has none.

    Returns:
        : What was written.

    Raises:
        ToolError: If the checkpoint cannot be read, or a block computes what the
            decoder here cannot. Nothing is written then.

    """
    import torch
    import yaml

    checkpoint, output = Path(checkpoint), Path(output)
    check_is_free(output)

    # It divides --init_param there.
    if ":" in str(output):
        raise ToolError(f"{output}: ESPnet's --init_param takes no path with a colon")

    saved = read_saved(checkpoint, allowed=[argparse.Namespace])
    weights = saved.get("model", saved) if isinstance(saved, dict) else None

    if not isinstance(weights, Mapping) or not all(
        isinstance(value, torch.Tensor) for value in weights.values()
    ):
        raise ToolError(f"{checkpoint} holds no weights of a model")

    known = saved.get("args")
    known = vars(known) if isinstance(known, argparse.Namespace) else {}
    if options is not None:
        known = {**known, **read_config(Path(options))}

    try:
        blocks = convert_blocks(weights, known)
    except ToolError as exc:
        raise ToolError(f"{checkpoint}: {exc}") from exc

    with new_directory(output) as partial:
        # Through a file of Python's: torch's own hides that the device is full.
        with open(partial / WEIGHTS, "wb") as file:
            torch.save(blocks.weights, file)

        (partial / SNIPPET).write_text(
            yaml.safe_dump(
                {
                    "decoder": "mega_bias",
                    "decoder_conf": blocks.decoder_conf,
                    "init_param": [init_param(output)],
                },
                sort_keys=False,
            ),
            encoding="utf-8",
        )

    return blocks


def init_param(output: Path) -> str:
    """Give the value of ESPnet's `--init_param` that takes the weights.

    Args:
        output: Directory that `convert_file` made.

    Returns:
        : File, no key in it to start from, and the decoder to load it into.

    """
    return f"{output / WEIGHTS}::decoder"


def convert_blocks(
    weights: "Mapping[str, torch.Tensor]", options: Mapping[str, Any]
) -> Blocks:
    """Convert the layers of a decoder of facebookresearch/mega.

    Source: facebookresearch/mega@09f1a87 fairseq/modules/mega_layer.py and what it
    imports. docs/convert.md has the formulas side by side.

    Args:
        weights: Weights of the model, in the order in which torch gives them.
        options: fairseq's options, at least OPTIONS; and `max_target_positions`, which
            becomes `max_positions` of a rotary bias.

    Returns:
        : Blocks, with what they compute unchanged.

    Raises:
        ToolError: If there are none, or they compute what the decoder here cannot.

    """
    layers = _layers(weights)
    _check_options(options, weights)

    bias_type = "simple" if _BIAS + "rel_pos_bias" in layers[0] else "rotary"
    blocks = {}

    for number, layer in enumerate(layers):
        _check_layer(number, layer)
        names = {**_NAMES, **_BIAS_NAMES[bias_type], **_ema_factors(layer)}

        if odd := sorted(layer.keys() ^ names.keys()):
            problem = "an unknown" if odd[0] in layer else "no"
            raise ToolError(f"layer {number} has {problem} {odd[0]}")

        for theirs, ours in names.items():
            # A tensor of its own: a view would be saved with all that it looks at.
            blocks[f"mega_blocks.{number}.{ours}"] = layer[theirs].clone()

    decoder_conf = _decoder_conf(layers, bias_type, options)
    _check_they_load(blocks, decoder_conf)

    return Blocks(blocks, decoder_conf)


def _layers(weights: "Mapping[str, torch.Tensor]") -> "list[dict[str, torch.Tensor]]":
    layers: dict[int, dict[str, torch.Tensor]] = {}

    for name, value in weights.items():
        if match := re.fullmatch(r"(?:decoder\.)?layers\.(\d+)\.(.+)", name):
            layers.setdefault(int(match[1]), {})[match[2]] = value

    if not any("mega_layer.move.omega" in layer for layer in layers.values()):
        if any("mega_layer.move.omega" in name for name in weights):
            raise ToolError(
                "only an encoder; its EMA goes in both directions, which a decoder of "
                "labels cannot"
            )
        raise ToolError("no decoder layers of facebookresearch/mega")

    if sorted(layers) != list(range(len(layers))):
        raise ToolError(f"layers {sorted(layers)}, where one or more are missing")

    return [layers[number] for number in range(len(layers))]


def _check_options(
    options: Mapping[str, Any], weights: "Mapping[str, torch.Tensor]"
) -> None:
    if missing := [name for name in OPTIONS if name not in options]:
        raise ToolError(
            f"it does not say {', '.join(missing)}; write them into a YAML file as "
            "fairseq was given them, and name it (--config)"
        )

    for name, can in (
        ("activation_fn", ("silu",)),
        ("attention_activation_fn", ("softmax",)),
        ("normalize_before", (False,)),
    ):
        if options[name] not in can:
            raise ToolError(
                f"{name} is {options[name]!r}, and the decoder here computes "
                f"{can[0]!r} alone"
            )

    if any(re.fullmatch(r"(decoder\.)?final_norm\..+", name) for name in weights):
        raise ToolError(
            "a final_norm follows the layers, as with normalize_before true, and the "
            "decoder here normalises after each block alone"
        )

    for name in ("decoder_chunk_size", "truncation_length"):
        if not isinstance(options[name], int | None):
            raise ToolError(f"{name} is {options[name]!r}, and no whole number")


def _check_layer(number: int, layer: "Mapping[str, torch.Tensor]") -> None:
    problems = {
        "cross-attention, which a decoder of labels has none of": any(
            name.startswith("cross_attn.") for name in layer
        ),
        "no feed-forward network (nffn)": not any(
            name.startswith("nffn.") for name in layer
        ),
        "an EMA in both directions, which a decoder of labels cannot have": (
            "mega_layer.move.gamma" in layer
            and len(layer["mega_layer.move.gamma"])
            == 2 * len(layer["mega_layer.move.omega"])
        ),
    }

    for part in ("mega_layer", "nffn"):
        kind = f"{part}.norm.norm."
        problems |= {
            f"a scalenorm ({part}), whose epsilon is within the root there": (
                kind + "scalar" in layer
            ),
            f"a batchnorm ({part}), which the decoder here does not have": (
                kind + "running_mean" in layer
            ),
            f"an rmsnorm ({part}), whose epsilon is within the root there": (
                kind + "weight" in layer and kind + "bias" not in layer
            ),
        }

    for problem, is_there in problems.items():
        if is_there:
            raise ToolError(f"layer {number} has {problem}")


def _ema_factors(layer: "Mapping[str, torch.Tensor]") -> dict[str, str]:
    """Tell the damping from the decay.

    facebookresearch/mega changed their names: p is made of delta at 09f1a87 and of
    alpha at 06f2d0e. In both, the one that p is made of is created first.

    Raises:
        ToolError: If the order does not tell, as where names were sorted.

    """
    order = [name for name in layer if name.startswith("mega_layer.move.")]

    if set(order[:2]) != set(_EMA_FACTORS):
        raise ToolError(
            "the order of the EMA's weights is lost (alpha and delta come first in "
            "facebookresearch/mega), and their names mean one thing in some versions "
            "and the other in others; take the file that fairseq wrote"
        )

    return {
        order[0]: "0.multihead_damped_ema.damping_factor",
        order[1]: "0.multihead_damped_ema.decay_factor",
    }


def _decoder_conf(
    layers: "list[dict[str, torch.Tensor]]", bias_type: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    first = layers[0]
    size, num_heads = first["mega_layer.move.gamma"].shape
    max_positions = (
        (len(first[_BIAS + "rel_pos_bias"]) + 1) // 2
        if bias_type == "simple"
        else options.get("max_target_positions")
    )
    chunk_size, truncation_length = (
        options[name] or 0 for name in ("decoder_chunk_size", "truncation_length")
    )

    return {
        "block_size": size,
        "linear_size": first["nffn.fc1.weight"].size(0),
        "qk_size": first["mega_layer.gamma"].size(1),
        "v_size": first["mega_layer.v_proj.weight"].size(0),
        "num_heads": num_heads,
        "rel_pos_bias_type": bias_type,
        "max_positions": max_positions,
        "truncation_length": truncation_length if truncation_length > 0 else None,
        "normalization_type": "layer_norm",
        "normalization_args": {"eps": _EPS},
        "activation_type": "swish",
        "chunk_size": chunk_size if chunk_size > 0 else -1,
        "num_blocks": len(layers),
    }


def _check_they_load(
    blocks: "dict[str, torch.Tensor]", decoder_conf: dict[str, Any]
) -> None:
    with quiet_imports():
        from espnet_mega_bias.decoder import MEGABiasDecoder

    try:
        decoder = MEGABiasDecoder(vocab_size=2, **decoder_conf)
        decoder.mega_blocks.load_state_dict(
            {name.removeprefix("mega_blocks."): value for name, value in blocks.items()}
        )
    except RuntimeError as exc:
        first = str(exc).splitlines()[1].strip()
        raise ToolError(f"its layers and options do not go together: {first}") from exc
