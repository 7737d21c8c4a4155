"""Multi-head damped EMA, one position at a time."""

import math

import torch


def damped_ema(
    x: torch.Tensor,
    damping: torch.Tensor,
    decay: torch.Tensor,
    expansion: torch.Tensor,
    projection: torch.Tensor,
    truncation: int | None = None,
) -> torch.Tensor:
    """Sum over heads of the EMA of one sequence.

    x (U, D); damping, decay, expansion, projection (D, H); result (U, D). With
    `truncation` M, an input counts for M outputs, its own position included.
    """
    length = x.size(0)
    heads = damping.size(1)

    p = torch.sigmoid(damping)
    q = 1.0 - p * torch.sigmoid(decay)

    out, average = [], torch.zeros_like(p)

    for t in range(length):
        average = q * average + p * expansion * x[t].unsqueeze(1)
        seen = average

        if truncation is not None and truncation <= t:
            seen = torch.zeros_like(p)

            for s in range(t - truncation + 1, t + 1):
                seen = q * seen + p * expansion * x[s].unsqueeze(1)

        out.append((seen * projection / math.sqrt(heads)).sum(1))

    return torch.stack(out)
