"""espnet-mega-bias plot: draw what a model has learnt."""

import argparse
from pathlib import Path

from espnet_mega_bias.tools.epoch_pictures import write_epochs
from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.plotting import LENGTH, plot

_EPILOG = """
The picture has a row for each block: the bias by offset (key - query; later keys are
masked), the same as a matrix, and the size of the EMA kernels by lag. With --labels it
has the attention weights of each block over that text instead, query by key.

ESPnet3 draws while it trains, with this entry in the list trainer.callbacks:
  - _target_: espnet_mega_bias.tools.training_pictures.TrainingPictures

examples:
  espnet-mega-bias plot exp/train --output bias.png
  espnet-mega-bias plot exp/train --labels "MARCH THIRD" --output attention.svg
  espnet-mega-bias plot exp/rotary --compare exp/simple exp/old/9epoch.pth \\
      --output compared.svg
  espnet-mega-bias plot exp/train --tensorboard    # during or after the training
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=Path,
        help="checkpoint (.pth, or Lightning's .ckpt) or experiment folder of ESPnet2 "
        "or ESPnet3, with decoder mega or mega_bias",
    )
    parser.add_argument(
        "--compare",
        metavar="MODEL",
        nargs="+",
        type=Path,
        default=[],
        help="more of them, drawn in the same axes",
    )
    output = parser.add_mutually_exclusive_group(required=True)
    output.add_argument(
        "--output", metavar="FILE", type=Path, help="picture to be made, .png or .svg"
    )
    output.add_argument(
        "--tensorboard",
        action="store_true",
        help="add pictures to MODEL/tensorboard/bias, MODEL being a folder of ESPnet2: "
        "one for each saved epoch that has none yet",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="configuration that the training of the first MODEL wrote (default: the "
        "config.yaml beside the checkpoint)",
    )
    parser.add_argument(
        "--length",
        metavar="L",
        type=int,
        default=LENGTH,
        help="number of offsets and of lags, in labels; a bias ends earlier where the "
        "model's does, at max_positions or chunk_size (default: %(default)s)",
    )
    parser.add_argument(
        "--labels",
        metavar="TEXT",
        help="draw the attention weights over this text, which is divided into tokens "
        "as the model's transcripts were (default: draw bias and EMA kernels)",
    )


def run(args: argparse.Namespace) -> int:
    """Draw, and tell where."""
    if not args.tensorboard:
        models = [args.model, *args.compare]
        plot(models, args.output, args.config, args.length, args.labels)
        print(args.output)
        return 0

    if args.compare or args.config:
        raise ToolError("--tensorboard goes with neither --compare nor --config")

    epochs = write_epochs(args.model, args.length, args.labels)
    print(
        f"{args.model / 'tensorboard' / 'bias'}: "
        + (f"epoch {', '.join(map(str, epochs))}" if epochs else "nothing new")
    )

    return 0
