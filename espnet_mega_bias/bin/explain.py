"""`espnet-mega-bias explain`: what a training configuration costs."""

import argparse
import textwrap
from dataclasses import replace
from pathlib import Path

from espnet_mega_bias.tools.error import ToolError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    parser.add_argument(
        "config",
        type=Path,
        metavar="CONFIG",
        help="YAML of a training with decoder mega_bias or mega: ESPnet2's, ESPnet3's "
        "training.yaml, or the config.yaml that a training wrote",
    )
    parser.add_argument(
        "--token_list",
        metavar="FILE",
        help="tokens, one in a line, for the size of the embedding (default: as the "
        "configuration says)",
    )
    parser.add_argument(
        "--token_type",
        help="what divides texts: char, bpe, word, phn, ... (default: as the "
        "configuration says)",
    )
    parser.add_argument(
        "--bpemodel",
        metavar="FILE",
        help="SentencePiece model for --token_type bpe (default: as the configuration "
        "says)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="training texts, an utterance in each line after its name: the longest is "
        "compared with max_positions, words (between spaces) with chunk_size",
    )
    parser.add_argument(
        "--training_labels",
        type=int,
        nargs="+",
        action="extend",
        default=[],
        metavar="N",
        help="number of labels of the longest training text, without the blank in "
        "front, where it is known without the text",
    )
    parser.add_argument(
        "--no-measure",
        action="store_true",
        help="do not time the decoder on this machine (saves some seconds)",
    )
    parser.epilog = textwrap.dedent("""\
        examples:
          espnet-mega-bias explain conf/train_mini_an4_mega_bias.yaml
          espnet-mega-bias explain exp/asr_train/config.yaml --text data/train/text
          espnet-mega-bias explain conf/train.yaml --training_labels 240 --no-measure

        exit status: 0, with warnings too; 1 where the configuration cannot be read or
        a value is refused""")


def run(args: argparse.Namespace) -> int:
    """Print what the configuration costs, and the warnings.

    Args:
        args: Arguments.

    Returns:
        : 0.

    """
    from espnet_mega_bias.tools import training_config
    from espnet_mega_bias.tools.explain import explain
    from espnet_mega_bias.tools.label_lengths import LabelLengths, measure
    from espnet_mega_bias.tools.labels import tokenizer_of

    for count in args.training_labels:
        if count < 1:
            raise ToolError(f"--training_labels must be at least 1, got {count}")

    config = training_config.read(
        args.config,
        token_list=args.token_list,
        token_type=args.token_type,
        bpemodel=args.bpemodel,
    )

    if args.text and not config.config.get("token_type"):
        raise ToolError(
            f"{args.config} has no token_type to divide --text with: give it by "
            "--token_type, and with bpe the model by --bpemodel"
        )

    lengths = measure(args.text, tokenizer_of(config)) if args.text else None

    if args.training_labels:
        longest = max(args.training_labels)
        where = "the longest training text"

        if lengths is None:
            lengths = LabelLengths(longest, where, {})
        elif lengths.longest < longest:
            lengths = replace(lengths, longest=longest, where=where)

    for line in explain(config, lengths, not args.no_measure):
        print(line, flush=True)

    return 0
