"""Features as an input of a model: a kind that ESPnet3 does not have by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from espnet3.contract import Field, Kind, register_kind


class Features(Kind):
    """Features of one utterance, of shape (frames, size).

    Its option `size` in ``contract.inputs`` is their number in a frame.
    """

    option_names = Kind.option_names | {"size"}

    def check_configured(
        self,
        value: Any,
        field: Field,
        model: Any,
        options: Mapping[str, Any],
        *,
        output: bool,
    ) -> np.ndarray:
        """Check shape and size.

        Raises:
            TypeError: If the value is no array of frames of that size.
        """
        features = self.check(value, field, model, output=output)
        size = options.get("size")
        if size is not None and features.shape[1] != size:
            raise TypeError(
                f"{field.name!r} must have {size} features in a frame, got an array of "
                f"shape {features.shape}"
            )
        return features

    def check(
        self, value: Any, field: Field, model: Any, *, output: bool
    ) -> np.ndarray:
        """Check the shape.

        Raises:
            TypeError: If the value is no array with two axes.
        """
        if not isinstance(value, np.ndarray) or value.ndim != 2:
            raise TypeError(
                f"{field.name!r} must be an array of shape (frames, size), got "
                f"{getattr(value, 'shape', type(value).__name__)}"
            )
        return value.astype(np.float32, copy=False)


register_kind("features", Features(), replace=True)
