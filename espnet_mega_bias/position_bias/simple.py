"""Learned table of relative position biases (ESPnet's `simple`)."""

import torch

from espnet_mega_bias.position_bias.base import OffsetBias


class RelativePositionBias(OffsetBias):
    """Relative position bias with one learned value per offset.

    bias[i, j] = relative_position_bias[max_positions - 1 + j - i]

    Source: arXiv:2209.10655, and
    espnet/espnet@202511 espnet2/asr_transducer/decoder/modules/mega/positional_bias.py

    Args:
        max_positions: Longest sequence, in positions.

    Raises:
        ValueError: If `max_positions` is below 1.

    """

    def __init__(self, max_positions: int) -> None:
        """Construct a RelativePositionBias object."""
        super().__init__(max_positions)

        self.relative_position_bias = torch.nn.Parameter(
            torch.empty(2 * max_positions - 1)
        )

        self.reset_parameters()

    def reset_parameters(self, val: float = 0.0, std: float = 0.02) -> None:
        """Draw the table from a normal distribution.

        Args:
            val: Mean.
            std: Standard deviation.

        """
        torch.nn.init.normal_(self.relative_position_bias, mean=val, std=std)

    def values(self, first: int, last: int) -> torch.Tensor:
        """Read the values at consecutive offsets off the table.

        Args:
            first: Lowest offset, above -max_positions.
            last: Highest offset, below max_positions.

        Returns:
            : Values at first, first + 1, ..., last. (last - first + 1,)

        """
        centre = self.max_positions - 1

        return self.relative_position_bias[centre + first : centre + last + 1]
