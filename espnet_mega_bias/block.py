"""Moving average equipped gated attention (MEGA) block."""

import torch

from espnet_mega_bias.attention import causal_attention
from espnet_mega_bias.ema import MultiHeadDampedEMA
from espnet_mega_bias.gated_linear import gated_linear
from espnet_mega_bias.linear import linear
from espnet_mega_bias.position_bias import (
    OffsetBias,
    RelativePositionBias,
    RotaryRelativePositionBias,
)

REL_POS_BIAS_TYPES = ("simple", "rotary")


class MEGA(torch.nn.Module):
    """MEGA block with one causal attention head.

    Input x (B, U, D), activation phi, S = qk_size, V = v_size:

    v      = phi(W_v x)                                          (B, U, V)
    e      = EMA(x)                                              (B, U, D)
    u | z,g | h0 = W_mx e,  u = sigmoid(u),  z,g = phi(z,g)      D | S, V | D
    query  = z * w_0 + b_0,  key = z * w_1 + b_1                 (B, U, S)
    o      = softmax(query key^T / sqrt(S) + bias + mask) v      (B, U, V)
    h      = phi(h0 + W_h (o * g))                               (B, U, D)
    out    = norm(x + u * (h - x))

    With `chunk_size` C > 0, attention stays inside chunks of C positions, while the
    EMA runs across them.

    Softmax ignores what all keys of a query have in common, hence query * b_1, and what
    is left of the key, z * w_1, is moved over to the query. So z itself serves as key:

    query key^T / sqrt(S)  ->  (z * (w_0 w_1) + b_0 w_1) / sqrt(S)  z^T

    Source: arXiv:2209.10655, and
    espnet/espnet@202511 espnet2/asr_transducer/decoder/blocks/mega.py

    Args:
        size: Input/output size D.
        num_heads: Number of EMA heads.
        qk_size: Query and key size S.
        v_size: Value size V.
        activation: Activation function phi (ReLU if None).
        normalization: Normalization module (LayerNorm over D if None).
        rel_pos_bias_type: "simple" (learned table) or "rotary".
        max_positions: Longest sequence, in positions (None = no limit, rotary only);
            with `chunk_size` > 0 the chunk takes its place.
        truncation_length: Number of inputs that an EMA output depends on (None = all).
        chunk_size: Chunk size C of the attention (0 or below = full context).
        dropout_rate: Dropout rate of the values and of the block output.
        att_dropout_rate: Dropout rate of the attention weights.
        ema_dropout_rate: Dropout rate of the EMA output.

    Raises:
        ValueError: If `rel_pos_bias_type` is unknown, or "simple" without
            `max_positions`, or a size is out of range.

    """

    def __init__(
        self,
        size: int = 512,
        num_heads: int = 4,
        qk_size: int = 128,
        v_size: int = 1024,
        activation: torch.nn.Module | None = None,
        normalization: torch.nn.Module | None = None,
        rel_pos_bias_type: str = "simple",
        max_positions: int | None = 2048,
        truncation_length: int | None = None,
        chunk_size: int = -1,
        dropout_rate: float = 0.0,
        att_dropout_rate: float = 0.0,
        ema_dropout_rate: float = 0.0,
    ) -> None:
        """Construct a MEGA object."""
        super().__init__()

        activation = torch.nn.ReLU() if activation is None else activation

        self.multihead_damped_ema = MultiHeadDampedEMA(
            size,
            num_heads=num_heads,
            activation=activation,
            truncation_length=truncation_length,
        )

        self.rel_pos_bias = _build_bias(
            rel_pos_bias_type,
            qk_size,
            chunk_size if chunk_size > 0 else max_positions,
        )

        self.proj_v = torch.nn.Linear(size, v_size)
        self.proj_mx = torch.nn.Linear(size, qk_size + v_size + 2 * size)
        self.proj_h = torch.nn.Linear(v_size, size)

        self.qk_weight = torch.nn.Parameter(torch.empty(2, qk_size))
        self.qk_bias = torch.nn.Parameter(torch.empty(2, qk_size))

        self.activation = activation
        self.normalization = (
            torch.nn.LayerNorm(size) if normalization is None else normalization
        )

        self.dropout = torch.nn.Dropout(p=dropout_rate)
        self.dropout_attn = torch.nn.Dropout(p=att_dropout_rate)
        self.dropout_ema = torch.nn.Dropout(p=ema_dropout_rate)

        self.size = size
        self.qk_size = qk_size
        self.v_size = v_size
        self.chunk_size = chunk_size
        self.scaling = qk_size**-0.5

        self.reset_parameters()

    def reset_parameters(self, val: float = 0.0, std: float = 0.02) -> None:
        """Draw the projections from a normal distribution.

        Args:
            val: Mean, and value of the biases other than that of `proj_h`.
            std: Standard deviation.

        """
        for layer in (self.proj_v, self.proj_mx, self.proj_h):
            torch.nn.init.normal_(layer.weight, mean=val, std=std)
            torch.nn.init.constant_(layer.bias, val)

        # Without any bias, the zero embedding of the blank stays zero through every
        # block, and each normalisation of it multiplies the gradient by 1 / sqrt(eps):
        # six blocks of LayerNorm with ESPnet's eps of 1e-12 overflow float32.
        torch.nn.init.normal_(self.proj_h.bias, mean=val, std=std)

        torch.nn.init.normal_(self.qk_weight, mean=val, std=std)
        torch.nn.init.constant_(self.qk_bias, val)

    def forward(
        self, x: torch.Tensor, padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the block over whole sequences.

        Args:
            x: Input sequences. (B, U, D)
            padding: True where a position is padding: kept out of the EMA, never a
                key. Its own output is finite and means nothing. (B, U), bool

        Returns:
            : Output sequences. (B, U, D)

        Raises:
            TypeError: If `padding` is not boolean.
            ValueError: If U is above `max_positions`, without `chunk_size`.

        """
        if padding is not None and padding.dtype != torch.bool:
            raise TypeError(f"padding must be a bool tensor, got {padding.dtype}")

        value = linear(self.proj_v, x)
        value_activation = self.activation

        # Dropout keeps what it gives out, so that nothing is gained by doing without
        # the activation's output.
        if self.dropout.training and self.dropout.p > 0.0:
            value = self.dropout(self.activation(value))
            value_activation = None

        average = self.multihead_damped_ema(x, padding)

        update, key, gate, candidate = self.gates(average)
        query = torch.addcmul(self.query_bias(), key, self.query_weight())

        length = x.size(1)
        chunk = self.chunk_size if 0 < self.chunk_size < length else length

        if chunk < length:
            query, key, value = (
                self._into_chunks(y, chunk) for y in (query, key, value)
            )

            if padding is not None:
                padding = self._into_chunks(padding.unsqueeze(-1), chunk).squeeze(-1)

        attended = causal_attention(
            query,
            key,
            value,
            self.rel_pos_bias.last_row(chunk),
            padding,
            self.dropout_attn.p if self.training else 0.0,
            value_activation,
        )

        if chunk < length:
            attended = attended.reshape(x.size(0), -1, self.v_size)[:, :length]

        return self.output(x, update, attended, gate, candidate)

    def query_weight(self) -> torch.Tensor:
        """Compute the weight that makes the query from the key: w_0 w_1 / sqrt(S).

        Returns:
            : Weight. (S,)

        """
        return self.qk_weight[0] * self.qk_weight[1] * self.scaling

    def query_bias(self) -> torch.Tensor:
        """Compute the bias that makes the query from the key: b_0 w_1 / sqrt(S).

        Returns:
            : Bias. (S,)

        """
        return self.qk_bias[0] * self.qk_weight[1] * self.scaling

    def gates(self, average: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute everything that comes from the EMA output.

        Args:
            average: EMA output. (..., D)

        Returns:
            : Update gate u. (..., D)
            : Key z. (..., S)
            : Attention gate g, before its activation. (..., V)
            : Candidate h0 before the attention is added. (..., D)

        """
        mixed = linear(self.proj_mx, self.dropout_ema(average))
        update, key, gate, candidate = mixed.split_with_sizes(
            [self.size, self.qk_size, self.v_size, self.size], dim=-1
        )

        return torch.sigmoid(update), self.activation(key), gate, candidate

    def output(
        self,
        x: torch.Tensor,
        update: torch.Tensor,
        attended: torch.Tensor,
        gate: torch.Tensor,
        candidate: torch.Tensor,
    ) -> torch.Tensor:
        """Mix the gated attention into the input.

        Args:
            x: Block input. (..., D)
            update: Update gate u. (..., D)
            attended: Attention output o. (..., V)
            gate: Attention gate g, before its activation. (..., V)
            candidate: Candidate h0. (..., D)

        Returns:
            : Block output. (..., D)

        """
        projected = gated_linear(self.proj_h, attended, gate, self.activation)
        hidden = self.dropout(self.activation(candidate + projected)).to(x.dtype)

        return self.normalization(torch.lerp(x, hidden, update.to(x.dtype)))

    @staticmethod
    def _into_chunks(x: torch.Tensor, chunk: int) -> torch.Tensor:
        """Cut sequences into chunks, the last one filled up with zeros.

        Args:
            x: Sequences. (B, U, F)
            chunk: Chunk size C.

        Returns:
            : Chunks of all sequences. (B * ceil(U / C), C, F)

        """
        x = torch.nn.functional.pad(x, (0, 0, 0, -x.size(1) % chunk))

        return x.reshape(-1, chunk, x.size(-1))


def _build_bias(
    rel_pos_bias_type: str, qk_size: int, max_positions: int | None
) -> OffsetBias:
    if rel_pos_bias_type == "rotary":
        return RotaryRelativePositionBias(qk_size, max_positions)

    if rel_pos_bias_type != "simple":
        raise ValueError(
            f"rel_pos_bias_type must be one of {', '.join(REL_POS_BIAS_TYPES)}, "
            f"got {rel_pos_bias_type!r}"
        )

    if max_positions is None:
        raise ValueError(
            "max_positions must be a number with rel_pos_bias_type simple, got None"
        )

    return RelativePositionBias(max_positions)
