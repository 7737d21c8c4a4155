"""Causal attention with a relative position bias."""

import math
from contextlib import nullcontext

import torch
from torch.autograd.function import once_differentiable

from espnet_mega_bias.autocast import autocast_dtype
from espnet_mega_bias.plain_module import is_plain
from espnet_mega_bias.position_bias.toeplitz import causal_toeplitz, diagonal_sums
from espnet_mega_bias.swish import swish_backward

# Queries that are taken together; keys after the last of them are left out.
_BLOCK_LENGTH = 128


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor | None = None,
    dropout_rate: float = 0.0,
    activation: torch.nn.Module | None = None,
) -> torch.Tensor:
    """Attend to the keys so far that are no padding; zero where there is none.

    out_i = sum_j dropout(softmax_j(query_i key_j + bias_{j - i})) phi(value_j),  j <= i

    Products, and what is kept for the gradient, cover little more than the keys that
    come no later than their query. The gradient of the bias is summed over diagonals,
    and exists once for all sequences. Where phi is swish, the values are kept without
    it, and it is computed again for the gradient.

    Args:
        query: Queries, scaled. (B, U, S)
        key: Keys. (B, U, S)
        value: Values. (B, U, V)
        bias: Relative position bias at the offsets 1 - U, ..., 0. (U,)
        padding: True where a key is padding. (B, U), bool
        dropout_rate: Dropout rate of the weights, from 0 to 1.
        activation: Activation function phi of the values (None = none).

    Returns:
        : Weighted values. (B, U, V)

    """
    # The number of blocks would be burnt into a traced program.
    compiling = torch.compiler.is_compiling()
    swish = not compiling and is_plain(activation, torch.nn.SiLU)

    if activation is not None and not swish:
        value = activation(value)

    device = query.device.type
    half = autocast_dtype(device)
    dtype = half or value.dtype
    inputs = (query.to(dtype), key.to(dtype), value.to(dtype), bias, padding)

    with torch.autocast(device, enabled=False) if half else nullcontext():
        if compiling:
            weights = _weights(*inputs[:2], *inputs[3:], 0, query.size(1))
            weights = torch.nn.functional.dropout(weights, dropout_rate)

            return torch.matmul(weights, inputs[2])

        return _CausalAttention.apply(*inputs, dropout_rate, swish)[0]


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(query, key, value, bias, padding, dropout_rate, swish):
        out = torch.empty_like(value)
        value = torch.nn.functional.silu(value) if swish else value
        kept = []

        for start, end in query_blocks(query.size(1)):
            weights = _weights(query, key, bias, padding, start, end)
            noise = None

            if dropout_rate > 0.0:
                noise = torch.empty_like(weights).bernoulli_(1.0 - dropout_rate)
                noise /= max(1.0 - dropout_rate, torch.finfo(noise.dtype).tiny)

            torch.bmm(
                weights if noise is None else weights * noise,
                value[:, :end],
                out=out[:, start:end],
            )
            kept += [weights, noise]

        return out, *kept

    # Apart from `forward`, or torch.func would refuse the function.
    @staticmethod
    def setup_context(ctx, inputs, output):
        kept = output[1:]
        ctx.mark_non_differentiable(*(part for part in kept if part is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:4], *kept)
        ctx.swish = inputs[6]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        if grad is None:
            return (None,) * 7

        query, key, inner, bias, *kept = ctx.saved_tensors
        value = torch.nn.functional.silu(inner) if ctx.swish else inner
        grad_query, grad_key, grad_value = map(torch.empty_like, (query, key, value))
        grad_bias = torch.zeros_like(bias)
        blocks = list(
            zip(query_blocks(query.size(1)), kept[::2], kept[1::2], strict=True)
        )

        # From the end: the last block covers all keys, the others add to what it wrote.
        for (start, end), weights, noise in reversed(blocks):
            here, before = slice(start, end), slice(end)
            beta = 0.0 if end == query.size(1) else 1.0

            dropped = weights if noise is None else weights * noise
            grad_value[:, before].baddbmm_(
                dropped.transpose(1, 2), grad[:, here], beta=beta
            )

            # Through dropout and softmax.
            grad_scores = torch.bmm(grad[:, here], value[:, before].transpose(1, 2))
            grad_scores *= dropped
            total = grad_scores.sum(-1, keepdim=True)
            grad_scores.addcmul_(weights, total, value=-1.0)

            torch.bmm(grad_scores, key[:, before], out=grad_query[:, here])
            grad_key[:, before].baddbmm_(
                grad_scores.transpose(1, 2), query[:, here], beta=beta
            )
            grad_bias[-end:] += diagonal_sums(grad_scores.sum(0))[:end]

        if ctx.swish:
            grad_value = swish_backward(grad_value, inner)

        return grad_query, grad_key, grad_value, grad_bias, None, None, None


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor | None,
    start: int,
    end: int,
) -> torch.Tensor:
    """Compute the attention weights of a block of queries.

    Args:
        query: Queries, scaled. (B, U, S)
        key: Keys. (B, U, S)
        bias: Bias at the offsets 1 - U, ..., 0. (U,)
        padding: True where a key is padding. (B, U), bool
        start: First query.
        end: End of the queries, and of the keys.

    Returns:
        : Weights, before dropout. (B, end - start, end)

    """
    scores = torch.matmul(query[:, start:end], key[:, :end].transpose(1, 2))
    scores += causal_toeplitz(bias[bias.size(0) - end :], end - start)

    if padding is not None:
        # Not -inf: a row with padding alone would become NaN.
        padding = padding[:, None, :end]
        scores.masked_fill_(padding, torch.finfo(scores.dtype).min)

    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=wide)

    if padding is not None:
        weights = weights.masked_fill(padding, 0.0)

    return weights.to(query.dtype)


def query_blocks(length: int) -> list[tuple[int, int]]:
    """Divide queries into blocks of about the same length.

    Args:
        length: Number of queries U.

    Returns:
        : Start and end of each block.

    """
    step = math.ceil(length / math.ceil(length / _BLOCK_LENGTH))

    return [(start, min(start + step, length)) for start in range(0, length, step)]
