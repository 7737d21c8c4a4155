"""Matrices that are constant along their diagonals, and their gradient."""

import torch

# Rows that `diagonal_sums` takes at a time.
_STRIP = 256


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

        if values.dim() > 1 or torch.compiler.is_compiling():
            return windows.flip(-2)  # (..., R, C)

        # Of one matrix, whole rows, which takes two thirds of the time.
        return windows.index_select(
            0, torch.arange(rows - 1, -1, -1, device=values.device)
        )

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


def causal_toeplitz(past: torch.Tensor, rows: int) -> torch.Tensor:
    """Build the last rows of a causal bias.

    Args:
        past: Values at the offsets 1 - C, ..., 0. (C,)
        rows: Number of queries R, the last ones of C positions.

    Returns:
        : Bias, -inf where the key comes after the query. (R, C)

    """
    return toeplitz(
        torch.nn.functional.pad(past, (0, rows - 1), value=float("-inf")), rows
    )


def diagonal_sums(matrix: torch.Tensor) -> torch.Tensor:
    """Sum matrices along their diagonals, in float32 or wider.

    Read on in rows of C + 1, a matrix has the diagonal j - i = d in column d mod C + 1:
    first, from the top, those with d >= 0 and then those with d < 0. So a few column
    sums do, without a copy; where both kinds meet inside of a strip of rows is a small
    triangle.

    Args:
        matrix: Matrices. (..., R, C)

    Returns:
        : Sums, from the lower left corner to the upper right one. (..., R + C - 1)

    """
    *batch, rows, columns = matrix.shape

    if rows > columns:
        return diagonal_sums(matrix.transpose(-1, -2)).flip(-1)

    wide = torch.promote_types(matrix.dtype, torch.float32)
    sums = matrix.new_zeros(*batch, rows + columns - 1, dtype=wide)

    flat = matrix.reshape(*batch, rows * columns)
    whole = (rows - 1) * (columns + 1)
    sheared = flat[..., :whole].unflatten(-1, (rows - 1, columns + 1))
    main = rows - 1  # where d = 0 is in `sums`

    sums[..., main : main + columns + 1 - rows] += flat[..., whole:]

    if rows == 1:
        return sums.to(matrix.dtype)

    # A traced program must not depend on the number of strips.
    traced = torch.compiler.is_compiling()
    step = rows if traced else _STRIP

    for start in (0,) if traced else range(0, rows - 1, step):
        strip = sheared[..., start : start + step, :]
        count = strip.size(-2)
        end = start + count

        # Columns before `first` have d >= 0 only, and those from `last` on d < 0 only.
        first, last = columns + 1 - end, columns - start
        total = strip.sum(-2, dtype=wide)
        both = strip[..., first:last].flip(-1)

        sums[..., main : main + first] += total[..., :first]
        sums[..., main + first : main + last] += (
            both.triu().sum(-2, dtype=wide).flip(-1)
        )
        sums[..., main - end : main - 1 - start] += (
            both.tril(-1).sum(-2, dtype=wide).flip(-1)
        )
        sums[..., main - 1 - start : main] += total[..., last:]

    return sums.to(matrix.dtype)
