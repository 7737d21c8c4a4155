"""README and docs/: where they are, and the code in them."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def read(name):
    """Read a page of docs/."""
    return (ROOT / "docs" / name).read_text()


def blocks(text, language):
    """Give the fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def rows(text, header):
    """Give the rows of the table whose header begins so, each one a list of cells."""
    lines = text[text.index(f"\n| {header} ") :].split("\n\n")[0].splitlines()[3:]

    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines
    ]


def run_shell(code, folder, **variables):
    """Run a block marked `sh` with the Python that runs the tests.

    Returns:
        : Its output, errors among it.

    """
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **variables,
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, f"{code}\n{done.stdout[-8000:]}"

    return done.stdout
