"""What the blocks of a decoder have learnt, as plain arrays."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

    from espnet_mega_bias.block import MEGA
    from espnet_mega_bias.decoder import MEGABiasDecoder


@dataclass(frozen=True)
class Learnt:
    """What the N blocks of a decoder have learnt, whatever they are given.

    Args:
        bias: Bias at the offsets 1 - L, ..., 0. [N x (L,)]
        kernel: EMA kernel at the lags 0, ..., L - 1. [N x (D, L)]

    """

    bias: "list[np.ndarray]"
    kernel: "list[np.ndarray]"


@dataclass(frozen=True)
class Attention:
    """Attention of the N blocks of a decoder over one label sequence.

    Args:
        tokens: Tokens, the blank in front. [U]
        weights: Attention weights, query by key. [N x (U, U)]

    """

    tokens: list[str]
    weights: "list[np.ndarray]"


def read_learnt(decoder: "MEGABiasDecoder", length: int) -> Learnt:
    """Read off a decoder what its blocks have learnt.

    Args:
        decoder: Decoder.
        length: Number of offsets and of lags L, at least 1.

    Returns:
        : Bias and EMA kernels; see `bias_by_offset` and `ema_kernel`.

    """
    return Learnt(bias_by_offset(decoder, length), ema_kernel(decoder, length))


def bias_by_offset(decoder: "MEGABiasDecoder", length: int) -> "list[np.ndarray]":
    """Compute the bias of each block at the offsets that the attention uses.

    Args:
        decoder: Decoder.
        length: Number of offsets L, at least 1; fewer where `max_positions`, or with
            chunked attention the chunk, has fewer.

    Returns:
        : Values at the offsets (key position minus query position) 1 - L, ..., 0.
            [N x (L,)], float32 or wider

    """
    values = []

    for mega, _ in decoder.mega_blocks:
        bias = mega.rel_pos_bias
        reach = min(length, bias.max_positions or length)
        values.append(_array(bias.last_row(reach)))

    return values


def ema_kernel(decoder: "MEGABiasDecoder", length: int) -> "list[np.ndarray]":
    """Compute the EMA kernel of each block.

    Args:
        decoder: Decoder.
        length: Number of lags L, at least 1.

    Returns:
        : Weight of the input at the lags 0, ..., L - 1 in the output, for each feature,
            without the residual; zero from `truncation_length` on. [N x (D, L)],
            float32 or wider

    """
    kernels = []

    for mega, _ in decoder.mega_blocks:
        kernel = _array(mega.multihead_damped_ema.kernel(length))

        if (reach := mega.multihead_damped_ema.truncation_length) is not None:
            kernel[:, reach:] = 0.0

        kernels.append(kernel)

    return kernels


def attention_weights(
    decoder: "MEGABiasDecoder", labels: list[int]
) -> "list[np.ndarray]":
    """Compute the attention weights of each block over a label sequence.

    Args:
        decoder: Decoder, in evaluation mode.
        labels: Labels, the blank in front. A later label `embed_pad` is padding. [U]

    Returns:
        : Weights, query by key: 0 for later keys, for padding and across chunks; other
            rows than those of padding with nothing before it in its chunk sum to 1.
            [N x (U, U)], float32 or wider

    Raises:
        ValueError: If the decoder is in training mode, or U is above `max_positions`
            with full-context attention.

    """
    import torch

    if decoder.training:
        raise ValueError("the decoder must be in evaluation mode")

    inputs = []

    def keep(mega, args):
        inputs.append((mega, *args))

    handles = [mega.register_forward_pre_hook(keep) for mega, _ in decoder.mega_blocks]

    try:
        with torch.no_grad():
            decoder(torch.tensor([labels], device=decoder.embed.weight.device))

            return [_array(_weights(*block)[0]) for block in inputs]
    finally:
        for handle in handles:
            handle.remove()


def _weights(
    mega: "MEGA", x: "torch.Tensor", padding: "torch.Tensor"
) -> "torch.Tensor":
    """Compute the attention weights of a block.

    Args:
        mega: Block, in evaluation mode.
        x: Its input. (B, U, D)
        padding: True where a position is padding. (B, U), bool

    Returns:
        : Weights. (B, U, U)

    """
    import torch

    from espnet_mega_bias.attention import causal_attention

    batch, length, _ = x.shape
    _, key, _, _ = mega.gates(mega.multihead_damped_ema(x, padding))
    query = torch.addcmul(mega.query_bias(), key, mega.query_weight())
    weights = x.new_zeros(batch, length, length)
    chunk = mega.chunk_size if mega.chunk_size > 0 else length

    for start in range(0, length, chunk):
        here = slice(start, min(start + chunk, length))
        size = here.stop - start

        # What the block itself calls: over one-hot values it gives the weights.
        weights[:, here, here] = causal_attention(
            query[:, here],
            key[:, here],
            torch.eye(size, dtype=x.dtype, device=x.device).expand(batch, -1, -1),
            mega.rel_pos_bias.last_row(size),
            padding[:, here],
        )

    return weights


def _array(tensor: "torch.Tensor") -> "np.ndarray":
    import torch

    tensor = tensor.detach().cpu()

    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)).numpy().copy()
