"""Keys and values of the labels that a search has scored."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

# Rows that a new cache has free, beside as many as it is filled with.
_FREE_ROWS = 32


class KeyValueCache:
    """Keys and values, shared by all hypotheses that grew from one.

    Each scored label takes one row in each block, appended in the order of scoring and
    never changed. What a hypothesis attends to is a list of rows, so neither a further
    label nor a further branch copies keys and values, and all hypotheses of a beam
    read a common history once, in one matrix product: rows that belong to others are
    masked there.

    A full cache is left as it is. The rows still in use move to a successor with room,
    and later hypotheses follow them there, so that they keep sharing.

    Args:
        buffer: Rows of each block, uninitialised from `used` on. (N, C, S + V)
        used: Number of rows in use.

    """

    def __init__(self, buffer: torch.Tensor, used: int) -> None:
        """Construct a KeyValueCache object."""
        self.buffer = buffer
        self.used = used

        # Weak, or what an early state holds would keep all caches after it alive.
        self._successor: weakref.ref[KeyValueCache] | None = None
        self._places: torch.Tensor | None = None  # in the successor, -1: not moved

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the successor: others follow there, a copy is alone."""
        return {**self.__dict__, "_successor": None, "_places": None}

    def has_room(self, count: int) -> bool:
        """Say whether rows can be appended in place.

        Args:
            count: Number of rows.

        """
        return (
            self._living_successor() is None
            and self.used + count <= self.buffer.size(1)
            # Autograd may still need the rows as they are.
            and not torch.is_grad_enabled()
            and (not self.buffer.is_inference() or torch.is_inference_mode_enabled())
        )

    def follow(
        self, rows: torch.Tensor, count: int
    ) -> tuple["KeyValueCache", torch.Tensor]:
        """Go where the rows have moved, or can be moved.

        Args:
            rows: Rows in use. (L,), int64
            count: Number of rows that are to be appended.

        Returns:
            : The last successor, or this cache.
            : Where the rows are in it. (L,), int64

        """
        cache = self

        while (successor := cache._living_successor()) is not None:
            missing = rows[cache._places[rows] < 0].unique()

            if missing.numel() > 0:
                if not successor.has_room(missing.numel() + count):
                    break

                cache._places[missing] = successor.take(cache, missing)

            cache, rows = successor, cache._places[rows]

        return cache, rows

    def move(self, rows: torch.Tensor, cache: "KeyValueCache") -> torch.Tensor:
        """Copy rows to another cache, which those who come later are to follow.

        Args:
            rows: Rows, each one once. (L,), int64
            cache: Where to.

        Returns:
            : Where each row of this cache is there; -1 for those not copied. (R,)

        """
        places = rows.new_full((self.used,), -1)
        places[rows] = cache.take(self, rows)

        if self._living_successor() is None and not torch.is_grad_enabled():
            self._successor, self._places = weakref.ref(cache), places

        return places

    def _living_successor(self) -> "KeyValueCache | None":
        return self._successor() if self._successor is not None else None

    def take(self, other: "KeyValueCache", rows: torch.Tensor) -> torch.Tensor:
        """Append rows of another cache; there must be room.

        Args:
            other: Cache to copy from.
            rows: Rows of it. (L,), int64

        Returns:
            : Where they are here. (L,), int64

        """
        first, self.used = self.used, self.used + rows.numel()

        if torch.is_grad_enabled():
            self.buffer[:, first : self.used] = other.buffer[:, rows]
        else:
            # Half the cost, but autograd can't follow.
            for ours, theirs in zip(self.buffer, other.buffer, strict=True):
                torch.index_select(theirs, 0, rows, out=ours[first : self.used])

        return torch.arange(first, self.used, device=rows.device)


def new_cache(like: torch.Tensor, count: int) -> KeyValueCache:
    """Make an empty cache.

    Args:
        like: Tensor with the blocks, features, type and device of its rows.
            (N, ..., S + V)
        count: Number of rows that it must take; there is room for more.

    Returns:
        : Cache.

    """
    capacity = count if torch.is_grad_enabled() else _FREE_ROWS + 2 * count

    return KeyValueCache(like.new_empty(like.size(0), capacity, like.size(-1)), 0)


def join(
    parts: Sequence[tuple[KeyValueCache, torch.Tensor]], count: int
) -> tuple[KeyValueCache, list[torch.Tensor]]:
    """Bring the rows of several hypotheses into one cache with room for more.

    Args:
        parts: Cache of each hypothesis, and its rows there. [B x (cache, (L_b,))]
        count: Number of rows to append.

    Returns:
        : Cache.
        : Where the rows of each hypothesis are in it. [B x (L_b,)]

    """
    if _share_room(parts, count):
        return parts[0][0], [rows for _, rows in parts]

    if not torch.is_grad_enabled():
        parts = [cache.follow(rows, count) for cache, rows in parts]

        if _share_room(parts, count):
            return parts[0][0], [rows for _, rows in parts]

    caches = {id(cache): cache for cache, _ in parts}
    used = {
        key: torch.cat([rows for cache, rows in parts if id(cache) == key]).unique()
        for key in caches
    }
    joint = new_cache(
        parts[0][0].buffer, sum(rows.numel() for rows in used.values()) + count
    )
    places = {key: cache.move(used[key], joint) for key, cache in caches.items()}

    return joint, [places[id(cache)][rows] for cache, rows in parts]


def _share_room(
    parts: Sequence[tuple[KeyValueCache, torch.Tensor]], count: int
) -> bool:
    first = parts[0][0]

    return all(cache is first for cache, _ in parts) and first.has_room(count)
