"""The Python snippets of docs/ and of the README run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SNIPPETS = [
    (path, number, code)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for number, code in enumerate(
        re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.M | re.S)
    )
]


@pytest.mark.parametrize(
    ("path", "number", "code"), SNIPPETS, ids=lambda value: getattr(value, "name", "")
)
def test_snippet_runs(path, number, code):
    exec(compile(code, f"{path.name}, snippet {number}", "exec"), {})


def test_files_and_tests_named_in_the_docs_exist():
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = path.read_text()
        named = re.findall(r"`((?:tests|docs|conf|egs|benchmarks)/[\w/.-]+)", text)
        named += [
            str((path.parent / link).relative_to(ROOT))
            for link in re.findall(r"\]\(([\w/.-]+)\)", text)
        ]

        for name in named:
            assert (ROOT / name).exists(), f"{path.name} names {name}"
