"""Pictures of trained models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from espnet_mega_bias.tools import pictures
from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.experiment import Experiment, load
from espnet_mega_bias.tools.labels import labels_of
from espnet_mega_bias.tools.learnt import Attention, attention_weights, read_learnt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTH = 64


def plot(
    paths: Sequence[Path | str],
    output: Path,
    config: Path | str | None = None,
    length: int = LENGTH,
    text: str | None = None,
) -> None:
    """Draw what trained models have learnt, or what they attend to in a text.

    Args:
        paths: Checkpoints or experiment folders, which are compared.
        output: Picture to be made, .png or .svg.
        config: Configuration of the first model, if it isn't beside.
        length: Number of offsets and of lags that are drawn.
        text: Text whose attention weights are drawn (None = bias and EMA kernels).

    Raises:
        ToolError: If a model cannot be read, or a picture not be drawn or written.

    """
    pictures.check_picture(output)
    names = distinct_names(paths)
    configs = [config, *[None] * (len(paths) - 1)]
    experiments = {
        name: load(path, config)
        for name, path, config in zip(names, paths, configs, strict=True)
    }
    pictures.save(draw(experiments, length, text), output)


def draw(
    experiments: Mapping[str, Experiment], length: int = LENGTH, text: str | None = None
) -> "Figure":
    """Draw what trained models have learnt, or what they attend to in a text.

    Args:
        experiments: Trained models, with ESPnet's `mega` or with `mega_bias`, by name.
        length: Number of offsets and of lags that are drawn.
        text: Text whose attention weights are drawn (None = bias and EMA kernels).

    Returns:
        : Picture.

    Raises:
        ToolError: If `length` is below 1, or a model has another decoder, or the text
            is too long for it or cannot be divided into its tokens.

    """
    if length < 1:
        raise ToolError(f"the length must be at least 1, got {length}")

    if text is None:
        return pictures.draw_blocks(
            {
                name: read_learnt(experiment.build_decoder("mega_bias"), length)
                for name, experiment in experiments.items()
            }
        )

    return pictures.draw_attention(
        {name: _attention(experiment, text) for name, experiment in experiments.items()}
    )


def distinct_names(paths: Sequence[Path | str]) -> list[str]:
    """Shorten paths to the parts that tell them apart.

    Args:
        paths: Paths of models.

    Returns:
        : Names.

    Raises:
        ToolError: If a path is given twice.

    """
    parts = [Path(path).absolute().parts for path in paths]

    if len(set(parts)) < len(parts):
        raise ToolError("a model is given twice")

    if len(parts) == 1:
        return [parts[0][-1]]

    # What they all end with tells nothing.
    while len({p[-1] for p in parts}) == 1 and min(map(len, parts)) > 2:
        parts = [p[:-1] for p in parts]

    kept = 1

    while len({p[-kept:] for p in parts}) < len(parts):
        kept += 1

    return ["/".join(p[-kept:]) for p in parts]


def _attention(experiment: Experiment, text: str) -> Attention:
    labels = labels_of(experiment, text)
    decoder = experiment.build_decoder("mega_bias")

    try:
        weights = attention_weights(decoder, labels)
    except ValueError as exc:
        raise ToolError(f"{experiment.checkpoint}: {exc}") from exc

    return Attention([experiment.tokens[label] for label in labels], weights)
