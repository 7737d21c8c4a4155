"""What `python -m build` makes: an sdist and a wheel that PyPI and users would take."""

import email
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from environments import ROOT, STARTUP_FILES, environ

import espnet_mega_bias

VERSION = espnet_mega_bias.__version__


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The sdist, the wheel that was built from it, and what the build said."""
    source = tmp_path_factory.mktemp("release") / "source"
    made = ("data", "downloads", "dump", "exp", "logs", "dist", "build")
    shutil.copytree(
        ROOT,
        source,
        ignore=shutil.ignore_patterns(*made, ".*", "*.egg-info", "__pycache__"),
    )
    # what a recipe leaves is not for others
    left = source / "egs" / "mini_an4" / "asr_transducer1" / "exp" / "train"
    left.mkdir(parents=True)
    (left / "config.yaml").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", source],
        env=environ(PYTHONDONTWRITEBYTECODE=""),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    sdist, wheel = sorted((source / "dist").iterdir(), key=lambda path: path.suffix)
    return sdist, wheel, done.stdout


@pytest.mark.slow
def test_they_are_named_after_the_one_version(distributions):
    sdist, wheel, _ = distributions

    assert sdist.name == f"espnet_mega_bias-{VERSION}.tar.gz"
    assert wheel.name == f"espnet_mega_bias-{VERSION}-py3-none-any.whl"


@pytest.mark.slow
def test_they_build_without_a_warning(distributions):
    *_, said = distributions

    # "warning: ..." or "SomethingWarning: ..."
    assert re.findall(r"(?i)^.*warning:.*$", said, re.MULTILINE) == []


@pytest.mark.slow
def test_twine_takes_them(distributions):
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *distributions[:2]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(distributions):
    with zipfile.ZipFile(distributions[1]) as wheel:
        # setuptools before 77 has no folder for the licence
        names = {name.replace("licenses/", "") for name in wheel.namelist()}
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "espnet_mega_bias").rglob("*.py")
    }
    info = f"espnet_mega_bias-{VERSION}.dist-info"

    assert names == {
        *package,
        *STARTUP_FILES,
        "espnet_mega_bias_autoload.py",
        f"{info}/METADATA",
        f"{info}/RECORD",
        f"{info}/WHEEL",
        f"{info}/entry_points.txt",
        f"{info}/LICENSE",
        f"{info}/top_level.txt",
    }


@pytest.mark.slow
def test_the_sdist_holds_what_is_under_version_control(distributions):
    with tarfile.open(distributions[0]) as sdist:
        names = {
            Path(*Path(member.name).parts[1:]).as_posix()
            for member in sdist
            if member.isfile()
        }
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    by_setuptools = {"PKG-INFO", "setup.cfg"}

    assert {n for n in names if ".egg-info" not in n} - by_setuptools == {
        name for name in tracked if not name.startswith((".ci/", ".gitignore"))
    }


@pytest.mark.slow
def test_the_metadata_tell_what_a_user_looks_for(distributions):
    with zipfile.ZipFile(distributions[1]) as wheel:
        text = wheel.read(f"espnet_mega_bias-{VERSION}.dist-info/METADATA").decode()
        entry_points = wheel.read(
            f"espnet_mega_bias-{VERSION}.dist-info/entry_points.txt"
        ).decode()
    metadata = email.message_from_string(text)

    assert metadata["Name"] == "espnet-mega-bias"
    # by newer and by older setuptools
    licenses = {metadata["License-Expression"], metadata["License"]}
    assert licenses - {None} == {"Apache-2.0"}
    assert metadata["Requires-Python"] == ">=3.10,<3.14"
    assert set(metadata.get_all("Provides-Extra")) == {
        "egs3",
        "export",
        "plot",
        "recipe",
        "test",
    }
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert "espnet-mega-bias = espnet_mega_bias.bin.main:main" in entry_points
    versions = re.findall(r"Python :: (3\.\d+)", text)
    assert versions == ["3.10", "3.11", "3.12", "3.13"]


def test_the_citation_and_the_changelog_are_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changelog = (ROOT / "CHANGELOG.md").read_text()

    assert citation["version"] == VERSION
    assert citation["license"] == "Apache-2.0"
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation)
    assert re.search(rf"^## {re.escape(VERSION)}\b", changelog, re.MULTILINE)
