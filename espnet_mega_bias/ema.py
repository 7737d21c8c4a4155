"""Multi-head damped exponential moving average (EMA)."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from espnet_mega_bias.light_call import light_call
from espnet_mega_bias.position_bias.toeplitz import toeplitz

# Positions filtered by one matrix product; longer sequences carry the state over.
_BLOCK_LENGTH = 64


class EMAStepCoefficients(NamedTuple):
    """What a step derives from the weights alone.

    Args:
        weights: Weights of input and previous state, (H, D) and (H, D); with
            `truncation_length`, of its inputs alone, older ones first, (L, D).
        input_weight: Weight of the input in the output, omega included. (D,)
        residual_weight: Weight omega. (D,)
        activation: Activation function phi.

    """

    weights: tuple[torch.Tensor, ...]
    input_weight: torch.Tensor
    residual_weight: torch.Tensor
    activation: Callable[[torch.Tensor], torch.Tensor]

    def carry(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute what the state brings to the next position, whatever comes there.

        Args:
            state: State before the position. (..., H, D); with `truncation_length`,
                the previous inputs, older ones first. (..., L, D)

        Returns:
            : What `advance` goes on from.
            : What is to be added to the average. (..., D)

        """
        if len(self.weights) == 1:
            (kernel,) = self.weights
            length = state.size(-2)

            return state, (state * kernel[..., -1 - length : -1, :]).sum(-2)

        _, retention = self.weights
        kept = retention * state

        return kept, kept.sum(-2)

    def advance(self, kept: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Compute the state after a position.

        Args:
            kept: What `carry` gave.
            inputs: Inputs, zero where they are kept out of the average. (..., D)

        Returns:
            : State, a new tensor, in float32 or wider. Shape as before; with
                `truncation_length`, one input longer up to `truncation_length` - 1.

        """
        inputs = inputs.unsqueeze(-2)

        if len(self.weights) == 1:
            (kernel,) = self.weights
            seen = torch.cat([kept, inputs], dim=-2)

            return seen[..., max(seen.size(-2) - kernel.size(-2) + 1, 0) :, :]

        input_weight, _ = self.weights

        return torch.addcmul(kept, input_weight, inputs)

    def output(
        self,
        x: torch.Tensor,
        carried: torch.Tensor,
        padding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the output at a position.

        Args:
            x: Input. (B, D)
            carried: What the state brings, see `carry`. (B, D)
            padding: True where the input is kept out of the average. (B,), bool

        Returns:
            : Output. (B, D)

        """
        weight = self.input_weight

        if padding is not None:
            weight = torch.where(padding.unsqueeze(-1), self.residual_weight, weight)

        return self.activation(torch.addcmul(carried, x, weight).to(x.dtype))


def stack_ema_coefficients(
    coefficients: Sequence[EMAStepCoefficients],
) -> EMAStepCoefficients:
    """Put the coefficients of N EMAs together.

    Args:
        coefficients: Coefficients of each. [N]

    Returns:
        : Coefficients for `carry` and `advance`, of the states of all. (N, B, ...)

    """
    first = coefficients[0]

    return first._replace(
        weights=tuple(
            torch.stack(weights).unsqueeze(1)
            for weights in zip(*(each.weights for each in coefficients), strict=True)
        )
    )


class _Transpose(torch.autograd.Function):
    """Transpose a matrix; result and gradient are contiguous.

    Autograd alone would hand on a transposed view as gradient, and for that torch.bmm
    copies and multiplies one matrix after the other.
    """

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad.t().contiguous()


class MultiHeadDampedEMA(torch.nn.Module):
    """Damped EMA over positions, H heads for each feature.

    p      = sigmoid(damping_factor)
    q      = 1 - p * sigmoid(decay_factor)
    ema_t  = q * ema_{t-1} + p * expansion * x_t                       (D, H)
    out_t  = activation(sum_h(ema_t * projection / sqrt(H)) + omega * x_t)

    Both forms move the projection into the weight of the input,
    w = p * expansion * projection / sqrt(H), which leaves a plain sum over heads. As a
    convolution, that is sum_l kernel_l x_{t-l} with kernel_l = sum_h w * q^l. The
    sequence form computes it by causal matrix products, which never mix a later input
    into an earlier output, not even by rounding (an FFT does). With
    `truncation_length` M both forms drop the inputs M or more positions back.

    Source: arXiv:2209.10655, section 3.1, and
    espnet/espnet@202511 espnet2/asr_transducer/decoder/modules/mega/multi_head_damped_ema.py

    Args:
        size: Number of features D.
        num_heads: Number of EMA heads H.
        activation: Activation function phi (ReLU if None).
        truncation_length: Number of inputs, the current one included, that an output
            depends on (None = all).

    Raises:
        ValueError: If `size`, `num_heads` or `truncation_length` is below 1.

    """  # noqa: E501 (a path cannot be broken)

    def __init__(
        self,
        size: int,
        num_heads: int = 4,
        activation: torch.nn.Module | None = None,
        truncation_length: int | None = None,
    ) -> None:
        """Construct a MultiHeadDampedEMA object."""
        super().__init__()

        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")

        if num_heads < 1:
            raise ValueError(f"num_heads must be at least 1, got {num_heads}")

        if truncation_length is not None and truncation_length < 1:
            raise ValueError(
                f"truncation_length must be at least 1 or null, got {truncation_length}"
            )

        self.size = size
        self.num_heads = num_heads
        self.truncation_length = truncation_length

        self.damping_factor = torch.nn.Parameter(torch.empty(size, num_heads, 1))
        self.decay_factor = torch.nn.Parameter(torch.empty(size, num_heads, 1))
        self.ema_expansion_matrix = torch.nn.Parameter(torch.empty(size, num_heads, 1))
        self.kernel_projection_matrix = torch.nn.Parameter(torch.empty(size, num_heads))
        self.residual_weight = torch.nn.Parameter(torch.empty(size))

        self.activation = torch.nn.ReLU() if activation is None else activation

        self.reset_parameters()

    def reset_parameters(
        self, val: float = 0.0, std1: float = 0.2, std2: float = 1.0
    ) -> None:
        """Draw the parameters from normal distributions.

        Args:
            val: Mean.
            std1: Standard deviation of the damping and decay factors.
            std2: Standard deviation of the projection and the residual weight.

        """
        torch.nn.init.normal_(self.damping_factor, mean=val, std=std1)
        torch.nn.init.normal_(self.decay_factor, mean=val, std=std1)

        with torch.no_grad():
            # Heads start with alternating signs.
            self.ema_expansion_matrix.normal_(mean=val, std=0.02)
            self.ema_expansion_matrix[:, 0::2] += 1.0
            self.ema_expansion_matrix[:, 1::2] -= 1.0

        torch.nn.init.normal_(self.kernel_projection_matrix, mean=val, std=std2)
        torch.nn.init.normal_(self.residual_weight, mean=val, std=std2)

    def coefficients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the coefficients of the recurrence, in float32 or wider.

        Returns:
            : Weight of the input in the output, p * expansion * projection / sqrt(H).
                (D, H)
            : Weight of the previous state, q, between 0 and 1. (D, H)

        """
        wide = torch.promote_types(self.damping_factor.dtype, torch.float32)

        damping = torch.sigmoid(self.damping_factor.to(wide).squeeze(-1))
        decay = torch.sigmoid(self.decay_factor.to(wide).squeeze(-1))
        expansion = self.ema_expansion_matrix.to(wide).squeeze(-1)
        projection = self.kernel_projection_matrix.to(wide) / math.sqrt(self.num_heads)

        return damping * expansion * projection, 1.0 - damping * decay

    def step_coefficients(self) -> EMAStepCoefficients:
        """Compute what a step derives from the weights alone.

        Returns:
            : Coefficients, those computed in float32 or wider.

        """
        if self.truncation_length is not None:
            weights = (self.kernel(self.truncation_length).t().flip(0),)
            input_weight = weights[0][-1]
        else:
            weights = tuple(values.t().contiguous() for values in self.coefficients())
            input_weight = weights[0].sum(0)

        return EMAStepCoefficients(
            weights,
            input_weight + self.residual_weight,
            self.residual_weight,
            light_call(self.activation),
        )

    def kernel(self, length: int) -> torch.Tensor:
        """Compute the weights of the inputs by lag, in float32 or wider.

        Args:
            length: Number of lags L, from 0 (the current input) on.

        Returns:
            : Kernel, not truncated. (D, L)

        """
        input_weight, retention = self.coefficients()

        return (input_weight.unsqueeze(-1) * _powers(retention, length)).sum(1)

    def forward(
        self, x: torch.Tensor, padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the EMA of whole sequences.

        Args:
            x: Input sequences. (B, U, D)
            padding: True where an input is kept out of the average. (B, U), bool

        Returns:
            : Output sequences. (B, U, D)

        """
        inputs = masked(x, padding)
        length = x.size(1)

        if self.truncation_length is not None and self.truncation_length < length:
            average = self._filter_truncated(inputs, self.truncation_length)
        else:
            average = self._filter(inputs)

        average = average.to(x.dtype)

        return self.activation(torch.addcmul(average, x, self.residual_weight))

    def init_state(self) -> torch.Tensor:
        """Make the state before the first position of one sequence.

        Returns:
            : Contribution of each head to the output, (H, D); with
                `truncation_length`, the inputs so far that later outputs depend on,
                (0, D).

        """
        if self.truncation_length is None:
            return self.residual_weight.new_zeros(self.num_heads, self.size)

        return self.residual_weight.new_zeros(0, self.size)

    def step(
        self,
        x: torch.Tensor,
        state: torch.Tensor,
        padding: torch.Tensor | None = None,
        coefficients: EMAStepCoefficients | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the EMA at the next position.

        Args:
            x: Input. (B, D)
            state: State before this position. (B, H, D); with `truncation_length`, the
                previous inputs, older ones first. (B, L, D)
            padding: True where the input is kept out of the average. (B,), bool
            coefficients: What `step_coefficients` returns with the present weights
                (None = computed here).

        Returns:
            : Output. (B, D)
            : State after this position, a new tensor. Shape as `state`; with
                `truncation_length`, one input longer up to `truncation_length` - 1.

        """
        coefficients = coefficients or self.step_coefficients()

        kept, carried = coefficients.carry(state)
        after = coefficients.advance(kept, masked(x, padding))

        return coefficients.output(x, carried, padding), after.to(state.dtype)

    def _filter(self, x: torch.Tensor) -> torch.Tensor:
        """Filter by blocks: a product inside each block, the state across blocks.

        Args:
            x: Input sequences. (B, U, D)

        Returns:
            : Sum over heads of the EMA. (B, U, D)

        """
        batch, length, size = x.shape

        num_blocks, block_length = _blocks(length, _BLOCK_LENGTH)

        x = torch.nn.functional.pad(x, (0, 0, 0, num_blocks * block_length - length))

        # Features in front: one matrix product per feature, all its rows contiguous.
        x = _Transpose.apply(x.reshape(-1, size))
        x = x.view(size, -1, block_length)  # (D, B * N, K)

        input_weight, retention = self.coefficients()
        powers = _powers(retention, block_length + 1)  # (D, H, K + 1)

        by_lag = input_weight.unsqueeze(-1) * powers[..., :-1]
        lags = torch.nn.functional.pad(by_lag.sum(1).flip(-1), (0, block_length - 1))

        inside = toeplitz(lags, block_length).to(x.dtype)
        out = torch.bmm(x, inside.transpose(1, 2))

        if num_blocks > 1:
            # What each block adds to the state, as of its own end.
            added = torch.bmm(x, by_lag.flip(-1).transpose(1, 2).to(x.dtype))
            added = added.view(size, batch, num_blocks, -1).unbind(2)  # [N x (D, B, H)]
            keep = powers[..., -1].unsqueeze(1).to(x.dtype)

            states = [torch.zeros_like(added[0])]
            for gain in added[:-1]:
                states.append(torch.addcmul(gain, keep, states[-1]))

            states = torch.stack(states, dim=2).flatten(1, 2)
            out = torch.baddbmm(out, states, powers[..., 1:].to(x.dtype))

        out = _Transpose.apply(out.view(size, -1))

        return out.view(batch, -1, size)[:, :length]

    def _filter_truncated(self, x: torch.Tensor, reach: int) -> torch.Tensor:
        """Filter by blocks, each from the inputs within reach of its positions.

        Args:
            x: Input sequences. (B, U, D)
            reach: Number of inputs an output depends on.

        Returns:
            : Sum over heads of the truncated EMA. (B, U, D)

        """
        batch, length, size = x.shape

        num_blocks, block_length = _blocks(length, max(_BLOCK_LENGTH, reach))

        x = torch.nn.functional.pad(
            x, (0, 0, reach - 1, num_blocks * block_length - length)
        )
        # Not `unfold`, whose size is a plain number: one traced program per length.
        across, along, feature = x.stride()
        windows = x.as_strided(
            (size, block_length + reach - 1, batch, num_blocks),
            (feature, along, across, along * block_length),
        ).reshape(size, -1, batch * num_blocks)

        lags = torch.nn.functional.pad(
            self.kernel(reach).flip(-1), (block_length - 1, block_length - 1)
        )

        out = torch.bmm(toeplitz(lags, block_length).to(x.dtype), windows)
        out = out.view(size, block_length, batch, num_blocks).permute(2, 3, 1, 0)

        return out.reshape(batch, -1, size)[:, :length]


def masked(x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """Set to zero what is padding.

    Args:
        x: Inputs. (..., D)
        padding: True where one is padding (None = nowhere). (...), bool

    Returns:
        : Inputs. (..., D)

    """
    return x if padding is None else x.masked_fill(padding.unsqueeze(-1), 0.0)


def _powers(base: torch.Tensor, length: int) -> torch.Tensor:
    """Raise to the powers 0, ..., length - 1.

    Args:
        base: Positive numbers. (D, H)
        length: Number of powers L.

    Returns:
        : Powers. (D, H, L)

    """
    exponent = torch.arange(length, device=base.device, dtype=base.dtype)

    return torch.exp(torch.log(base).unsqueeze(-1) * exponent)


def _blocks(length: int, longest: int) -> tuple[int, int]:
    """Divide positions into blocks of one length.

    Args:
        length: Number of positions.
        longest: Number of positions that a block may have.

    Returns:
        : Number of blocks.
        : Length of each.

    """
    # Said apart, so that a program traced for short sequences divides nothing.
    if length <= longest:
        return 1, length

    num_blocks = math.ceil(length / longest)

    return num_blocks, math.ceil(length / num_blocks)
