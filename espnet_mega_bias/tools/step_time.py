"""How long one label of the search takes on this machine."""

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from espnet_mega_bias import MEGABiasDecoder

# A median takes at least so many labels, and more while there is time.
_FEWEST, _MOST = 3, 31
_SECONDS = 0.5


def machine() -> str:
    """Name processor, threads and torch."""
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    processor = names[0] if names else platform.processor() or platform.machine()
    threads = torch.get_num_threads()

    return (
        f"{processor}, {threads} {'thread' if threads == 1 else 'threads'}, "
        f"torch {torch.__version__}"
    )


def milliseconds(decoder: "torch.nn.Module", length: int) -> float:
    """Time one label of one hypothesis, as the search scores it.

    The hypothesis is made up: what it costs depends on its length alone.

    Args:
        decoder: MEGADecoder or MEGABiasDecoder, in evaluation mode, on the CPU.
        length: Number of positions U, that of the label included; at most as many as
            attention reaches.

    Returns:
        : Median, in milliseconds.

    """
    import torch

    from espnet_mega_bias import MEGABiasDecoder

    ours = isinstance(decoder, MEGABiasDecoder)

    with torch.no_grad():
        prepare = (_prepared if ours else _prepared_mega)(decoder, length)
        times = []
        decoder.score(*prepare())
        started = time.perf_counter()

        while len(times) < _FEWEST or (
            len(times) < _MOST and time.perf_counter() - started < _SECONDS
        ):
            arguments = prepare()
            begin = time.perf_counter()
            decoder.score(*arguments)
            times.append(time.perf_counter() - begin)

    return 1e3 * statistics.median(times)


def _prepared(decoder: "MEGABiasDecoder", length: int) -> Callable[[], tuple]:
    """Make up a hypothesis of mega_bias.

    Args:
        decoder: Decoder.
        length: Number of positions U.

    Returns:
        : Function that gives the arguments of `score`, as if for the first time.

    """
    import torch

    from espnet_mega_bias.decoder_state import DecoderState
    from espnet_mega_bias.key_value_cache import new_cache

    before = length - 1
    mega, _ = decoder.mega_blocks[0]
    empty = decoder.embed.weight.new_empty(
        len(decoder.mega_blocks), 0, mega.qk_size + mega.v_size
    )
    cache = new_cache(empty, length)
    cache.buffer.normal_()

    reach = decoder.mega_blocks[0][0].multihead_damped_ema.truncation_length
    ema_state = decoder.init_state().ema_state

    if reach is not None:
        ema_state = torch.zeros(
            ema_state.size(0), min(before, reach - 1), ema_state.size(-1)
        )

    positions = torch.arange(before)
    history = ((positions, positions),) if before else ()
    labels = [_label(decoder)] * length

    def prepare() -> tuple[list[int], DecoderState]:
        # What was scored before gets out of the way; another state is another key.
        cache.used = before
        return labels, DecoderState(ema_state, before, cache, history)

    return prepare


def _prepared_mega(decoder: "torch.nn.Module", length: int) -> Callable[[], tuple]:
    """Make up a hypothesis of ESPnet's mega; see `_prepared`."""
    import torch

    # Its own key of zeros comes first, whatever the chunk.
    before = min(length, decoder.chunk_size - 1) if decoder.chunk_size > 0 else length
    before = max(before, 1)
    states = [
        {
            **state,
            "prev_key": torch.randn(1, before, decoder.mega_att_k_size),
            "prev_value": torch.randn(1, before, decoder.mega_att_v_size),
        }
        for state in decoder.init_state()
    ]
    labels = [_label(decoder)] * length

    def prepare() -> tuple[list[int], list[dict[str, torch.Tensor]]]:
        decoder.score_cache.clear()
        return labels, states

    return prepare


def _label(decoder: "torch.nn.Module") -> int:
    """Choose a label that is no padding."""
    return 1 if decoder.pad_idx == 0 else 0
