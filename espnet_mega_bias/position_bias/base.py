"""What every relative position bias shares."""

from abc import ABC, abstractmethod

import torch

from espnet_mega_bias.position_bias.toeplitz import causal_toeplitz, toeplitz


class OffsetBias(torch.nn.Module, ABC):
    """Bias on attention scores that depends on the offset alone.

    bias[i, j] = value(j - i) for query i and key j, so the (L, L) matrix is Toeplitz:
    2L - 1 values decide it. A bias type defines `values`; the matrix, its last row
    and its gradient (sums along diagonals) are the same for all types.

    Args:
        max_positions: Longest sequence, in positions (None = no limit).

    Raises:
        ValueError: If `max_positions` is below 1.

    """

    def __init__(self, max_positions: int | None) -> None:
        """Construct an OffsetBias object."""
        super().__init__()

        if max_positions is not None and max_positions < 1:
            raise ValueError(f"max_positions must be at least 1, got {max_positions}")

        self.max_positions = max_positions

    @abstractmethod
    def values(self, first: int, last: int) -> torch.Tensor:
        """Compute the values at consecutive offsets.

        Args:
            first: Lowest offset (key position minus query position).
            last: Highest offset, not below `first`; both within the limit.

        Returns:
            : Values at first, first + 1, ..., last. (last - first + 1,)

        """
        raise NotImplementedError

    def by_offset(self, length: int) -> torch.Tensor:
        """Compute the values that decide the (L, L) bias.

        Args:
            length: Sequence length L, in positions.

        Returns:
            : Values at the offsets 1 - L, ..., L - 1. (2L - 1,)

        Raises:
            ValueError: If `length` is below 1 or above `max_positions`.

        """
        self._check_length(length)

        return self.values(1 - length, length - 1)

    def last_row(self, length: int) -> torch.Tensor:
        """Compute the last row of the (L, L) bias: the newest query, all keys so far.

        Args:
            length: Sequence length L, in positions.

        Returns:
            : Values at the offsets 1 - L, ..., 0. (L,)

        Raises:
            ValueError: If `length` is below 1 or above `max_positions`.

        """
        self._check_length(length)

        return self.values(1 - length, 0)

    def causal(self, length: int) -> torch.Tensor:
        """Compute the (L, L) bias with -inf where the key comes after the query.

        Args:
            length: Sequence length L, in positions.

        Returns:
            : Relative position bias and causal mask in one. (L, L)

        Raises:
            ValueError: If `length` is below 1 or above `max_positions`.

        """
        return causal_toeplitz(self.last_row(length), length)

    def forward(self, length: int) -> torch.Tensor:
        """Compute the relative position bias.

        Args:
            length: Sequence length L, in positions.

        Returns:
            : Relative position bias, query i by key j. (L, L)

        Raises:
            ValueError: If `length` is below 1 or above `max_positions`.

        """
        return toeplitz(self.by_offset(length), length)

    def _check_length(self, length: int) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")

        if self.max_positions is not None and length > self.max_positions:
            raise ValueError(
                f"length {length} is above max_positions {self.max_positions}"
            )
