"""Features from Sphinx cepstra."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from recipe.files import RecipeError

COEFFICIENTS = 13
FRAME_SECONDS = 0.01
FILTERS = 40  # mel filters that the cepstra were made of


def read_mfc(utt_id: str, path: Path) -> np.ndarray:
    """Read a Sphinx .mfc file: an int32 count of values, then float32, big-endian.

    Returns:
        Cepstra, float32 of shape (frames, 13), a frame every 10 ms.

    Raises:
        RecipeError: If the file is cut short, empty, or holds something else.
    """
    content = path.read_bytes()
    values = np.frombuffer(content[4:], dtype=">f4") if len(content) % 4 == 0 else []
    declared = int.from_bytes(content[:4], "big", signed=True)
    if len(content) < 8 or declared != len(values):
        raise RecipeError(
            f"utterance {utt_id}: {path} has {max(len(content) - 4, 0)} bytes after "
            f"its head, which declares {declared} values of 4"
        )
    if declared % COEFFICIENTS:
        raise RecipeError(
            f"utterance {utt_id}: the {declared} values of {path} are no frames of "
            f"{COEFFICIENTS}"
        )
    if not np.isfinite(values).all():
        raise RecipeError(f"utterance {utt_id}: {path} has values that are no numbers")
    return values.astype(np.float32).reshape(-1, COEFFICIENTS)


def features(cepstra: np.ndarray) -> np.ndarray:
    """Turn cepstra back into log mel energies.

    The inverse of Sphinx's cosine transform: with 13 of 40 coefficients, the spectrum
    is smooth. Next to each other are then neighbouring frequencies, as the convolutions
    of ESPnet's encoder and SpecAugment take for granted.

    Args:
        cepstra: Those of one utterance, of shape (frames, 13).

    Returns:
        float32 of shape (frames, 40).
    """
    order = np.arange(COEFFICIENTS)[:, np.newaxis]
    cosines = 2.0 * np.cos(np.pi * order * (np.arange(FILTERS) + 0.5) / FILTERS)
    cosines[0] = 1.0
    return (cepstra @ cosines).astype(np.float32)
