"""The whole decoder over one label sequence."""

from collections.abc import Callable

import torch

from reference.block import mega_block
from reference.normalization import NORMALIZATIONS
from reference.position_bias import rotary_bias, simple_bias


def swish(x: torch.Tensor) -> torch.Tensor:
    """x times its sigmoid."""
    return x / (1.0 + torch.exp(-x))


def mega_decoder(
    labels: list[int],
    weights: dict[str, torch.Tensor],
    num_blocks: int,
    bias_type: str,
    chunk: int | None = None,
    truncation: int | None = None,
    pad: int = 0,
    phi: Callable[[torch.Tensor], torch.Tensor] = swish,
    normalization: str = "layer_norm",
) -> torch.Tensor:
    """Decode labels (U,) to (U, D).

    weights: by ESPnet's parameter names (`decoder.state_dict()`, or the parameters).
    """
    padding = [t > 0 and label == pad for t, label in enumerate(labels)]
    x = torch.stack([weights["embed.weight"][label] for label in labels])
    reach = len(labels) if chunk is None else min(chunk, len(labels))

    def norm_of(prefix: str):
        own = {
            name.removeprefix(f"{prefix}."): weight
            for name, weight in weights.items()
            if name.startswith(f"{prefix}.")
        }

        return lambda y: NORMALIZATIONS[normalization](y, own)

    for n in range(num_blocks):
        mega, ffn = f"mega_blocks.{n}.0.", f"mega_blocks.{n}.1."

        if bias_type == "rotary":
            bias = rotary_bias(
                weights[mega + "rel_pos_bias.alpha"].squeeze(0),
                weights[mega + "rel_pos_bias.beta"].squeeze(0),
                reach,
            )
        else:
            bias = simple_bias(
                weights[mega + "rel_pos_bias.relative_position_bias"], reach
            )

        x = mega_block(
            x,
            {
                name.removeprefix(mega): weight
                for name, weight in weights.items()
                if name.startswith(mega)
            },
            bias,
            phi,
            norm_of(mega + "normalization"),
            padding,
            chunk,
            truncation,
        )

        rows = []

        for row in x:
            hidden = weights[ffn + "linear1.weight"] @ row
            hidden = phi(hidden + weights[ffn + "linear1.bias"])
            out = weights[ffn + "linear2.weight"] @ hidden
            out = out + weights[ffn + "linear2.bias"] + row
            rows.append(norm_of(ffn + "normalization")(out))

        x = torch.stack(rows)

    return torch.stack([norm_of("final_norm")(row) for row in x])
