"""Search through a long stream, and say as JSON what memory and labels it took.

Usage: python long_stream.py LABELS
"""

import json
import sys
import time

import torch
from searching import (
    OneLabelAFrame,
    frame_numbers,
    labels_and_scores,
    make_search,
    small_decoder,
)

from espnet_mega_bias import decoder as decoder_module

BEAM = 2
CHUNK = 100
COMPARED = 300


def resident_mebibytes(key):
    """Resident memory of this process: VmRSS now, VmHWM at most so far."""
    with open("/proc/self/status") as lines:
        fields = dict(line.split(":", 1) for line in lines)

    # getrusage() would count the process that started this one.
    return int(fields[key].split()[0]) / 1024


@torch.no_grad()
def main(count):
    torch.manual_seed(0)
    decoder = small_decoder(
        20,
        block_size=64,
        linear_size=128,
        qk_size=32,
        v_size=64,
        max_positions=None,
    )

    for parameter in decoder.parameters():
        parameter.normal_()

    decoder.embed.weight[decoder.pad_idx] = 0.0
    joint = OneLabelAFrame(decoder.double().eval())
    search = make_search(decoder, joint, "default", BEAM, streaming=True)

    start = time.monotonic()
    after = {}

    for first in range(0, count, CHUNK):
        hyps = search(frame_numbers(first, first + CHUNK), is_final=False)
        after[first + CHUNK] = sorted(hyps, key=lambda hyp: -hyp.score)

        if first == 0:
            before = resident_mebibytes("VmRSS")

    peak = resident_mebibytes("VmHWM")
    seconds = time.monotonic() - start

    best = after[count][0]
    out, _ = decoder.score(best.yseq, best.dec_state)

    search.reset_cache()
    decoder_module.SCORE_CACHE_SIZE = 1_000_000
    large = search(frame_numbers(0, COMPARED), is_final=False)

    print(
        json.dumps(
            {
                "seconds": seconds,
                "mebibytes": peak - before,
                "labels": best.yseq,
                "out": out[0].tolist(),
                "full_pass": decoder(torch.tensor([best.yseq]))[0, -1].tolist(),
                "nbest": labels_and_scores(after[COMPARED])[0],
                "nbest_with_a_large_cache": labels_and_scores(
                    sorted(large, key=lambda hyp: -hyp.score)
                )[0],
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
