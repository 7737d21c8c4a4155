"""`espnet-mega-bias doctor`: check the installation."""

import argparse
import textwrap

from espnet_mega_bias.tools.finding import PROBLEM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command; it takes no arguments."""
    parser.description += (
        "\n\nOne line for each check: ok; note, where something is missing that not\n"
        "everybody needs; or PROBLEM, followed by the line that mends it."
    )
    parser.epilog = textwrap.dedent("""\
        examples:
          espnet-mega-bias doctor
          espnet-mega-bias doctor && ./run.sh    # only where everything works

        exit status: 0 where everything needed works, else 1""")


def run(args: argparse.Namespace) -> int:
    """Print the findings.

    Args:
        args: Arguments.

    Returns:
        : 1 where there is a problem, else 0.

    """
    from espnet_mega_bias.tools.installation import examine

    problems = 0

    for finding in examine():
        print(f"{finding.state:8} {finding.subject:17} {finding.text}", flush=True)

        if finding.state == PROBLEM:
            problems += 1
            print(f"{'':26} {finding.mend}", flush=True)

    if problems == 0:
        print("Everything that is needed works.")
        return 0

    count = "1 problem" if problems == 1 else f"{problems} problems"
    print(f"{count}. Mend the first one, then run this again.")

    return 1
