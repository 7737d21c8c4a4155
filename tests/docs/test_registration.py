"""The commands of docs/registration.md, and the line that it shows."""

import importlib.metadata
import re

import pytest

from docs.pages import ROOT, blocks, read, run_shell
from espnet_mega_bias_autoload import HOST_MODULES, SWITCH

PAGE = read("registration.md")
COMMANDS = blocks(PAGE, "sh")


def is_installed_with_start_up_files():
    files = importlib.metadata.files("espnet-mega-bias") or []

    return any(file.name == "espnet_mega_bias.pth" for file in files)


def test_the_line_is_that_of_the_start_up_file():
    line = (ROOT / "startup" / "espnet_mega_bias.pth").read_text()

    assert line in re.sub(r"^ +", "", PAGE, flags=re.M)
    assert line in re.sub(r"^ +", "", (ROOT / "README.md").read_text(), flags=re.M)


def test_the_names_are_those_of_the_hook():
    for name in (*HOST_MODULES, SWITCH):
        assert name in PAGE


@pytest.mark.slow
@pytest.mark.skipif(
    not is_installed_with_start_up_files(), reason="run from a source tree"
)
@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_does_what_the_page_says(command, tmp_path):
    printed = run_shell(command, tmp_path)

    if "meta_path" in command:
        here, switched_off = printed.splitlines()
        assert here.startswith("[<espnet_mega_bias_autoload.HostFinder")
        assert "HostFinder" not in switched_off
        assert len(switched_off) > 2
    elif "importtime" in command:
        (line,) = printed.splitlines()
        assert re.fullmatch(
            r"import time: +\d+ \| +\d+ \| +espnet_mega_bias_autoload", line
        )
    elif "grep" in command:
        assert "mega_bias" in printed
    else:
        assert "register()" in command
