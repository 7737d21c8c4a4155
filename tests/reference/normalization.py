"""ESPnet's normalisations of one vector; weights by ESPnet's parameter names."""

import torch


def layer_norm(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean 0 and variance 1, scaled and moved."""
    mean = x.sum() / x.numel()
    variance = ((x - mean) ** 2).sum() / x.numel()

    return (x - mean) / torch.sqrt(variance + 1e-12) * weights["weight"] + weights[
        "bias"
    ]


def basic_norm(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean square near 1, with a learned epsilon."""
    return x / torch.sqrt((x * x).sum() / x.numel() + torch.exp(weights["eps"]))


def rms_norm(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean square 1, scaled by feature."""
    return weights["scale"] * x / (torch.sqrt((x * x).sum() / x.numel()) + 1e-5)


def scale_norm(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Length 1, scaled as a whole."""
    return weights["scale"] * x / torch.sqrt((x * x).sum()).clamp(min=1e-5)


NORMALIZATIONS = {
    "basic_norm": basic_norm,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "scale_norm": scale_norm,
}
