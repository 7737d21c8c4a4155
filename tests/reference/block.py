"""One MEGA block over one sequence, position by position."""

import math
from collections.abc import Callable

import torch

from reference.attention import causal_attention
from reference.ema import damped_ema


def mega_block(
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    bias: torch.Tensor,
    phi: Callable[[torch.Tensor], torch.Tensor],
    norm: Callable[[torch.Tensor], torch.Tensor],
    padding: list[bool] | None = None,
    chunk: int | None = None,
    truncation: int | None = None,
) -> torch.Tensor:
    """Compute the block's output.

    x (U, D); weights by ESPnet's parameter names; bias at least as long as the chunk
    or the sequence; padding[t]: position t is kept out of the EMA and is no key.
    """
    length, size = x.shape
    padding = [False] * length if padding is None else padding
    chunk = length if chunk is None else chunk

    ema = {
        name: weights[f"multihead_damped_ema.{name}"]
        for name in (
            "damping_factor",
            "decay_factor",
            "ema_expansion_matrix",
            "kernel_projection_matrix",
            "residual_weight",
        )
    }
    averaged = damped_ema(
        torch.stack([x[t] * (0.0 if padding[t] else 1.0) for t in range(length)]),
        ema["damping_factor"].squeeze(-1),
        ema["decay_factor"].squeeze(-1),
        ema["ema_expansion_matrix"].squeeze(-1),
        ema["kernel_projection_matrix"],
        truncation,
    )

    key_size = weights["qk_weight"].size(1)
    value_size = weights["proj_v.weight"].size(0)

    values, keys, queries, gates = [], [], [], []

    for t in range(length):
        e = phi(averaged[t] + ema["residual_weight"] * x[t])
        mixed = weights["proj_mx.weight"] @ e + weights["proj_mx.bias"]

        u = torch.sigmoid(mixed[:size])
        z = phi(mixed[size : size + key_size])
        g = phi(mixed[size + key_size : size + key_size + value_size])
        h0 = mixed[size + key_size + value_size :]
        gates.append((u, g, h0))

        query = z * weights["qk_weight"][0] + weights["qk_bias"][0]
        queries.append(query / math.sqrt(key_size))
        keys.append(z * weights["qk_weight"][1] + weights["qk_bias"][1])
        values.append(phi(weights["proj_v.weight"] @ x[t] + weights["proj_v.bias"]))

    attended = torch.cat(
        [
            causal_attention(
                torch.stack(queries[start : start + chunk]),
                torch.stack(keys[start : start + chunk]),
                torch.stack(values[start : start + chunk]),
                bias,
                padding[start : start + chunk],
            )
            for start in range(0, length, chunk)
        ]
    )
    out = []

    for t, (u, g, h0) in enumerate(gates):
        h = phi(
            h0 + weights["proj_h.weight"] @ (attended[t] * g) + weights["proj_h.bias"]
        )
        out.append(norm(x[t] + u * (h - x[t])))

    return torch.stack(out)
