"""Matrices that are constant along their diagonals, and their gradient."""

import torch


class _Toeplitz(torch.autograd.Function):
    """Spread values over diagonals; the gradient sums each diagonal.

    Autograd of the forward expression alone would give the same numbers through a
    scatter with one write per matrix entry and a colliding address per diagonal.
    """

    @staticmethod
    def forward(values: torch.Tensor, rows: int) -> torch.Tensor:
        columns = values.size(-1) - rows + 1

        return values.unfold(-1, columns, 1).flip(-2)  # (..., R, C)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        *batch, rows, columns = grad.shape
        width = rows + columns - 1

        # Row i, moved right by rows - 1 - i: entries of one diagonal share a column.
        skewed = grad.new_zeros(*batch, rows * width)
        skewed.as_strided(
            grad.shape,
            (*skewed.stride()[:-1], width - 1, 1),
            rows - 1,
        ).copy_(grad)
        skewed = skewed.view(*batch, rows, width)

        wide = torch.promote_types(grad.dtype, torch.float32)

        return skewed.sum(-2, dtype=wide).to(grad.dtype), None


def toeplitz(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Build the matrices whose entry (i, j) depends on j - i only.

    out[..., i, j] = values[..., rows - 1 + j - i]

    Args:
        values: One value per diagonal, from the lower left corner (j - i = 1 - rows)
            to the upper right one (j - i = columns - 1). (..., rows + columns - 1)
        rows: Number of rows, at least 1 and at most the number of values.

    Returns:
        : Toeplitz matrices. (..., rows, columns)

    """
    return _Toeplitz.apply(values, rows)
