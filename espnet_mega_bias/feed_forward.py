"""ESPnet's feed-forward module."""

from collections.abc import Callable

import torch
from espnet2.asr_transducer.decoder.modules.mega.feed_forward import (
    NormalizedPositionwiseFeedForward,
)

from espnet_mega_bias.few_rows_linear import few_rows_linear
from espnet_mega_bias.light_call import light_call
from espnet_mega_bias.linear import linear
from espnet_mega_bias.plain_module import is_plain


def feed_forward(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compute ESPnet's feed-forward module over whole sequences.

    Where something is hooked to it or has taken its place, it is called.

    Args:
        module: Feed-forward module.
        x: Input. (..., D)

    Returns:
        : Output. (..., D)

    """
    if not is_plain(module, NormalizedPositionwiseFeedForward):
        return module(x)

    hidden = module.hidden_dropout(module.activation(linear(module.linear1, x)))

    return module.normalization(x + module.dropout(linear(module.linear2, hidden)))


def feed_forward_step(
    module: torch.nn.Module,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make a function that computes ESPnet's feed-forward module, faster for a step.

    With dropout the module itself is called.

    Args:
        module: Feed-forward module.

    Returns:
        : From inputs (B, D) to outputs (B, D), to be made anew when that of
            `few_rows_linear` is. The module itself where something is hooked to it or
            has taken its place.

    """
    if not is_plain(module, NormalizedPositionwiseFeedForward):
        return module

    linear1 = few_rows_linear(module.linear1)
    linear2 = few_rows_linear(module.linear2)
    activation = light_call(module.activation)
    normalization = light_call(module.normalization)
    dropout, hidden_dropout = module.dropout, module.hidden_dropout

    def step(x: torch.Tensor) -> torch.Tensor:
        # Dropout comes and goes while the weights stay as they are.
        if dropout.training or hidden_dropout.training:
            return module(x)

        return normalization(x + linear2(activation(linear1(x))))

    return step
