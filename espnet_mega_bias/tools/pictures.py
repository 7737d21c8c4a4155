"""How what the blocks of a decoder have learnt is drawn."""

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.fonts import families_for
from espnet_mega_bias.tools.learnt import Attention, Learnt
from espnet_mega_bias.tools.output import check_is_free, new_file

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

FORMATS = (".png", ".svg")

_DOTS_PER_INCH = 200
_SCREEN_DOTS_PER_INCH = 100

_STYLE = {
    "font.size": 8,
    "axes.titlesize": "medium",
    "lines.linewidth": 1.2,
    "lines.marker": ".",  # there is nothing between two offsets
    "lines.markersize": 2.5,
}

# Models are told apart in print too.
_LINE_STYLES = ("-", "--", "-.", ":")

# Sizes in inches.
_CURVE_WIDTH, _ROW_HEIGHT, _MARGIN = 2.9, 1.8, 0.5
_TOKEN, _SMALLEST_ATTENTION, _LARGEST_ATTENTION = 0.12, 1.5, 8.0
_WIDEST = 14.0
_LETTERS_PER_INCH = 16

# Of the D features, those whose kernels the band around the median covers.
_QUANTILES = (0.1, 0.5, 0.9)
_BAND = "median, and 10 to 90 % of the features"

# Kernels fade out exponentially: what is below this share of the largest is not shown.
_SMALLEST_SHARE = 1e-4


def check_picture(path: Path) -> None:
    """Check that a picture can be written, before the work that leads to it.

    Args:
        path: File to be made.

    Raises:
        ToolError: If it exists, or ends in neither .png nor .svg, or Matplotlib is
            missing.

    """
    if path.suffix not in FORMATS:
        raise ToolError(f"{path}: a picture ends in {' or '.join(FORMATS)}")

    check_is_free(path)
    check_matplotlib()


def check_matplotlib() -> None:
    """Check that Matplotlib is there.

    Raises:
        ToolError: If it is missing.

    """
    try:
        import matplotlib.figure  # noqa: F401 (only whether it can be imported)
    except ImportError as exc:
        raise ToolError(
            "matplotlib is missing: pip install 'espnet-mega-bias[plot]'"
        ) from exc


def save(figure: "Figure", path: Path) -> None:
    """Write a picture.

    Args:
        figure: Picture.
        path: File to be made, .png or .svg.

    Raises:
        ToolError: If it exists, or no space is left for it.

    """
    with new_file(path) as partial:
        figure.savefig(partial, format=path.suffix[1:], dpi=_DOTS_PER_INCH)


def to_pixels(figure: "Figure") -> "np.ndarray":
    """Render a picture for the screen.

    Args:
        figure: Picture.

    Returns:
        : Red, green and blue. (height, width, 3), uint8

    """
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(_SCREEN_DOTS_PER_INCH)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()

    return np.array(canvas.buffer_rgba())[..., :3]


def draw_blocks(models: Mapping[str, Learnt]) -> "Figure":
    """Draw bias and EMA kernels, a row for each block.

    On the left the bias by offset and on the right the EMA kernels by lag, those of all
    models in the same axes; between them the bias of each model as a matrix, query by
    key. All panels of a kind have one scale. Matplotlib's global state stays as it is.

    Args:
        models: What each model has learnt, by a name for the legend.

    Returns:
        : Picture.

    """
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    num_blocks = max(len(learnt.bias) for learnt in models.values())
    largest = max(np.abs(b).max() for learnt in models.values() for b in learnt.bias)
    widths = [_CURVE_WIDTH, *[_ROW_HEIGHT] * len(models), _CURVE_WIDTH]
    size = (sum(widths) + 2 * _MARGIN, num_blocks * _ROW_HEIGHT + 2 * _MARGIN)

    with matplotlib.rc_context(_STYLE):
        figure = Figure(size, layout="constrained")
        axes = figure.subplots(
            num_blocks,
            len(widths),
            squeeze=False,
            sharex="col",
            sharey="col",
            width_ratios=widths,
        )
        curves, matrices, kernels = axes[:, 0], axes[:, 1:-1], axes[:, -1]
        handles, peak = [], 0.0

        for place, (name, learnt) in enumerate(models.items()):
            line = {
                "color": f"C{place}",
                "linestyle": _LINE_STYLES[place % len(_LINE_STYLES)],
            }

            for panel, bias in zip(curves, learnt.bias, strict=False):
                (handle,) = panel.plot(np.arange(1 - len(bias), 1), bias, **line)

            handles.append(handle)

            for panel, bias in zip(matrices[:, place], learnt.bias, strict=False):
                image = _draw_causal(
                    panel,
                    _toeplitz(bias),
                    cmap="RdBu_r",
                    vmin=-(largest or 1.0),
                    vmax=largest or 1.0,
                )

            for panel, kernel in zip(kernels, learnt.kernel, strict=False):
                low, median, high = np.quantile(np.abs(kernel), _QUANTILES, axis=0)
                lags = np.arange(len(median))
                peak = max(peak, high.max())
                panel.fill_between(lags, low, high, color=f"C{place}", alpha=0.2, lw=0)
                panel.plot(lags, median, **line)

            for panel in matrices[len(learnt.bias) :, place]:
                panel.set_axis_off()

            matrices[0, place].set_title(
                _wrapped(f"bias: {name}" if len(models) > 1 else "bias", _ROW_HEIGHT),
                parse_math=False,
            )
            lowest = matrices[len(learnt.bias) - 1, place]
            lowest.set_xlabel("key")
            lowest.tick_params(labelbottom=True)

        figure.colorbar(
            image, ax=matrices, aspect=12, shrink=1.0 / num_blocks, anchor=(0.0, 1.0)
        )

        curves[0].set_title("bias by offset")
        curves[0].margins(x=0.01)
        curves[-1].set_xlabel("offset (key - query)")
        kernels[0].set_title(f"EMA kernel by lag\n{_BAND}")
        kernels[0].margins(x=0.01)
        kernels[0].set_yscale("log")
        kernels[0].set_ylim(_SMALLEST_SHARE * peak, 2.0 * peak)
        kernels[-1].set_xlabel("lag (query - key)")

        for number, (curve, matrix, kernel) in enumerate(
            zip(curves, matrices[:, 0], kernels, strict=True), 1
        ):
            curve.axhline(0.0, color="0.7", linewidth=0.6, marker="", zorder=0)
            curve.set_ylabel(f"block {number}\nbias")
            matrix.set_ylabel("query")
            kernel.set_ylabel("|weight|")

        for panel in axes[0]:
            panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))

        for panel in matrices[0]:
            panel.yaxis.set_major_locator(MaxNLocator(4, integer=True))

        if len(models) > 1:
            widest = max(map(len, models)) / _LETTERS_PER_INCH + 2 * _MARGIN
            legend = figure.legend(
                handles,
                models.keys(),
                loc="outside upper center",
                ncols=min(len(models), max(1, int(size[0] / widest))),
            )

            for text in legend.get_texts():
                text.set_parse_math(False)

    return figure


def draw_attention(models: Mapping[str, Attention]) -> "Figure":
    """Draw attention weights, a panel for each block of each model.

    All panels have one scale. Matplotlib's global state stays as it is.

    Args:
        models: Attention of each model, by a name for the titles.

    Returns:
        : Picture.

    Raises:
        ToolError: If no font has a character of the tokens.

    """
    import matplotlib
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    longest = max(len(attention.tokens) for attention in models.values())
    characters = {c for a in models.values() for token in a.tokens for c in token}

    panel_of = {
        f"{name}, block {number}" if len(models) > 1 else f"block {number}": (
            weights,
            attention.tokens,
        )
        for name, attention in models.items()
        for number, weights in enumerate(attention.weights, 1)
    }

    side = min(max(_TOKEN * longest, _SMALLEST_ATTENTION), _LARGEST_ATTENTION)
    # In points, of which an inch has 72.
    letters = min(7.0, 0.85 * 72.0 * side / longest)
    columns = min(len(panel_of), max(1, int(_WIDEST / (side + 2 * _MARGIN))))
    rows = math.ceil(len(panel_of) / columns)

    # The first query has but one key: on a linear scale it alone would be seen.
    highest = max(weights.max() for weights, _ in panel_of.values())
    scale = PowerNorm(0.5, vmin=0.0, vmax=highest)

    with matplotlib.rc_context({**_STYLE, "font.family": families_for(characters)}):
        figure = Figure(
            (
                (columns * (side + 2 * _MARGIN)) + 2 * _MARGIN,
                rows * (side + 2 * _MARGIN),
            ),
            layout="compressed",
        )
        panels = figure.subplots(rows, columns, squeeze=False)

        for panel, (title, (weights, tokens)) in zip(
            panels.flat, panel_of.items(), strict=False
        ):
            image = _draw_causal(panel, weights, cmap="Blues", norm=scale)
            places = range(len(tokens))
            names = {"labels": tokens, "size": letters, "parse_math": False}
            panel.set_xticks(places, **names, rotation=90)
            panel.set_yticks(places, **names)
            panel.set_title(_wrapped(title, side + _MARGIN), parse_math=False)
            panel.set_xlabel("key")
            panel.set_ylabel("query")

        for panel in panels.flat[len(panel_of) :]:
            panel.set_axis_off()

        figure.colorbar(
            image,
            ax=panels,
            label="attention weight",
            aspect=12,
            shrink=1.0 / rows,
            anchor=(0.0, 1.0),
        )

    return figure


def _wrapped(text: str, width: float) -> str:
    """Break a text into lines of a width in inches."""
    return textwrap.fill(text, int(width * _LETTERS_PER_INCH))


def _toeplitz(bias: "np.ndarray") -> "np.ndarray":
    """Build the bias matrix of the keys that come no later than their query.

    Args:
        bias: Bias at the offsets 1 - L, ..., 0. (L,)

    Returns:
        : Bias, query by key; without meaning for later keys. (L, L)

    """
    import numpy as np

    places = np.arange(len(bias))
    offset = places - places[:, None]

    return bias[np.minimum(offset, 0) - 1]


def _draw_causal(panel: "Axes", matrix: "np.ndarray", **scale) -> "AxesImage":
    """Draw a matrix, query by key; what the causal mask hides stays grey."""
    import numpy as np

    panel.set_facecolor("0.9")
    seen = np.tri(len(matrix), dtype=bool)

    return panel.imshow(
        np.where(seen, matrix, np.nan), interpolation="nearest", **scale
    )
