"""Changes to the training strings, for voices and rooms that they do not have."""

from __future__ import annotations

import numpy as np
from scipy.signal import resample_poly
from spectrum import shape

SPEED = (80, 122)  # percent
CHANNEL_DB = (4.0, 3.0, 2.0, 1.0)  # deviations of the cosines' weights
SNR_DB = (10.0, 40.0)
NOISE_SLOPE = (0.0, 1.0)  # of the amplitude's spectrum: white to brown


def change_speed(samples: np.ndarray, percent: int) -> np.ndarray:
    """Play audio faster: pitch, formants and tempo rise together.

    That is what a shorter vocal tract does to the formants.
    """
    return resample_poly(samples, 100, percent)


def change_channel(samples: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Filter audio as another microphone would: by a smooth, random response.

    The response in dB is a sum of a few cosines over frequency, the slowest of which is
    a tilt.
    """
    weights = rng.normal(0, CHANNEL_DB)
    orders = np.pi * np.arange(1, len(CHANNEL_DB) + 1)
    return shape(
        samples,
        lambda places: 10 ** (np.cos(np.outer(places, orders)) @ weights / 20),
    )


def add_noise(samples: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Add noise of a random colour and level."""
    slope, snr = rng.uniform(*NOISE_SLOPE), rng.uniform(*SNR_DB)
    # flat below 80 Hz, or most of it would be lower than what is heard
    noise = shape(
        rng.standard_normal(len(samples)),
        lambda places: np.maximum(places, 0.02) ** -slope,
    )
    power = np.mean(samples**2) / 10 ** (snr / 10)
    return samples + noise * np.sqrt(power / np.mean(noise**2))
