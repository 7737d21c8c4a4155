"""Relative position biases, entry by entry."""

import torch


def rotate(vector: torch.Tensor, position: int) -> torch.Tensor:
    """Turn the pairs (x_k, x_{k + half}) of a vector by position * frequency k."""
    half = vector.numel() // 2
    turned = [None] * (2 * half)

    for k in range(half):
        angle = torch.tensor(position * 10000.0 ** (-k / half), dtype=vector.dtype)
        sine, cosine = torch.sin(angle), torch.cos(angle)

        turned[k] = vector[k] * cosine - vector[k + half] * sine
        turned[k + half] = vector[k + half] * cosine + vector[k] * sine

    return torch.stack(turned)


def rotary_bias(alpha: torch.Tensor, beta: torch.Tensor, length: int) -> torch.Tensor:
    """bias[i, j] = <R_i alpha, R_j beta>; alpha and beta (size,)."""
    return torch.stack(
        [
            torch.stack(
                [torch.dot(rotate(alpha, i), rotate(beta, j)) for j in range(length)]
            )
            for i in range(length)
        ]
    )


def simple_bias(table: torch.Tensor, length: int) -> torch.Tensor:
    """bias[i, j] = table[centre + j - i]; table (2 * max_positions - 1,)."""
    centre = table.numel() // 2

    return torch.stack(
        [
            torch.stack([table[centre + j - i] for j in range(length)])
            for i in range(length)
        ]
    )
