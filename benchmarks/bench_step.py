"""Time one label of the search against ESPnet's `mega` with the same weights.

    python benchmarks/bench_step.py [--threads 2] [--device cuda] [--smoke]
                                    [--json FILE] [--plot FILE]

The floor is the linear layers, and for keys and values one product each that reads
what all hypotheses share. Hypotheses have their last ten labels to themselves. `--plot`
draws the cost of a label against U, with full context and with chunks of 32.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from common import (
    LARGE,
    SMALL,
    VOCAB,
    LinearLayers,
    Row,
    arguments,
    check,
    decoders,
    interleave,
    report,
    start,
)
from espnet2.asr_transducer.beam_search_transducer import Hypothesis

from espnet_mega_bias import MEGABiasDecoder
from espnet_mega_bias.decoder_state import DecoderState

OWN_LABELS = 10

# As many operations as the large decoder has, and next to nothing to compute: what the
# calls cost.
NARROW = LARGE | {"block_size": 8, "linear_size": 8, "qk_size": 8, "v_size": 8}


def grow(decoder: MEGABiasDecoder, batch: int, length: int) -> list[Hypothesis]:
    """Score hypotheses up to their last label.

    Args:
        decoder: Decoder.
        batch: Number of hypotheses B.
        length: Number of labels of each, with the blank in front.

    Returns:
        : Hypotheses with the state before the last label. [B]

    """
    labels, state = [0], decoder.init_state()
    shared = max(length - OWN_LABELS, 1)

    while len(labels) < shared:
        _, state = decoder.score(labels, state)
        labels = [*labels, 1 + 7 * len(labels) % (VOCAB - 1)]

    hyps = [Hypothesis(0.0, labels, state) for _ in range(batch)]

    while len(hyps[0].yseq) < length:
        _, states = decoder.batch_score(hyps)
        hyps = [
            Hypothesis(0.0, [*hyp.yseq, 1 + row], decoder.select_state(states, row))
            for row, hyp in enumerate(hyps)
        ]

    return hyps


def espnet_state(decoder: MEGABiasDecoder, state: DecoderState) -> list[dict]:
    """Put a state in the form of ESPnet's decoder, without its first key of zeros.

    Args:
        decoder: Decoder of the state.
        state: State.

    """
    converted = []
    history = state.history_from(state.first)

    for n, (mega, _) in enumerate(decoder.mega_blocks):
        ema = mega.multihead_damped_ema
        projection = ema.kernel_projection_matrix / ema.num_heads**0.5
        rows = [state.cache.buffer[n, rows] for rows, _ in history]
        keys, values = torch.cat(
            [*rows, mega.qk_weight.new_empty(0, mega.qk_size + mega.v_size)]
        ).split([mega.qk_size, mega.v_size], dim=-1)

        converted.append(
            {
                "ema_state": state.ema_state[n].t() / projection,
                "prev_key": keys * mega.qk_weight[1] + mega.qk_bias[1],
                "prev_value": values,
            }
        )

    return converted


@torch.no_grad()
def bench_step(
    conf: dict[str, object], batch: int, length: int, repeat: int, device: str
) -> Row:
    """Time one label.

    Args:
        conf: Configuration of the decoder.
        batch: Number of hypotheses B.
        length: Labels so far U.
        repeat: Number of rounds.
        device: Device.

    """
    theirs, ours = decoders(conf, device)
    floor = LinearLayers(ours)

    hyps = grow(ours, batch, length + 1)
    others = [
        Hypothesis(0.0, hyp.yseq, espnet_state(ours, hyp.dec_state)) for hyp in hyps
    ]
    check(ours.batch_score(hyps)[0], theirs.batch_score(others)[0])

    reach = conf.get("chunk_size", 0)
    held = (length % reach if reach > 0 else length) + batch
    cached = [
        torch.randn(held, mega.qk_size + mega.v_size, device=device)
        for mega, _ in ours.mega_blocks
    ]
    x = torch.randn(batch, ours.output_size, device=device)
    labels = itertools.count()

    def next_label() -> None:
        # Another label each time: what was scored before comes out of the cache.
        label = next(labels) % (VOCAB - 1)
        ours.batch_score(
            [
                Hypothesis(0.0, [*hyp.yseq[:-1], 1 + label], hyp.dec_state)
                for hyp in hyps
            ]
        )

    return interleave(
        {
            "espnet": lambda: theirs.batch_score(others),
            "ours": next_label,
            "floor": lambda: floor(x, cached),
        },
        repeat,
        device,
    )


def plot(file: Path, smoke: bool, device: str) -> None:
    """Draw the cost of one label against U.

    Args:
        file: Picture to write.
        smoke: Two lengths only.
        device: Device.

    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = (9, 40) if smoke else (50, 100, 200, 500, 1000, 2000, 5000)
    conf = (SMALL if smoke else LARGE) | {"max_positions": 5002}
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)

    for axis, chunk in zip(axes, (-1, 32), strict=True):
        rows = [
            bench_step(
                conf | {"chunk_size": chunk}, 1, length, 1 if smoke else 9, device
            )
            for length in lengths
        ]

        for column, name in (
            ("espnet", "ESPnet's mega"),
            ("ours", "mega_bias"),
            ("floor", "linear layers, keys and values read once"),
        ):
            axis.plot(lengths, [row[column] for row in rows], "o-", label=name)

        for length, row in zip(lengths, rows, strict=True):
            print(f"U {length}, chunk {chunk}: {row}", flush=True)

        axis.set(
            title="full context" if chunk < 0 else f"chunks of {chunk}",
            xscale="log",
            yscale="log",
            xlabel="labels so far",
        )

    axes[0].set_ylabel("one label, ms")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--plot", type=Path, help="draw cost against U (.svg, .png)")
    args = parser.parse_args()
    start(args)

    sizes = (
        [(1, 9), (3, 12)] if args.smoke else [(1, 50), (10, 50), (1, 1000), (10, 1000)]
    )
    chunked = [9, 40] if args.smoke else [100, 1000, 5000]
    repeat = 1 if args.smoke else 21

    def rows() -> Iterator[tuple[str, Row]]:
        for name, conf in (
            (("small", SMALL),)
            if args.smoke
            else (
                ("large", LARGE),
                ("small", SMALL),
            )
        ):
            for batch, length in sizes:
                yield (
                    f"{name}, U {length}, B {batch}, ms",
                    bench_step(conf, batch, length, repeat, args.device),
                )

        if not args.smoke:
            yield (
                "large with sizes of 8, U 50, B 1, ms",
                bench_step(NARROW, 1, 50, repeat, args.device),
            )

        conf = (SMALL if args.smoke else LARGE) | {"chunk_size": 32}

        for length in chunked:
            yield (
                f"chunk 32, U {length}, B 1, ms",
                bench_step(conf, 1, length, repeat, args.device),
            )

    report(args, rows())

    if args.plot:
        plot(args.plot, args.smoke, args.device)


if __name__ == "__main__":
    main()
