"""Filters with a given response."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import fft


def shape(
    samples: np.ndarray, response: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Filter audio, without a shift in time.

    Args:
        samples: The audio.
        response: Gives the gain at frequencies from 0 to 1, half the sampling rate.

    Returns:
        float64, as long as `samples`.
    """
    # a length with a large prime factor takes ten times as long
    size = fft.next_fast_len(len(samples), real=True)
    spectrum = fft.rfft(samples, size)
    gain = response(np.linspace(0, 1, len(spectrum)))
    return fft.irfft(spectrum * gain, size)[: len(samples)]
