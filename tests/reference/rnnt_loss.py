"""Transducer loss of one item, as a sum over all its alignments."""

from collections.abc import Iterator
from itertools import combinations

import torch


def alignments(
    frames: int, labels: list[int], blank: int
) -> Iterator[list[tuple[int, int, int]]]:
    """Yield each alignment as its transitions (frame, label position, symbol).

    An alignment orders T blanks and the U labels, and ends on a blank.
    """
    count = len(labels)

    for places in combinations(range(frames - 1 + count), count):
        t = u = 0
        path = []

        for step in range(frames + count):
            if step in places:
                path.append((t, u, labels[u]))
                u += 1
            else:
                path.append((t, u, blank))
                t += 1

        yield path


def transducer_loss(
    logits: torch.Tensor, labels: list[int], blank: int
) -> torch.Tensor:
    """Minus the log of the summed probability of every alignment.

    logits (T, U + 1, V) of exactly the item's size.
    """
    logp = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    total = [
        torch.stack([logp[step] for step in path]).sum()
        for path in alignments(logits.size(0), labels, blank)
    ]

    return -torch.logsumexp(torch.stack(total), dim=0)


def fastemit_gradient(
    logits: torch.Tensor, labels: list[int], blank: int, weight: float
) -> torch.Tensor:
    """Gradient of the loss with respect to the logits, with FastEmit.

    That of a log-probability is minus the share of the alignments that use it, and
    1 + weight times as much for a label. logits and result (T, U + 1, V).
    """
    logp = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    paths = list(alignments(logits.size(0), labels, blank))
    score = torch.stack([sum(logp[step] for step in path) for path in paths])
    gradient = torch.zeros_like(logits)

    for path, share in zip(paths, score.softmax(dim=0), strict=True):
        for t, u, symbol in path:
            gradient[t, u, symbol] -= share * (1 if symbol == blank else 1 + weight)

    # Back through the log-softmax.
    return gradient - logp.exp() * gradient.sum(dim=-1, keepdim=True)
