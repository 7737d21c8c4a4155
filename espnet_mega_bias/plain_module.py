"""Modules that may be computed in another form than by a call."""

import torch


def is_plain(module: torch.nn.Module | None, kind: type[torch.nn.Module]) -> bool:
    """Tell whether a call of a module computes what its class does and nothing else.

    Subclasses and replacements (adapters, quantised layers) and hooks (sharded weights)
    do something of their own when they are called.

    Args:
        module: Module (None = none).
        kind: Class whose computation is known.

    """
    return type(module) is kind and not (
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
    )
