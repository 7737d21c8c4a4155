"""A layer of facebookresearch/mega over one sequence, position by position.

facebookresearch/mega@09f1a87 fairseq/modules/moving_average_gated_attention.py,
exponential_moving_average.py, relative_positional_bias.py and
normalized_feedforward_network.py: one direction, softmax attention, normalisation after
the block, its own parameter names.
"""

import math

import torch


def silu(x: torch.Tensor) -> torch.Tensor:
    """x times its sigmoid."""
    return x / (1.0 + torch.exp(-x))


def layer_norm(x: torch.Tensor, layer: dict[str, torch.Tensor], name: str):
    """Mean 0 and variance 1 of one vector, with fairseq's epsilon."""
    mean = x.mean()
    variance = ((x - mean) ** 2).mean()
    scaled = (x - mean) / torch.sqrt(variance + 1e-5)

    return scaled * layer[f"{name}.norm.norm.weight"] + layer[f"{name}.norm.norm.bias"]


def moving_average(
    x: torch.Tensor,
    layer: dict[str, torch.Tensor],
    p_name: str,
    truncation: int | None,
) -> torch.Tensor:
    """Kernel by kernel: k[l] = sum_n p beta q**l gamma / sqrt(N).

    p_name: "delta" (at 09f1a87) or "alpha" (at 06f2d0e), that p is the sigmoid of; q is
    1 minus p times the sigmoid of the other one.
    """
    q_name = {"delta": "alpha", "alpha": "delta"}[p_name]
    p = torch.sigmoid(layer[f"mega_layer.move.{p_name}"])
    q = 1.0 - p * torch.sigmoid(layer[f"mega_layer.move.{q_name}"])
    beta, gamma = layer["mega_layer.move.beta"], layer["mega_layer.move.gamma"]
    scale = math.sqrt(1.0 / gamma.size(1))
    out = []

    for t in range(len(x)):
        total = x[t] * layer["mega_layer.move.omega"]

        for lag in range(t + 1 if truncation is None else min(t + 1, truncation)):
            kernel = (p * beta * q**lag).squeeze(-1) * gamma * scale
            total = total + kernel.sum(-1) * x[t - lag]

        out.append(silu(total))

    return torch.stack(out)


def position_bias(layer: dict[str, torch.Tensor], i: int, j: int) -> torch.Tensor:
    """Bias of query i and key j."""
    prefix = "mega_layer.rel_pos_bias."

    if prefix + "rel_pos_bias" in layer:
        table = layer[prefix + "rel_pos_bias"]
        return table[(len(table) - 1) // 2 + j - i]

    alpha, beta = layer[prefix + "alpha"][0], layer[prefix + "beta"][0]
    half = len(alpha) // 2
    total = 0.0

    for k in range(half):
        frequency = math.exp(-k * math.log(10000.0) / half)
        a, b = [], []

        for vector, position, turned in ((alpha, i, a), (beta, j, b)):
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            turned.append(vector[k] * cos - vector[k + half] * sin)
            turned.append(vector[k + half] * cos + vector[k] * sin)

        total = total + a[0] * b[0] + a[1] * b[1]

    return total


def layer_output(
    x: torch.Tensor,
    layer: dict[str, torch.Tensor],
    p_name: str = "delta",
    chunk: int | None = None,
    truncation: int | None = None,
) -> torch.Tensor:
    """Compute a decoder layer without cross-attention: x (U, D) to (U, D)."""
    length, size = x.shape
    chunk = length if chunk is None else chunk
    key_size = layer["mega_layer.gamma"].size(1)

    def linear(name, vector):
        return layer[f"{name}.weight"] @ vector + layer[f"{name}.bias"]

    average = moving_average(x, layer, p_name, truncation)
    value = [silu(linear("mega_layer.v_proj", row)) for row in x]
    query, key, gates = [], [], []

    for row in average:
        base = linear("mega_layer.mx_proj", row)
        value_size = len(base) - 2 * size - key_size
        u, zr, hx = torch.split(base, [size, key_size + value_size, size])
        z, r = torch.split(silu(zr), [key_size, value_size])
        gates.append((torch.sigmoid(u), r, hx))
        query.append(z * layer["mega_layer.gamma"][0] + layer["mega_layer.beta"][0])
        key.append(z * layer["mega_layer.gamma"][1] + layer["mega_layer.beta"][1])

    out = []

    for t, (u, r, hx) in enumerate(gates):
        start = t // chunk * chunk
        scores = torch.stack(
            [
                query[t] @ key[s] * key_size**-0.5
                + position_bias(layer, t - start, s - start)
                for s in range(start, t + 1)
            ]
        )
        weights = torch.exp(scores) / torch.exp(scores).sum()
        attended = sum(w * value[start + s] for s, w in enumerate(weights))

        h = silu(hx + linear("mega_layer.h_proj", attended * r))
        y = layer_norm(x[t] + u * (h - x[t]), layer, "mega_layer")

        hidden = silu(linear("nffn.fc1", y))
        out.append(layer_norm(linear("nffn.fc2", hidden) + y, layer, "nffn"))

    return torch.stack(out)
