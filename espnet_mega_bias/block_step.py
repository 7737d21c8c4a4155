"""A MEGA block at the next position, for the search."""

from collections.abc import Callable

import torch

from espnet_mega_bias.autocast import autocast_dtype
from espnet_mega_bias.block import MEGA
from espnet_mega_bias.ema import EMAStepCoefficients
from espnet_mega_bias.few_rows_linear import few_rows_linear
from espnet_mega_bias.light_call import light_call


def block_step(mega: MEGA, ema: EMAStepCoefficients) -> Callable[..., torch.Tensor]:
    """Make a function that computes a MEGA block at the next position of B sequences.

    What happens to the state of the EMA is up to the caller, who does that for all
    blocks at once.

    What a label costs is mostly calls, each of which finds nothing but weights in the
    processor's caches: hence the modules are looked up here, and the formula of `MEGA`
    is written again, in one function without branches into others.

    Args:
        mega: Block.
        ema: Coefficients of its EMA.

    Returns:
        : Function, to be made anew when that of `few_rows_linear` is. Its arguments:
            the input, (B, D); what the EMA's state before this position brings (see
            `EMAStepCoefficients.carry`), (B, D); where to write keys and values of this
            position, beside each other, (B, S + V); keys of all sequences together,
            those included, transposed, (S, R); values likewise, (R, V); the relative
            position bias of each, -inf where a sequence does not attend to it, (B, R);
            True where this position is padding, kept out of the EMA, and attending to
            nothing if the bias leaves nothing (None = nowhere), (B,), bool. It gives
            the output. (B, D)

    """
    proj_v, proj_mx, proj_h = map(
        few_rows_linear, (mega.proj_v, mega.proj_mx, mega.proj_h)
    )
    activation, normalization = map(light_call, (mega.activation, mega.normalization))
    dropout, dropout_attn = mega.dropout, mega.dropout_attn
    dropout_ema = mega.dropout_ema
    query_weight, query_bias = mega.query_weight(), mega.query_bias()
    weight = mega.qk_weight
    half = weight.dtype.itemsize < 4 or autocast_dtype(weight.device.type) is not None
    wide = torch.float32 if half else None
    sizes = [mega.size, mega.qk_size, mega.v_size, mega.size]

    def step(
        x: torch.Tensor,
        carried: torch.Tensor,
        newest: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor,
        padding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        value = activation(proj_v(x))
        average = ema.output(x, carried, padding)

        if dropout_ema.training:
            average = dropout_ema(average)

        update, key, gate, candidate = proj_mx(average).split_with_sizes(sizes, 1)
        key = activation(key)
        query = torch.addcmul(query_bias, key, query_weight)

        newest.copy_(torch.cat((key, value), 1))
        scores, nothing = torch.addmm(bias, query, keys), None

        if padding is not None:
            nothing = bias.isneginf().all(-1, keepdim=True)
            # Its softmax would be NaN, which a gradient does not get rid of.
            scores = scores.masked_fill(nothing, 0.0)

        weights = torch.softmax(scores, -1, wide)

        if nothing is not None:
            weights = weights.masked_fill(nothing, 0.0)

        if dropout_attn.training:
            weights = dropout_attn(weights)

        if dropout.training:
            values = dropout(values)

        if wide is not None:
            weights = weights.to(values.dtype)

        attended = torch.mm(weights, values) * activation(gate)
        hidden = activation(candidate + proj_h(attended))
        update = torch.sigmoid(update)

        if dropout.training:
            hidden = dropout(hidden)

        if wide is not None:
            hidden, update = hidden.to(x.dtype), update.to(x.dtype)

        return normalization(torch.lerp(x, hidden, update))

    return step
