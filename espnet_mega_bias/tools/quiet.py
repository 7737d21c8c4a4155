"""Silence for what others print and log beside what a tool has to say."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Hide what is printed, as by ESPnet when it is imported without some extras."""
    remarks = io.StringIO()

    with contextlib.redirect_stdout(remarks), contextlib.redirect_stderr(remarks):
        yield


@contextlib.contextmanager
def quiet_logs(level: int = logging.WARNING) -> Iterator[None]:
    """Hide warnings, and what is logged.

    Args:
        level: Highest level of what is hidden.

    """
    before = logging.root.manager.disable

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(level)

        try:
            yield
        finally:
            logging.disable(before)
