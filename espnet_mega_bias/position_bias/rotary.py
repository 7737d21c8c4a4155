"""Rotary relative position bias."""

import torch

from espnet_mega_bias.position_bias.base import OffsetBias

# Rows of the tables where no limit is given; longer sequences extend them on the fly.
_UNLIMITED_TABLE_ROWS = 2048


class RotaryRelativePositionBias(OffsetBias):
    """Relative position bias from two learned vectors under rotary embeddings.

    bias[i, j] = <R_i alpha, R_j beta>, where R_p turns the pair (x_k, x_{k + half})
    by the angle p * w_k, w_k = 10000 ** (-k / half) and half = size / 2. Turning both
    vectors by the same angle changes nothing, hence

        bias[i, j] = sum_k p_k cos((i - j) w_k) + q_k sin((i - j) w_k)
        p_k = alpha_k beta_k + alpha_{k + half} beta_{k + half}
        q_k = alpha_k beta_{k + half} - alpha_{k + half} beta_k

    which is what is computed: L rows of cosines and sines instead of an (L, L)
    product.

    Source: arXiv:2104.09864, arXiv:2209.10655, and
    espnet/espnet@202511 espnet2/asr_transducer/decoder/modules/mega/positional_bias.py

    Args:
        size: Size of the two vectors, even and at least 2.
        max_positions: Longest sequence, in positions (None = no limit).

    Attributes:
        alpha: Vector turned by the query position. (1, size)
        beta: Vector turned by the key position. (1, size)
        sine: Sine of each angle, float32 or wider. (max_positions, size // 2)
        cosine: Cosine of each angle, float32 or wider. (max_positions, size // 2)

    Raises:
        ValueError: If `size` is odd or below 2, or `max_positions` is below 1.

    """

    def __init__(self, size: int, max_positions: int | None = 2048) -> None:
        """Construct a RotaryRelativePositionBias object."""
        super().__init__(max_positions)

        if size < 2 or size % 2 != 0:
            raise ValueError(f"size must be positive and even, got {size}")

        self.size = size

        self.alpha = torch.nn.Parameter(torch.empty(1, size))
        self.beta = torch.nn.Parameter(torch.empty(1, size))

        # Never read: it keeps state dicts interchangeable with ESPnet's.
        self.register_buffer("_pe", torch.zeros(1))

        self.register_buffer("sine", None, persistent=False)
        self.register_buffer("cosine", None, persistent=False)

        self.reset_parameters()

    def reset_parameters(self, val: float = 0.0, std: float = 0.02) -> None:
        """Draw both vectors from a normal distribution and refill the tables.

        Args:
            val: Mean.
            std: Standard deviation.

        """
        torch.nn.init.normal_(self.alpha, mean=val, std=std)
        torch.nn.init.normal_(self.beta, mean=val, std=std)
        torch.nn.init.zeros_(self._pe)

        self._fill_tables()

    @staticmethod
    def get_sinusoid_embeddings(
        max_positions: int,
        size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the sine and cosine of position p times frequency k.

        Args:
            max_positions: Number of positions.
            size: Size of the vectors to turn.
            dtype: Type of the result.
            device: Device of the result.

        Returns:
            : Sine of p * 10000 ** (-k / (size // 2)). (max_positions, size // 2)
            : Cosine of the same angles. (max_positions, size // 2)

        """
        # In float64 up to the last cast: an angle of 2047 rad in float32 is already
        # off by up to 1e-4, in float16 by 1.
        half = size // 2
        exponent = torch.arange(half, dtype=torch.float64, device=device) / -half
        position = torch.arange(max_positions, dtype=torch.float64, device=device)
        angle = position.unsqueeze(1) * 10000.0**exponent

        return torch.sin(angle).to(dtype), torch.cos(angle).to(dtype)

    def rotary(self, x: torch.Tensor) -> torch.Tensor:
        """Turn the vector at each position by that position's angles.

        Args:
            x: One vector per position. (L, size)

        Returns:
            : [x1 cos - x2 sin, x2 cos + x1 sin], x1 and x2 the halves. (L, size)

        Raises:
            ValueError: If L is below 1 or above `max_positions`.

        """
        self._check_length(x.size(0))
        sine, cosine = self._tables(x.size(0), x.dtype)

        x1, x2 = torch.chunk(x, 2, dim=-1)
        turned = torch.cat([x1 * cosine - x2 * sine, x2 * cosine + x1 * sine], dim=-1)

        return turned.to(x.dtype)

    def values(self, first: int, last: int) -> torch.Tensor:
        """Compute the values at consecutive offsets.

        Args:
            first: Lowest offset (key position minus query position).
            last: Highest offset, not below `first`.

        Returns:
            : Values at first, first + 1, ..., last. (last - first + 1,)

        """
        sine, cosine = self._tables(max(-first, last) + 1, self.alpha.dtype)

        a1, a2 = torch.chunk(self.alpha.to(sine.dtype).squeeze(0), 2)
        b1, b2 = torch.chunk(self.beta.to(sine.dtype).squeeze(0), 2)

        # Elementwise products and sums, since autocast would put a matrix product
        # into half precision.
        even = (cosine * (a1 * b1 + a2 * b2)).sum(-1)
        odd = (sine * (a1 * b2 - a2 * b1)).sum(-1)

        # i - j = -offset: the sine term changes sign with the offset.
        if last <= 0:
            return (even + odd)[-last : 1 - first].flip(0).to(self.alpha.dtype)

        past = (even + odd)[max(-last, 1) : max(1 - first, 1)].flip(0)
        future = (even - odd)[max(first, 0) : max(last + 1, 0)]

        return torch.cat([past, future]).to(self.alpha.dtype)

    def _apply(self, fn, recurse: bool = True):
        # The tables follow the parameters' device, but a cast of them would keep the
        # rounding of the narrowest type ever visited.
        super()._apply(fn, recurse)
        self._fill_tables()

        return self

    def _fill_tables(self) -> None:
        rows = self.max_positions or _UNLIMITED_TABLE_ROWS
        dtype = torch.promote_types(self.alpha.dtype, torch.float32)

        self.sine, self.cosine = self.get_sinusoid_embeddings(
            rows, self.size, dtype=dtype, device=self.alpha.device
        )

    def _tables(
        self, length: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the first rows of the tables, recomputed where those held don't do.

        Args:
            length: Number of positions.
            dtype: Type of the values to combine with.

        Returns:
            : Sine, in `dtype` or float32 if that is wider. (length, size // 2)
            : Cosine, likewise. (length, size // 2)

        """
        wide = torch.promote_types(dtype, torch.float32)

        if length > self.sine.size(0) or self.sine.dtype != wide:
            return self.get_sinusoid_embeddings(
                length, self.size, dtype=wide, device=self.alpha.device
            )

        return self.sine[:length], self.cosine[:length]
