"""Time the rotary bias against ESPnet's; the floor is a copy of the (L, L) result.

    python benchmarks/bench_bias.py [--threads 2] [--device cuda] [--smoke]
                                    [--json FILE]

On a GPU also attention with the bias: FlexAttention, which adds the bias by offset
without an (L, L) matrix, against the matrix in scaled_dot_product_attention.
"""

from collections.abc import Iterator

import torch
from common import Row, arguments, check, interleave, report, start
from espnet2.asr_transducer.decoder.modules.mega import positional_bias
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from espnet_mega_bias import RotaryRelativePositionBias

SIZE = 128


def bench_matrix(device: str, length: int, repeat: int) -> Iterator[tuple[str, Row]]:
    """Time the (L, L) bias.

    Args:
        device: Device.
        length: L.
        repeat: Number of rounds.

    """
    theirs = positional_bias.RotaryRelativePositionBias(SIZE, length).to(device)
    ours = RotaryRelativePositionBias(SIZE, length).to(device)
    ours.load_state_dict(theirs.state_dict())
    cotangent = torch.randn(length, length, device=device)

    with torch.no_grad():
        matrix = ours(length)
        check(matrix, theirs(length))

        yield (
            f"bias, L {length}, forward, ms",
            interleave(
                {
                    "espnet": lambda: theirs(length),
                    "ours": lambda: ours(length),
                    "floor": matrix.clone,
                },
                repeat,
                device,
            ),
        )

    yield (
        f"bias, L {length}, forward and backward, ms",
        interleave(
            {
                "espnet": lambda: theirs(length).backward(cotangent),
                "ours": lambda: ours(length).backward(cotangent),
                "floor": lambda: (matrix.clone(), cotangent.clone()),
            },
            repeat,
            device,
        ),
    )


def bench_attention(device: str, length: int, repeat: int) -> Iterator[tuple[str, Row]]:
    """Time causal attention with the bias; the floor is attention without it.

    Args:
        device: Device with FlexAttention.
        length: L.
        repeat: Number of rounds.

    """
    bias = RotaryRelativePositionBias(SIZE, length).to(device)
    query, key, value = torch.randn(
        3, 8, 1, length, SIZE, device=device, dtype=torch.bfloat16
    )
    flex = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(
        lambda b, h, i, j: i >= j, None, None, length, length, device=device
    )

    with torch.no_grad():
        by_offset = bias.by_offset(length)
        causal = bias.causal(length).to(query.dtype)

    def with_matrix() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=causal
        )

    def by_score() -> torch.Tensor:
        return flex(
            query,
            key,
            value,
            score_mod=lambda score, b, h, i, j: score + by_offset[j - i + length - 1],
            block_mask=mask,
        )

    check(by_score().float(), with_matrix().float(), 2e-2)

    yield (
        f"attention, L {length}, matrix (as ESPnet) and FlexAttention (ours), ms",
        interleave(
            {
                "espnet": with_matrix,
                "ours": by_score,
                "floor": lambda: torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, is_causal=True
                ),
            },
            repeat,
            device,
        ),
    )


def main() -> None:
    """Print the table."""
    args = arguments(__doc__).parse_args()
    start(args)

    def rows() -> Iterator[tuple[str, Row]]:
        repeat = 1 if args.smoke else 31
        yield from bench_matrix(args.device, 64 if args.smoke else 2048, repeat)

        if args.device.startswith("cuda"):
            for length in (64,) if args.smoke else (512, 2048, 8192):
                yield from bench_attention(args.device, length, repeat)

    report(args, rows())


if __name__ == "__main__":
    main()
