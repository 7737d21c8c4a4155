"""Draw the relative position bias that a trained MEGA decoder has learnt."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "local"))
from corpus import CorpusError, replacing

LONGEST = 64


def learnt_biases(train_config: Path, model_file: Path, length: int = LONGEST) -> list:
    """Return the bias matrix of each MEGA block.

    Args:
        train_config: The config.yaml that ESPnet's training wrote.
        model_file: The model's parameters.
        length: Number of positions L, if the decoder has as many.

    Returns:
        One (L, L) array per block; [i, j] is what query i adds for key j.
    """
    import torch

    remarks = io.StringIO()  # of ESPnet's imports, on extras that are missing
    with contextlib.redirect_stdout(remarks), contextlib.redirect_stderr(remarks):
        from espnet2.tasks.asr_transducer import ASRTransducerTask

    model, _ = ASRTransducerTask.build_model_from_file(train_config, model_file, "cpu")
    biases = [mega.rel_pos_bias for mega, _ in model.decoder.mega_blocks]
    limits = [bias.max_positions for bias in biases if bias.max_positions is not None]
    length = min([length, *limits])
    with torch.no_grad():
        return [bias(length).numpy() for bias in biases]


def draw(biases: list, output: Path) -> None:
    """Draw bias against offset for each block, beside the matrix of block 1.

    Args:
        biases: One (L, L) array per block.
        output: The PNG file to be written.

    Raises:
        CorpusError: If no space is left for `output`.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    length = len(biases[0])
    offsets = np.arange(1 - length, length)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for number, bias in enumerate(biases, 1):
        # the last row has the offsets 1 - L .. 0, the first one 0 .. L - 1
        values = np.concatenate([bias[-1], bias[0, 1:]])
        left.plot(offsets, values, label=f"block {number}", linewidth=1.2)
    left.axvspan(0.5, length - 1, color="0.92", label="masked (key after query)")
    left.axhline(0, color="0.6", linewidth=0.6)
    left.set_xlim(1 - length, length - 1)
    left.set_xlabel("offset (key - query)")
    left.set_ylabel("bias added to the attention score")
    left.set_title("Learnt relative position bias")
    left.legend(fontsize="small")
    image = right.imshow(biases[0], cmap="coolwarm", interpolation="nearest")
    limit = float(np.abs(biases[0]).max()) or 1.0
    image.set_clim(-limit, limit)
    right.set_xlabel("key position j")
    right.set_ylabel("query position i")
    right.set_title(f"Block 1, {length} x {length}")
    figure.colorbar(image, ax=right, label="bias")
    with replacing(output) as partial:
        figure.savefig(partial, format="png", dpi=120)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train_config", type=Path, required=True)
    parser.add_argument("--model_file", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    try:
        draw(learnt_biases(args.train_config, args.model_file), args.output)
    except (CorpusError, OSError) as exc:
        print(f"plot_bias.py: error: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
