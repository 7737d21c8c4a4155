"""Digit strings, put together from single recordings of one speaker."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from corpus import SAMPLE_RATE, Recording
from spectrum import shape

# 500 digits in all, as a speaker has
LENGTHS = 15 * (3, 4, 5, 6, 7, 8) + (5,)
SINGLE = 500 * (1,)
PAUSE = (0.05, 0.6)  # seconds between two digits
MARGIN = (0.1, 0.4)  # seconds before the first and after the last
PEAK = 0.5
FADE = SAMPLE_RATE // 200
FRAME = SAMPLE_RATE // 50


def draw_strings(
    recordings: Sequence[Recording], lengths: Sequence[int], rng: np.random.Generator
) -> list[list[Recording]]:
    """Divide a speaker's 500 recordings at random; each is in one string.

    The number of strings of each length does not depend on chance, as the length of a
    training's schedule depends on it.

    Args:
        recordings: The speaker's.
        lengths: `LENGTHS` or `SINGLE`: digits of each string, in any order.
        rng: Draws the order of the recordings and of the lengths.
    """
    order = rng.permutation(len(recordings))
    ends = np.cumsum(rng.permutation(lengths))
    return [
        [recordings[index] for index in part] for part in np.split(order, ends[:-1])
    ]


def room_noise(
    pieces: Sequence[np.ndarray], size: int, rng: np.random.Generator
) -> np.ndarray:
    """Make noise that is as loud, and has the spectrum, as the quietest of some audio.

    Args:
        pieces: The audio; the quietest tenth of its frames of 20 ms is taken.
        size: Samples of noise.
        rng: Where the noise comes from.

    Returns:
        float64 of shape (size,).
    """
    window = np.hanning(FRAME)
    frames = np.concatenate(
        [
            np.lib.stride_tricks.sliding_window_view(piece, FRAME)[:: FRAME // 2]
            for piece in pieces
        ]
    )
    power = np.mean(frames**2, axis=1)
    quiet = frames[np.argsort(power)[: max(1, len(power) // 10)]]
    density = np.mean(np.abs(np.fft.rfft(quiet * window)) ** 2, axis=0)
    gain = np.sqrt(density / np.sum(window**2))
    places = np.linspace(0, 1, len(gain))
    return shape(
        rng.standard_normal(size),
        lambda frequencies: np.interp(frequencies, places, gain),
    )


def join(pieces: Sequence[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Put recordings one after the other, with noise of their room in the pauses.

    Args:
        pieces: What is said.
        rng: Draws the pauses and the noise.

    Returns:
        float64 of shape (samples,).
    """
    ranges = [MARGIN, *[PAUSE] * (len(pieces) - 1), MARGIN]
    pauses = [round(rng.uniform(*limits) * SAMPLE_RATE) for limits in ranges]
    size = sum(pauses) + sum(map(len, pieces))
    speech, share = np.zeros(size), np.zeros(size)
    start = 0
    for pause, piece in zip(pauses, pieces, strict=False):
        start += pause
        ramp = np.arange(1, len(piece) + 1) / FADE
        place = slice(start, start + len(piece))
        speech[place] = piece
        share[place] = np.minimum(1, np.minimum(ramp, ramp[::-1]))
        start += len(piece)
    return share * speech + (1 - share) * room_noise(pieces, size, rng)


def level(samples: np.ndarray) -> np.ndarray:
    """Bring audio to the peak that all strings have, as a gain control does.

    The speakers' recordings differ by 30 dB, which says something of their equipment
    and nothing of the digits.
    """
    return samples * PEAK / np.max(np.abs(samples))
