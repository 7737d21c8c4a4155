"""Causal attention with a bias, query by query."""

import torch


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    padding: list[bool] | None = None,
) -> torch.Tensor:
    """Attend from each query to the keys so far that are no padding.

    query and key (U, S), value (U, V); bias (U, U), query by key; a query that finds
    no key gets zeros.
    """
    length = query.size(0)
    padding = [False] * length if padding is None else padding
    out = []

    for i in range(length):
        seen = [j for j in range(i + 1) if not padding[j]]
        row = value.new_zeros(value.size(1))

        if seen:
            scores = key[seen] @ query[i] + bias[i, seen]
            row = torch.softmax(scores, 0) @ value[seen]

        out.append(row)

    return torch.stack(out)
