"""espnet-mega-bias convert: a model from one decoder to the other."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from espnet_mega_bias.tools import fairseq_mega
from espnet_mega_bias.tools.convert import DECODERS, Conversion, convert

if TYPE_CHECKING:
    from espnet_mega_bias.tools.comparison import Comparison

_EPILOG = """
With --to, OUTPUT_DIR gets config.yaml with the other decoder's name, and the checkpoint
byte for byte: ESPnet's tools take them as they took the old ones. Both decoders are run
first, and nothing is written where they differ though they must not.

With --from-fairseq, OUTPUT_DIR gets the weights of the blocks and a YAML with the keys
that a training needs to start from them (--init_param). What cannot be converted is
said by name; docs/convert.md has the formulas.

examples:
  espnet-mega-bias convert exp/mega exp/mega_bias --to mega_bias
  espnet-mega-bias convert exp/train/12epoch.pth exp/as_mega --to mega
  espnet-mega-bias convert checkpoint_best.pt blocks --from-fairseq
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=Path,
        help="checkpoint (.pth, or Lightning's .ckpt) or experiment folder of ESPnet2 "
        "or ESPnet3; with --from-fairseq, a checkpoint of facebookresearch/mega",
    )
    parser.add_argument(
        "output",
        metavar="OUTPUT_DIR",
        type=Path,
        help="directory to be made, or an empty one",
    )
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument(
        "--to", choices=DECODERS, help="decoder that MODEL is to be decoded with"
    )
    kind.add_argument(
        "--from-fairseq",
        action="store_true",
        help="take the decoder's blocks out of a model of facebookresearch/mega",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="configuration that the training of MODEL wrote (default: the config.yaml "
        "beside the checkpoint); with --from-fairseq, a YAML file of fairseq's options "
        "(default: those in the checkpoint)",
    )


def run(args: argparse.Namespace) -> int:
    """Convert, and say what was written and how the decoders differ."""
    if args.from_fairseq:
        blocks = fairseq_mega.convert_file(args.model, args.output, args.config)
        lines = _fairseq_lines(args.output, blocks)
    else:
        lines = _lines(convert(args.model, args.output, args.to, args.config))

    print("\n".join(lines))
    return 0


def _lines(conversion: Conversion) -> Iterator[str]:
    config = conversion.source.config
    comparison = conversion.comparison
    lengths = ", ".join(str(length) for length in comparison.lengths)

    yield f"{conversion.checkpoint}: {conversion.source.checkpoint}, byte for byte"
    yield (
        f"{conversion.config_file}: {conversion.source.config_file}, with decoder: "
        f"{next(name for name in DECODERS if name != config['decoder'])}"
    )

    for file in conversion.files:
        key = ".".join(file.key)

        if file.path is None:
            yield (
                f"  {key}: {file.name} is left as it is, but found neither from here "
                "nor from a folder above the configuration; ESPnet looks for it from "
                "where it is started"
            )
        elif file.path == file.name:
            yield (
                f"  {key}: {file.name} is left as it is; ESPnet finds it where it is "
                "started from here, as before"
            )
        else:
            yield f"  {key}: {file.name} is not found from here; now {file.path}"

    yield ""
    yield (
        f"{' and '.join(DECODERS)} with these weights, over {len(comparison.lengths)} "
        f"label sequences of {lengths} positions (seed 0); largest difference, as a "
        "share of the largest output:"
    )
    yield from _differences(comparison, config.get("decoder_conf") or {})


def _differences(comparison: "Comparison", decoder_conf: dict) -> Iterator[str]:
    from espnet_mega_bias.tools.comparison import TOLERANCE

    reasons = ["starts with a key and a value of zeros"]
    if decoder_conf.get("chunk_size", -1) > 0:
        reasons.append("takes a key of a chunk into the next")
    if decoder_conf.get("truncation_length") is not None:
        reasons.append("does not truncate the EMA")

    rounding = "ESPnet's FFT rounds; what of it meets the blank's zero embedding grows"

    yield (
        f"  full pass, without the blank   {comparison.full:.1e}  one function: up to "
        f"{TOLERANCE:.0e} is rounding ({comparison.full_float64:.1e} in float64)"
    )
    yield f"  full pass, at the blank        {comparison.blank:.1e}  {rounding}"

    if comparison.after_blank is not None:
        yield (
            f"  full pass, after the blank     {comparison.after_blank:.1e}  what of "
            "that reaches later positions"
        )

    if isinstance(comparison.search, str):
        yield f"  search, label by label         none     ESPnet's: {comparison.search}"
    else:
        yield (
            f"  search, label by label         {comparison.search:.1e}  ESPnet's "
            f"{', '.join(reasons)}"
        )

    yield "why, and what it means for decoding: docs/differences.md"


def _fairseq_lines(output: Path, blocks: fairseq_mega.Blocks) -> Iterator[str]:
    conf = blocks.decoder_conf

    yield (
        f"{output / fairseq_mega.WEIGHTS}: {conf['num_blocks']} blocks of size "
        f"{conf['block_size']}"
    )
    yield (
        f"{output / fairseq_mega.SNIPPET}: decoder, decoder_conf and init_param, for "
        "the configuration of a training"
    )
    yield (
        "or, with decoder and decoder_conf as there: "
        f"--init_param {fairseq_mega.init_param(output)}"
    )
    yield (
        "The embedding, the norm after the last block, the encoder and the joint "
        "network start as they are drawn."
    )
