"""Time a training step against ESPnet's `mega` with the same weights.

    python benchmarks/bench_training.py [--threads 2] [--device cuda] [--smoke]
                                        [--json FILE]

Forward and backward of the decoder alone; the floor is its linear layers alone. On a
GPU under bf16 autocast. Peak memory is the most that tensors take at a time during a
step, beyond what was there before.

To see why the floor is not reached, `--parts` times what a step cannot do without
besides the linear layers, each alone.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

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
from torch.profiler import ProfilerActivity, profile

from espnet_mega_bias.attention import causal_attention

KINDS = ("espnet", "ours", "floor")


def steps(
    conf: dict[str, object], batch: int, length: int, device: str
) -> dict[str, Callable[[], None]]:
    """Make a training step of each decoder and of the floor.

    Args:
        conf: Configuration.
        batch: Number of sequences B.
        length: Labels of each, with the blank in front.
        device: Device.

    """
    theirs, ours = decoders(conf, device)
    labels = torch.randint(1, VOCAB, (batch, length), device=device)
    x = torch.randn(batch, length, ours.output_size, device=device)
    cotangent = torch.randn_like(x)

    with torch.no_grad():
        check(ours(labels), theirs(labels))

    def step(model: torch.nn.Module, inputs: torch.Tensor) -> None:
        on_gpu = device.startswith("cuda")

        with torch.autocast(device, torch.bfloat16) if on_gpu else nullcontext():
            out = model(inputs)

        out.backward(cotangent.to(out.dtype))
        model.zero_grad(set_to_none=True)

    models = ((theirs, labels), (ours, labels), (LinearLayers(ours), x))

    return {
        kind: lambda model=model, inputs=inputs: step(model, inputs)
        for kind, (model, inputs) in zip(KINDS, models, strict=True)
    }


def peak(step: Callable[[], None], device: str) -> float:
    """Measure the peak memory of a step, in MiB above what was there before.

    Args:
        step: One of `steps`.
        device: Device.

    """
    if device.startswith("cuda"):
        step()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()

        return (torch.cuda.max_memory_allocated() - before) / 2**20

    # What the process has resident depends on what the allocator had and the system
    # took back.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()

    now = most = 0

    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)

    return most / 2**20


def parts(batch: int, length: int, repeat: int) -> None:
    """Print what a step needs besides its linear layers, as a share of those.

    Args:
        batch: Number of sequences B.
        length: Labels of each.
        repeat: Number of rounds.

    """
    _, ours = decoders(LARGE)
    mega = ours.mega_blocks[0][0]
    sizes = {
        "x": mega.size,
        "key": mega.qk_size,
        "value": mega.v_size,
        "hidden": LARGE["linear_size"],
    }
    tensors = {
        name: torch.randn(batch, length, size, requires_grad=True)
        for name, size in sizes.items()
    }

    def both(call: Callable[..., torch.Tensor], *names: str) -> None:
        inputs = [tensors[name] for name in names]
        out = call(*inputs)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    def activations() -> None:
        for name in ("value", "x", "key", "value", "x", "hidden"):
            both(torch.nn.functional.silu, name)

    bias = torch.zeros(length)
    blocks = range(len(ours.mega_blocks))
    linear = steps(LARGE, batch, length, "cpu")["floor"]
    times = interleave(
        {
            "linear layers": linear,
            "activations": lambda: [activations() for _ in blocks],
            "attention": lambda: [
                both(
                    lambda q, k, v: causal_attention(q, k, v, bias),
                    "key",
                    "key",
                    "value",
                )
                for _ in blocks
            ],
            "EMA": lambda: [both(mega.multihead_damped_ema, "x") for _ in blocks],
            "gating": lambda: [both(torch.mul, "value", "value") for _ in blocks],
        },
        repeat,
    )

    for name, time in times.items():
        share = time / times["linear layers"]
        print(f"B {batch}, U {length}, {name}: {time:.0f} ms, {share:.2f}", flush=True)

    total = sum(times.values()) / times["linear layers"]
    print(f"B {batch}, U {length}, together: {total:.2f}")


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--parts", action="store_true", help="only: where time goes")
    args = parser.parse_args()

    conf = SMALL if args.smoke else LARGE
    sizes = [(2, 9)] if args.smoke else [(32, 50), (32, 150), (8, 500)]
    most = (2, 40) if args.smoke else (8, 1000)

    start(args)

    if args.parts:
        for size in sizes:
            parts(*size, 1 if args.smoke else 5)
        return

    def rows() -> Iterator[tuple[str, Row]]:
        for batch, length in sizes:
            yield (
                f"training step, B {batch}, U {length}, ms",
                interleave(
                    steps(conf, batch, length, args.device),
                    1 if args.smoke else 7,
                    args.device,
                ),
            )

        batch, length = most
        yield (
            f"peak memory of a step, B {batch}, U {length}, MiB",
            {
                kind: peak(step, args.device)
                for kind, step in steps(conf, batch, length, args.device).items()
            },
        )

    report(args, rows())


if __name__ == "__main__":
    main()
