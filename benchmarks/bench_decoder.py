"""Time the decoder and its bias against ESPnet's `mega` with the same weights.

Sizes are those of conf/train_librispeech_100_mega_bias.yaml. Each row first checks, on
the very input it times, that both compute the same. The floor of the bias is a copy of
the (L, L) result; that of the decoder, its linear layers alone.

    python benchmarks/bench_decoder.py [--threads 2] [--smoke] [--json FILE]
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from espnet2.asr_transducer.beam_search_transducer import Hypothesis
from espnet2.asr_transducer.decoder.mega_decoder import MEGADecoder
from espnet2.asr_transducer.decoder.modules.mega import positional_bias

from espnet_mega_bias import MEGABiasDecoder, RotaryRelativePositionBias

VOCAB = 500
CONF = {
    "block_size": 256,
    "linear_size": 2048,
    "qk_size": 128,
    "v_size": 1024,
    "num_heads": 4,
    "num_blocks": 6,
    "rel_pos_bias_type": "rotary",
    "max_positions": 2048,
}


class LinearLayers(torch.nn.Module):
    """The linear layers of a decoder, and nothing between them."""

    def __init__(self, decoder: MEGABiasDecoder):
        super().__init__()
        self.blocks = decoder.mega_blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mega, ffn in self.blocks:
            value = mega.proj_v(x)
            mixed = mega.proj_mx(x)
            x = mega.proj_h(value) + mixed[..., -mega.size :]
            x = ffn.linear2(ffn.linear1(x))

        return x


def interleave(calls: dict[str, Callable], repeat: int) -> dict[str, float]:
    """Time calls in turn.

    Returns:
        : Median of each, in milliseconds.

    """
    times = {name: [] for name in calls}

    for call in calls.values():
        call()

    for _ in range(repeat):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))

    return {name: statistics.median(values) for name, values in times.items()}


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that both agree to 1e-4 of the maximum, before they are timed."""
    difference = (actual - expected).abs().max() / expected.abs().max()

    if not difference < 1e-4:
        raise SystemExit(f"no parity on the input to be timed: {difference:.1e}")


def bench_bias(smoke: bool, repeat: int) -> dict[str, dict[str, float]]:
    length = 64 if smoke else 2048
    theirs = positional_bias.RotaryRelativePositionBias(128, length)
    ours = RotaryRelativePositionBias(128, length)
    ours.load_state_dict(theirs.state_dict())
    cotangent = torch.randn(length, length)

    with torch.no_grad():
        matrix = ours(length)
        check(matrix, theirs(length))
        forward = interleave(
            {
                "espnet": lambda: theirs(length),
                "ours": lambda: ours(length),
                "floor": matrix.clone,
            },
            repeat,
        )

    both = interleave(
        {
            "espnet": lambda: theirs(length).backward(cotangent),
            "ours": lambda: ours(length).backward(cotangent),
            "floor": lambda: (matrix.clone(), cotangent.clone()),
        },
        repeat,
    )

    return {
        f"bias, L {length}, forward": forward,
        f"bias, L {length}, forward and backward": both,
    }


def bench_training(
    theirs: MEGADecoder, ours: MEGABiasDecoder, batch: int, length: int, repeat: int
) -> dict[str, dict[str, float]]:
    floor = LinearLayers(ours)
    labels = torch.randint(1, VOCAB, (batch, length))
    x = torch.randn(batch, length, CONF["block_size"])
    cotangent = torch.randn_like(x)

    with torch.no_grad():
        check(ours(labels), theirs(labels))
        forward = interleave(
            {
                "espnet": lambda: theirs(labels),
                "ours": lambda: ours(labels),
                "floor": lambda: floor(x),
            },
            repeat,
        )

    def step(model, inputs):
        model(inputs).backward(cotangent)
        model.zero_grad(set_to_none=True)

    training = interleave(
        {
            "espnet": lambda: step(theirs, labels),
            "ours": lambda: step(ours, labels),
            "floor": lambda: step(floor, x),
        },
        repeat,
    )

    return {
        f"B {batch}, U {length}, forward": forward,
        f"B {batch}, U {length}, training step": training,
    }


@torch.no_grad()
def bench_step(
    theirs: MEGADecoder, ours: MEGABiasDecoder, batch: int, length: int, repeat: int
) -> dict[str, dict[str, float]]:
    floor = LinearLayers(ours)
    sequence = [0, *torch.randint(1, VOCAB, (length,)).tolist()]
    state = ours.init_state()

    for t in range(1, length + 1):
        _, state = ours.score(sequence[:t], state)

    hyps = [Hypothesis(0.0, sequence, state) for _ in range(batch)]
    full = ours(torch.tensor([sequence]))[0, -1]
    check(ours.batch_score(hyps)[0], full.expand(batch, -1))

    # ESPnet's states have the same entries; its first key, all zeros, is left out.
    x = torch.randn(batch, CONF["block_size"])

    return {
        f"one label, U {length}, B {batch}": interleave(
            {
                "espnet": lambda: theirs.batch_score(hyps),
                "ours": lambda: ours.batch_score(hyps),
                "floor": lambda: floor(x),
            },
            repeat,
        )
    }


def machine() -> str:
    """Name processor, torch, threads and commit."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")

    if info.exists():
        names = [line for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0].split(":")[1].strip() if names else cpu

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()

    return (
        f"{cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"commit {commit or 'unknown'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="tiny inputs, one round")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(machine(), flush=True)

    theirs = MEGADecoder(VOCAB, **CONF).eval()
    ours = MEGABiasDecoder(VOCAB, **CONF).eval()
    theirs.load_state_dict(ours.state_dict())

    many, few = (1, 1) if args.smoke else (31, 5)
    steps = [(1, 9), (10, 9)] if args.smoke else [(1, 50), (10, 50), (1, 1000)]
    batches = [(2, 9)] if args.smoke else [(32, 50), (32, 150), (8, 500)]

    works = [
        lambda: bench_bias(args.smoke, many),
        *(partial(bench_step, theirs, ours, *size, many) for size in steps),
        *(partial(bench_training, theirs, ours, *size, few) for size in batches),
    ]
    rows = {}

    print("| work | ESPnet, ms | ours, ms | floor, ms | ESPnet / ours | ours / floor |")
    print("|---|---|---|---|---|---|")

    for work in works:
        done = work()
        rows |= done

        for name, row in done.items():
            print(
                f"| {name} | {row['espnet']:.2f} | {row['ours']:.2f} "
                f"| {row['floor']:.2f} | {row['espnet'] / row['ours']:.2f} "
                f"| {row['ours'] / row['floor']:.2f} |",
                flush=True,
            )

    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "ms": rows}, indent=1))


if __name__ == "__main__":
    main()
