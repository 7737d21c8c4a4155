"""Matrices that are constant along their diagonals, and their gradient."""

import torch

# Rows that `diagonal_sums` takes at a time.
_STRIP = 64


class _Toeplitz(torch.autograd.Function):
    """Spread values over diagonals; the gradient sums each diagonal.

    Autograd of the forward expression alone would give the same numbers through a
    scatter with one write per matrix entry and a colliding address per diagonal.
    """

    @staticmethod
    def forward(values: torch.Tensor, rows: int) -> torch.Tensor:
        columns = values.size(-1) - rows + 1

        # Not `unfold`, whose size is a plain number: one traced program per length.
        windows = values.as_strided(
            (*values.shape[:-1], rows, columns), (*values.stride(), values.stride(-1))
        )

        return windows.flip(-2)  # (..., R, C)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return diagonal_sums(grad), None


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


def diagonal_sums(matrix: torch.Tensor) -> torch.Tensor:
    """Sum matrices along their diagonals, in float32 or wider.

    Args:
        matrix: Matrices. (..., R, C)

    Returns:
        : Sums, from the lower left corner to the upper right one. (..., R + C - 1)

    """
    *batch, rows, columns = matrix.shape
    wide = torch.promote_types(matrix.dtype, torch.float32)
    sums = matrix.new_zeros(*batch, rows + columns - 1, dtype=wide)

    # A few rows at a time, so that what is shifted stays in the processor's cache; a
    # traced program must not depend on their number.
    whole = torch.compiler.is_compiling()
    step = rows if whole else min(rows, _STRIP)

    for start in (0,) if whole else range(0, rows, step):
        strip = matrix[..., start : start + step, :]
        count = strip.size(-2)
        width = count + columns - 1

        # Row i, moved right by count - 1 - i: entries of one diagonal share a column.
        skewed = matrix.new_zeros(*batch, count * width)
        skewed.as_strided(
            strip.shape, (*skewed.stride()[:-1], width - 1, 1), count - 1
        ).copy_(strip)

        first = rows - start - count
        sums[..., first : first + width] += skewed.view(*batch, count, width).sum(
            -2, dtype=wide
        )

    return sums.to(matrix.dtype)
