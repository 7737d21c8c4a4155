"""Memory: that of a process, and that of objects, tensors counted by their storage."""

from __future__ import annotations

import os
import sys
import types
import weakref
from pathlib import Path

STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return the resident memory of this process (Linux)."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def footprint(*roots: object, without: object = None) -> int:
    """Count the bytes of all that can be reached from objects, each thing once.

    Args:
        roots: Lists, dictionaries, tensors, objects with attributes.
        without: A module whose parameters and buffers do not count.

    Returns:
        Bytes of Python objects and of tensors' storages.
    """
    import torch

    storages = set()
    if without is not None:
        for tensor in (*without.parameters(), *without.buffers()):
            storages.add(tensor.untyped_storage().data_ptr())
    total, seen, left = 0, set(), list(roots)
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(
            value,
            (torch.nn.Module, type, types.ModuleType, types.FunctionType, weakref.ref),
        ):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in storages:
                storages.add(storage.data_ptr())
                total += storage.nbytes()
            continue
        total += sys.getsizeof(value)
        if isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            left += value
        elif hasattr(value, "__dict__"):
            left.append(vars(value))
    return total
