"""Write a trained model as ONNX files: `espnet-mega-bias export`."""

import argparse
from pathlib import Path

from espnet_mega_bias.tools import experiment, onnx_export

_EPILOG = """\
examples:
  espnet-mega-bias export exp/asr_train exported
  espnet-mega-bias export exp/asr_train/12epoch.pth exported --int8

then, on a machine with numpy and onnxruntime alone:
  python exported/decode.py --beam_size 5 utterance.wav
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options.

    Args:
        parser: Parser of the sub-command.

    """
    parser.epilog = _EPILOG
    parser.add_argument(
        "model",
        type=Path,
        help="experiment folder, or a checkpoint (.pth, .ckpt) with config.yaml beside",
    )
    parser.add_argument(
        "directory",
        type=Path,
        help="directory to be made: encoder.onnx, decoder_step.onnx, joint.onnx, "
        "tokens.txt, model.json, decode.py",
    )
    parser.add_argument(
        "--config", type=Path, help="config.yaml, if it is not beside the checkpoint"
    )
    parser.add_argument(
        "--int8",
        action="store_true",
        help="store the weights of matrix products as 8-bit integers: smaller files, "
        "slightly different scores (default: float32)",
    )


def run(args: argparse.Namespace) -> int:
    """Export, and tell how close the graphs come to PyTorch.

    Args:
        args: Options.

    Returns:
        : Exit status.

    """
    report = onnx_export.export(
        experiment.load(args.model, args.config), args.directory, args.int8
    )

    print("largest difference from PyTorch, as a share of the largest value:")

    for name, difference in report.differences.items():
        line = f"  {name:<12} {difference:.1e}"
        if report.int8_differences:
            line += f"   int8 {report.int8_differences[name]:.1e}"
        print(f"{line}   {report.sizes[name] / 1e6:.1f} MB")

    for remark in report.remarks:
        print(f"note: {remark}")

    print(f"try it: python {args.directory / 'decode.py'} AUDIO_OR_NPY")

    return 0
