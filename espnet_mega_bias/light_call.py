"""Small modules of torch's, without what calling a module costs."""

from collections.abc import Callable

import torch

from espnet_mega_bias.plain_module import is_plain


def light_call(
    module: torch.nn.Module,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make a function that does what a call of a module does, at less cost.

    A step of the search is dozens of small operations. Where one of them is a module,
    the call of the module takes longer than what it computes.

    It is to be made anew after any change of the module but that of parameters in
    place.

    Args:
        module: Module of one input.

    Returns:
        : From input to output. The module itself where something is hooked to it, and
            unless it is torch's SiLU or LayerNorm.

    """
    if is_plain(module, torch.nn.SiLU) and not module.inplace:
        return torch.nn.functional.silu

    if is_plain(module, torch.nn.LayerNorm):
        return _layer_norm(module)

    return module


def _layer_norm(module: torch.nn.LayerNorm) -> Callable[[torch.Tensor], torch.Tensor]:
    layer_norm = torch.nn.functional.layer_norm
    arguments = (module.normalized_shape, module.weight, module.bias, module.eps)

    def call(x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, *arguments)

    return call
