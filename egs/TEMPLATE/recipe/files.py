"""Files that are written whole or not at all, and the error of the recipes."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


class RecipeError(Exception):
    """A recipe cannot go on; the message says why, in one line."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name `path` in the error when its device turns out to be full.

    Raises:
        RecipeError: If the body fails because no space is left.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RecipeError(f"no space left on the device to write {path}") from exc
        raise


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`, renamed to `path` when all went well.

    Where the body fails, the temporary file goes and `path` stays as it was.

    Raises:
        RecipeError: If no space is left for `path`.
    """
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
