"""The command `espnet-mega-bias`: its sub-commands, and how they end."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from espnet_mega_bias import __version__
from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.quiet import quiet_logs

# Sub-command: what it does.  Each is a module of this package, which is imported only
# when it is asked for, with `add_arguments(parser)` and `run(args) -> exit status`.
COMMANDS = {
    "doctor": "check the installation; each problem comes with the line that mends it",
    "plot": "draw the bias, the EMA kernels and the attention that a model has learnt",
    "convert": "change a model from mega to mega_bias or back, or from fairseq's MEGA",
    "export": "write encoder, decoder step and joint network as ONNX files",
    "explain": "tell what a training configuration costs, and what in it hurts",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command.

    Args:
        argv: Arguments, else those of the process.

    Returns:
        : Exit status: 0 where all went well, 1 after an error, which is printed in
            one line, 2 where the arguments are wrong, 130 where it was interrupted.

    """
    argv = sys.argv[1:] if argv is None else list(argv)
    # One parser is filled in: that of the sub-command that is named, else none.
    named = next((argument for argument in argv if argument in COMMANDS), None)
    args = _parser(named).parse_args(argv)

    try:
        # Those of torch and ESPnet are no business of the user's.
        with quiet_logs():
            status = _module(args.command).run(args)
        sys.stdout.flush()
    except (ToolError, OSError) as exc:
        if isinstance(exc, BrokenPipeError):
            # What reads the output has seen enough; nothing is left to be flushed.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1

        message = " ".join(str(exc).split())
        print(f"espnet-mega-bias {args.command}: error: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"espnet-mega-bias {args.command}: interrupted", file=sys.stderr)
        return 130

    return status


def _parser(named: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="espnet-mega-bias",
        description="Tools around the mega_bias decoder for ESPnet's transducer.",
        epilog="espnet-mega-bias COMMAND --help tells more about one of them.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    for name, summary in COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

        if name == named:
            _module(name).add_arguments(subparser)

    return parser


def _module(name: str):
    return importlib.import_module(f"espnet_mega_bias.bin.{name}")
