"""Time the linear layers of the large decoder for a few rows, by torch and by a step.

    python benchmarks/bench_linear.py [--threads 2] [--everywhere] [--smoke]
                                      [--json FILE]

The floor reads each weight once. On processors that are not AMD's a step leaves one row
to torch, unless `--everywhere` shows what it would gain or lose; on a GPU all rows.
"""

from collections.abc import Iterator

import torch
from common import (
    LARGE,
    SMALL,
    Row,
    arguments,
    check,
    decoders,
    interleave,
    report,
    start,
)

from espnet_mega_bias import few_rows_linear


@torch.no_grad()
def bench_linear(conf: dict[str, object], count: int, repeat: int, device: str) -> Row:
    """Time all linear layers of a decoder.

    Args:
        conf: Configuration of the decoder.
        count: Number of rows.
        repeat: Number of rounds.
        device: Device.

    """
    _, decoder = decoders(conf, device)
    layers = [
        layer for layer in decoder.modules() if isinstance(layer, torch.nn.Linear)
    ]
    inputs = [torch.randn(count, layer.in_features, device=device) for layer in layers]
    functions = [few_rows_linear.few_rows_linear(layer) for layer in layers]

    def compute(functions: list) -> list[torch.Tensor]:
        return [function(x) for function, x in zip(functions, inputs, strict=True)]

    for ours, theirs in zip(compute(functions), compute(layers), strict=True):
        check(ours, theirs)

    return interleave(
        {
            "espnet": lambda: compute(layers),
            "ours": lambda: compute(functions),
            "floor": lambda: [layer.weight.sum() for layer in layers],
        },
        repeat,
        device,
    )


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--everywhere", action="store_true", help="as on a processor of AMD"
    )
    args = parser.parse_args()
    start(args)

    if args.everywhere:
        few_rows_linear.on_amd = lambda: True

    def rows() -> Iterator[tuple[str, Row]]:
        conf, repeat = (SMALL, 1) if args.smoke else (LARGE, 61)

        for count in (1, 2) if args.smoke else (1, 2, 5, 10, 32):
            yield (
                f"linear layers, {count} rows, ms",
                bench_linear(conf, count, repeat, args.device),
            )

    report(args, rows())


if __name__ == "__main__":
    main()
