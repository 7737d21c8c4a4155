"""Transducer loss of one item, as a sum over all its alignments."""

from itertools import combinations

import torch


def transducer_loss(
    logits: torch.Tensor, labels: list[int], blank: int
) -> torch.Tensor:
    """Minus the log of the summed probability of every alignment.

    logits (T, U + 1, V) of exactly the item's size. An alignment orders T blanks and
    the U labels, and ends on a blank.
    """
    frames, count = logits.size(0), len(labels)
    total = []

    for places in combinations(range(frames - 1 + count), count):
        t = u = 0
        logp = logits.new_zeros(())

        for step in range(frames + count):
            row = logits[t, u] - torch.logsumexp(logits[t, u], dim=0)

            if step in places:
                logp = logp + row[labels[u]]
                u += 1
            else:
                logp = logp + row[blank]
                t += 1

        total.append(logp)

    return -torch.logsumexp(torch.stack(total), dim=0)
