"""README and docs/: their code runs, and what they name is there.

Fenced blocks marked `python` run here, page by page, from top to bottom. Blocks marked
`sh` run in the test that is named below. Blocks marked `text` are output, messages, or
commands for machines that tests do not have; the test of their page looks at those.
"""

import re

import pytest
from docs.pages import PAGES, ROOT, blocks

WITH_PYTHON = [path for path in PAGES if blocks(path.read_text(), "python")]

# Snippets that need files beside them run in the test of their page.
PYTHON_ELSEWHERE = {
    "export.md": "tests/docs/test_export.py",
    "streaming.md": "tests/docs/test_streaming.py",
}

# Where the `sh` blocks of a page run.
SHELL = {
    "convert.md": "tests/bin/test_convert.py",
    "export.md": "tests/docs/test_export.py",
    "moving.md": "tests/docs/test_moving.py",
    "own_corpus.md": "tests/docs/test_own_corpus.py",
    "registration.md": "tests/docs/test_registration.py",
    "several_gpus.md": "tests/docs/test_several_gpus.py",
    "streaming.md": "tests/docs/test_streaming.py",
    "tools.md": "tests/docs/test_tools.py",
}

# Commands in indented blocks, and the test that runs each, or what it starts.
INDENTED = {
    "make demo": "tests/recipe/test_run_sh.py",
    "make an4": "tests/recipe/test_an4.py",
    "make test": ".ci/run",  # how the tests are run
    "pip install .": "tests/host/test_install.py",
    "python -m espnet2.bin.asr_transducer_train --config "
    "conf/train_mini_an4_mega_bias.yaml …": "tests/host/test_entry_points.py",
    "python benchmarks/bench_onnx.py --train EXP --scp FILE --text FILE": (
        "tests/test_benchmarks.py"
    ),
    "python tests/equality.py --every 23": "tests/test_equality.py",
}


@pytest.mark.parametrize(
    "path",
    [path for path in WITH_PYTHON if path.name not in PYTHON_ELSEWHERE],
    ids=lambda path: path.name,
)
def test_python_snippets_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "snippet"}

    for number, code in enumerate(blocks(path.read_text(), "python"), start=1):
        exec(compile(code, f"{path.name}, snippet {number}", "exec"), names)


def test_shell_blocks_have_a_test_that_reads_their_page():
    for path in PAGES:
        tests = []
        if blocks(path.read_text(), "sh"):
            tests.append(SHELL.get(path.name))
        if path.name in PYTHON_ELSEWHERE:
            tests.append(PYTHON_ELSEWHERE[path.name])

        for test in tests:
            assert test, f"no test runs the `sh` blocks of {path.name}"
            assert path.name in (ROOT / test).read_text()


def test_other_commands_have_a_test_too():
    for path in PAGES:
        text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
        commands = re.findall(
            r"^ {4,}((?:make|pip|python|espnet-mega-bias|\./)[ /].*)$", text, re.M
        )

        for command in commands:
            command = re.split(r"\s+#", command)[0].strip()
            assert command in INDENTED, f"no test is named for `{command}`, {path.name}"
            assert (ROOT / INDENTED[command]).is_file()


def test_fenced_blocks_are_of_a_kind_that_is_looked_at():
    for path in PAGES:
        kinds = re.findall(r"^```(.*)$", path.read_text(), re.M)[::2]
        assert set(kinds) <= {"python", "sh", "text", "yaml"}, path.name


def test_files_and_tests_named_in_the_docs_exist():
    for path in PAGES:
        text = path.read_text()
        named = [
            ROOT / name
            for name in re.findall(
                r"`((?:tests|docs|conf|egs|benchmarks)/[\w/.-]+)", text
            )
        ]
        named += [path.parent / link for link in re.findall(r"\]\(([\w/.-]+)\)", text)]

        for file in named:
            assert file.exists(), f"{path.name} names {file}"
