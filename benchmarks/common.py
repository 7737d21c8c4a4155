"""What the benchmarks share: sizes, floor, timing, checks, output."""

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from espnet2.asr_transducer.decoder.mega_decoder import MEGADecoder

from espnet_mega_bias import MEGABiasDecoder

VOCAB = 500

# conf/train_librispeech_100_mega_bias.yaml
LARGE = {
    "block_size": 256,
    "linear_size": 2048,
    "qk_size": 128,
    "v_size": 1024,
    "num_heads": 4,
    "num_blocks": 6,
    "rel_pos_bias_type": "rotary",
    "max_positions": 2048,
}
# conf/train_mini_an4_mega_bias.yaml; also what --smoke takes
SMALL = LARGE | {
    "block_size": 64,
    "linear_size": 128,
    "qk_size": 32,
    "v_size": 64,
    "num_blocks": 2,
}

Row = dict[str, float]


def arguments(description: str) -> argparse.ArgumentParser:
    """Make a parser with the options that every benchmark has.

    Args:
        description: Docstring of the script.

    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny inputs, one round")
    parser.add_argument("--json", type=Path, help="write the figures there too")

    return parser


def start(args: argparse.Namespace) -> None:
    """Set threads and seed, and print the machine line."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(machine(args.device), flush=True)


def machine(device: str) -> str:
    """Name processor, torch, threads and commit.

    Args:
        device: Device that is timed.

    """
    if device.startswith("cuda"):
        processor = torch.cuda.get_device_name(device)
    else:
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        names = [line.split(":")[1].strip() for line in lines if "model name" in line]
        processor = names[0] if names else platform.processor() or platform.machine()

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()

    return (
        f"{processor}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"commit {commit or 'unknown'}"
    )


def interleave(
    calls: dict[str, Callable[[], object]], repeat: int, device: str = "cpu"
) -> Row:
    """Time calls in turn.

    Args:
        calls: By name, what to time.
        repeat: Number of rounds.
        device: Device to wait for.

    Returns:
        : Median of each, in milliseconds.

    """
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    times = {name: [] for name in calls}

    for call in calls.values():
        call()

    for _ in range(repeat):
        for name, call in calls.items():
            wait()
            begin = time.perf_counter()
            call()
            wait()
            times[name].append(1e3 * (time.perf_counter() - begin))

    return {name: statistics.median(values) for name, values in times.items()}


def check(actual: torch.Tensor, expected: torch.Tensor, share: float = 1e-4) -> None:
    """Check that both agree before they are timed.

    Args:
        actual: Our result.
        expected: ESPnet's.
        share: Largest difference, as a share of the maximum.

    """
    difference = (actual - expected).abs().max() / expected.abs().max()

    if not difference < share:
        raise SystemExit(f"no parity on the input to be timed: {difference:.1e}")


def report(args: argparse.Namespace, rows: Iterable[tuple[str, Row]]) -> None:
    """Print rows as they come, and write them to `--json`.

    Args:
        args: Arguments of the script.
        rows: By work, the time (or size) of ESPnet, ours and the floor.

    """
    print("| work | ESPnet | ours | floor | ESPnet / ours | ours / floor |")
    print("|---|---|---|---|---|---|")
    done = {}

    for name, row in rows:
        done[name] = row
        cells = [f"{row[column]:.2f}" for column in ("espnet", "ours", "floor")]
        print(
            f"| {name} | {' | '.join(cells)} | {row['espnet'] / row['ours']:.2f} | "
            f"{row['ours'] / row['floor']:.2f} |",
            flush=True,
        )

    if args.json:
        args.json.write_text(
            json.dumps({"machine": machine(args.device), "rows": done}, indent=1)
        )


def decoders(
    conf: dict[str, object], device: str = "cpu"
) -> tuple[MEGADecoder, MEGABiasDecoder]:
    """Build ESPnet's decoder and ours with the same weights.

    Args:
        conf: Configuration.
        device: Device.

    """
    theirs = MEGADecoder(VOCAB, **conf).eval()
    ours = MEGABiasDecoder(VOCAB, **conf).eval()
    theirs.load_state_dict(ours.state_dict())

    for decoder in (theirs, ours):
        decoder.to(device).set_device(torch.device(device))

    return theirs, ours


class LinearLayers(torch.nn.Module):
    """The linear layers of a decoder, and nothing between them.

    Args:
        decoder: Decoder whose layers to use.

    """

    def __init__(self, decoder: MEGABiasDecoder) -> None:
        super().__init__()
        self.blocks = decoder.mega_blocks

    def forward(
        self, x: torch.Tensor, cached: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Pass through them.

        Args:
            x: Inputs. (..., D)
            cached: Keys and values of each block, to be read once. [N x (L, S + V)]

        """
        for n, (mega, ffn) in enumerate(self.blocks):
            value = mega.proj_v(x)
            mixed = mega.proj_mx(x)

            if cached is not None:
                keys, values = cached[n].split([mega.qk_size, mega.v_size], dim=-1)
                value = value + mixed[..., : mega.qk_size] @ keys.t() @ values

            x = mega.proj_h(value) + mixed[..., -mega.size :]
            x = ffn.linear2(ffn.linear1(x))

        return x
