"""What autocast does on a device."""

import torch


def autocast_dtype(device: str) -> torch.dtype | None:
    """Tell in which type autocast, where it is switched on, multiplies matrices.

    Args:
        device: Type of device; the meta device, of which torch raises when asked, has
            no autocast.

    Returns:
        : Type (None = no autocast).

    """
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None

    return torch.get_autocast_dtype(device)
