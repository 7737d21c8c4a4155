"""Multi-head damped EMA, one position, feature and head at a time."""

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
    length, size = x.shape
    heads = damping.size(1)

    p = torch.sigmoid(damping)
    q = 1.0 - p * torch.sigmoid(decay)

    out = []

    for t in range(length):
        first = 0 if truncation is None else max(0, t - truncation + 1)
        row = []

        for d in range(size):
            total = x.new_zeros(())

            for h in range(heads):
                average = x.new_zeros(())

                for s in range(first, t + 1):
                    average = q[d, h] * average + p[d, h] * expansion[d, h] * x[s, d]

                total = total + average * projection[d, h] / math.sqrt(heads)

            row.append(total)

        out.append(torch.stack(row))

    return torch.stack(out)
