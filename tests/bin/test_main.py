"""`espnet-mega-bias`: what each way of ending looks like."""

import errno
import importlib.metadata
import logging
import os
import subprocess
import sys
import warnings

import pytest

from espnet_mega_bias import __version__
from espnet_mega_bias.bin import main as main_module
from espnet_mega_bias.bin.main import COMMANDS, main
from espnet_mega_bias.tools.error import ToolError


@pytest.fixture
def command(monkeypatch):
    """Return a function that makes `explain` do what is given."""

    class Command:
        @staticmethod
        def add_arguments(parser):
            parser.add_argument("path")

    def do(action):
        Command.run = staticmethod(action)
        monkeypatch.setattr(main_module, "_module", lambda name: Command)

    return do


def raising(error):
    def run(args):
        raise error

    return run


def test_a_command_gets_its_arguments_and_gives_the_status(command):
    seen = []
    command(lambda args: seen.append(args.path) or 3)

    assert main(["explain", "some/path"]) == 3
    assert seen == ["some/path"]


def test_remarks_are_hidden_while_a_command_runs_and_not_after(command, capfd):
    def remark():
        logging.getLogger("espnet").warning("a remark")
        warnings.warn("another", stacklevel=1)

    command(lambda args: remark() or 0)

    assert main(["explain", "some/path"]) == 0
    assert capfd.readouterr() == ("", "")
    assert logging.root.manager.disable == 0
    with pytest.warns(UserWarning, match="another"):
        remark()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ToolError("a.pth is damaged:\n  it ends"), "a.pth is damaged: it ends"),
        (
            PermissionError(errno.EACCES, "Permission denied", "a.pth"),
            "[Errno 13] Permission denied: 'a.pth'",
        ),
    ],
)
def test_an_error_is_one_line_and_status_1(error, said, command, capsys):
    command(raising(error))

    assert main(["explain", "x"]) == 1

    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"espnet-mega-bias explain: error: {said}\n"


def test_an_interrupt_is_one_line_and_the_shells_status(command, capsys):
    command(raising(KeyboardInterrupt()))

    assert main(["explain", "x"]) == 130
    assert capsys.readouterr().err == "espnet-mega-bias explain: interrupted\n"


def test_a_fault_of_ours_is_not_hidden(command):
    command(raising(AttributeError("no such thing")))

    with pytest.raises(AttributeError):
        main(["explain", "x"])


@pytest.mark.parametrize("argv", [[], ["no-such"], ["explain"], ["explain", "a", "b"]])
def test_wrong_arguments_are_status_2(argv, command):
    command(lambda args: pytest.fail("ran all the same"))

    with pytest.raises(SystemExit) as end:
        main(argv)

    assert end.value.code == 2


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])

    assert end.value.code == 0
    assert capsys.readouterr().out == f"{__version__}\n"
    assert importlib.metadata.version("espnet-mega-bias") == __version__


def test_help_names_every_command_and_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from espnet_mega_bias.bin.main import main\n"
        "try:\n main(['--help'])\n"
        "finally:\n"
        " print(sorted({'torch', 'espnet2', 'matplotlib', 'onnx'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert all(f"    {name} " in done.stdout for name in COMMANDS)
    assert done.stdout.endswith("[]\n")


def test_the_command_and_the_module_are_the_same():
    scripts = importlib.metadata.entry_points(group="console_scripts")

    assert scripts["espnet-mega-bias"].load() is main

    done = subprocess.run(
        [sys.executable, "-m", "espnet_mega_bias", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{__version__}\n"


def test_a_reader_that_has_seen_enough_is_no_error():
    code = (
        "from espnet_mega_bias.bin import main\n"
        "class Command:\n"
        " add_arguments = staticmethod(lambda parser: None)\n"
        " @staticmethod\n"
        " def run(args):\n"
        "  print('line\\n' * 100_000)\n"
        "  return 0\n"
        "main._module = lambda name: Command\n"
        "raise SystemExit(main.main(['explain']))"
    )
    reading, writing = os.pipe()

    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE
    ) as process:
        os.close(writing)
        os.read(reading, 10)
        os.close(reading)
        _, err = process.communicate()

    assert process.returncode == 1
    assert err == b""
