"""Outputs that come into being whole, or not at all, and replace nothing."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from espnet_mega_bias.tools.error import ToolError


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`, renamed to `path` when all went well.

    Args:
        path: File to be made; its folder is made too.

    Yields:
        : Name to write to, with the ending of `path`.

    Raises:
        ToolError: If `path` exists, a directory included, or no space is left for it.

    """
    if path.is_dir():
        raise ToolError(f"{path} is a directory")

    check_is_free(path)
    partial = path.with_name(f".partial.{path.name}")

    with _named_where_full(path):
        path.parent.mkdir(parents=True, exist_ok=True)

        try:
            yield partial
            check_is_free(path)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Give a temporary directory beside `path`, renamed when all went well.

    Args:
        path: Directory to be made, or an empty one.

    Yields:
        : Directory to write to.

    Raises:
        ToolError: If `path` exists and is not an empty directory, or no space is
            left for it.

    """
    check_is_free(path)
    path = Path(os.path.abspath(path))  # with a name, even where it ends in ".."
    partial = path.with_name(f".partial.{path.name}")

    with _named_where_full(path):
        shutil.rmtree(partial, ignore_errors=True)

        try:
            partial.mkdir(parents=True)
            yield partial
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def check_is_free(path: Path) -> None:
    """Check that something new can get the name `path`.

    Raises:
        ToolError: If it exists and is not an empty directory, or is the current one.

    """
    if path.is_dir() and not path.is_symlink():
        if any(path.iterdir()):
            raise ToolError(f"{path} exists, and is not empty")

        # What gets its name would leave the user's shell in a directory without one.
        if path.samefile(os.curdir):
            raise ToolError(f"{path} is the current directory; name a new one in it")
    elif path.exists() or path.is_symlink():
        raise ToolError(f"{path} exists, and is not overwritten")


@contextlib.contextmanager
def _named_where_full(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ToolError(f"no space left on the device to write {path}") from exc
        raise
