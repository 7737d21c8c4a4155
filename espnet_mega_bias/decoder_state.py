"""State of one hypothesis."""

import torch

from espnet_mega_bias.key_value_cache import KeyValueCache

# Rows in the cache and positions, in parts that follow one another, older ones first.
History = tuple[tuple[torch.Tensor, torch.Tensor], ...]


class DecoderState:
    """What the decoder has to know about the labels of one hypothesis.

    Seen from outside it never changes: hypotheses may share it, and go on from it any
    number of times.

    Args:
        ema_state: EMA state of each block, see `MultiHeadDampedEMA.init_state`.
            (N, ...)
        length: Number of labels seen, the blank in front included.
        cache: Keys and values of the labels that may be attended to (None = no such
            labels).
        history: Their rows in the cache and their positions. [2 x (L_n,)], int64
        first: Position from which on labels are held.

    """

    def __init__(
        self,
        ema_state: torch.Tensor,
        length: int = 0,
        cache: KeyValueCache | None = None,
        history: History = (),
        first: int = 0,
    ) -> None:
        """Construct a DecoderState object."""
        self.ema_state = ema_state
        self.length = length
        self.cache = cache
        self.first = first

        self._history = history

    def history_from(self, first: int) -> History:
        """Look up the labels that may still be attended to.

        Args:
            first: Position of the first one, not below `self.first`.

        Returns:
            : Their rows and positions, in one part, or none where there are none.

        """
        if first >= self.length:
            return ()

        # Most states are dropped by the search, so the parts are joined only here.
        if len(self._history) > 1:
            rows, positions = zip(*self._history, strict=True)
            self._history = ((torch.cat(rows), torch.cat(positions)),)

        if first == self.first:
            return self._history

        return tuple(
            (rows[positions >= first], positions[positions >= first])
            for rows, positions in self._history
        )

    def move(self, cache: KeyValueCache, history: History, first: int) -> None:
        """Note where else the keys and values are that may still be attended to.

        Args:
            cache: Cache.
            history: Rows there, and positions.
            first: Position from which on labels may be attended to.

        """
        self.cache = cache
        self.first = first

        self._history = history
