"""Outputs come into being whole, or not at all, and replace nothing."""

import errno
import os
import re
from pathlib import Path

import pytest

from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.output import check_is_free, new_directory, new_file


def test_a_file_gets_its_name_when_it_is_whole(tmp_path):
    path = tmp_path / "deep" / "a.png"

    with new_file(path) as partial:
        partial.write_text("all of it")
        assert not path.exists()
        assert partial.suffix == ".png"

    assert path.read_text() == "all of it"
    assert list(path.parent.iterdir()) == [path]


def test_a_directory_gets_its_name_when_it_is_whole(tmp_path):
    path = tmp_path / "deep" / "out"

    with new_directory(path) as partial:
        (partial / "a").write_text("all of it")
        assert not path.exists()

    assert (path / "a").read_text() == "all of it"
    assert list(path.parent.iterdir()) == [path]


def test_an_empty_directory_is_filled(tmp_path):
    path = tmp_path / "out"
    path.mkdir()

    with new_directory(path) as partial:
        (partial / "a").touch()

    assert [found.name for found in path.iterdir()] == ["a"]


def begin(new, path, error):
    """Write half of an output, then fail."""
    with new(path) as partial:
        half = partial / "inside" if new is new_directory else partial
        half.write_text("half of it")
        raise error


@pytest.mark.parametrize("new", [new_file, new_directory])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_stays_behind_after(new, error, tmp_path):
    with pytest.raises(error):
        begin(new, tmp_path / "out", error)

    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_not_taken_over(tmp_path):
    left = tmp_path / ".partial.out"
    left.mkdir()
    (left / "old").touch()

    with new_directory(tmp_path / "out") as partial:
        (partial / "new").touch()

    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]


@pytest.mark.parametrize("new", [new_file, new_directory])
def test_an_existing_file_is_not_overwritten(new, tmp_path):
    path = tmp_path / "out"
    path.write_text("precious")

    with (
        pytest.raises(ToolError, match="out exists, and is not overwritten"),
        new(path),
    ):
        pytest.fail("began all the same")

    assert path.read_text() == "precious"


@pytest.mark.parametrize("new", [new_file, new_directory])
def test_a_dangling_link_is_not_overwritten(new, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")

    with (
        pytest.raises(ToolError, match="out exists, and is not overwritten"),
        new(tmp_path / "out"),
    ):
        pytest.fail("began all the same")


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path):
    path = tmp_path / "out"

    def write():
        with new_file(path) as partial:
            partial.write_text("ours")
            path.write_text("precious")

    with pytest.raises(ToolError, match="not overwritten"):
        write()

    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_directory_is_not_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()

    with (
        pytest.raises(ToolError, match="out exists, and is not empty"),
        new_directory(tmp_path / "out"),
    ):
        pytest.fail("began all the same")

    assert (tmp_path / "out" / "precious").exists()


def test_a_directory_is_not_replaced_by_a_file(tmp_path):
    with (
        pytest.raises(ToolError, match=re.escape(f"{tmp_path} is a directory")),
        new_file(tmp_path),
    ):
        pytest.fail("began all the same")


@pytest.mark.parametrize("spelling", [".", "{}"])
def test_the_current_directory_is_not_pulled_from_under_the_user(
    spelling, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ToolError, match="is the current directory; name a new one"):
        check_is_free(Path(spelling.format(tmp_path)))


def test_a_name_that_ends_in_two_dots_is_understood(tmp_path):
    (tmp_path / "there").mkdir()

    with new_directory(tmp_path / "there" / "out" / ".." / "new") as partial:
        (partial / "a").touch()

    assert (tmp_path / "there" / "new" / "a").exists()


@pytest.mark.parametrize("new", [new_file, new_directory])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_device_is_said(new, code, tmp_path):
    with (
        pytest.raises(ToolError, match=r"no space left on the device to write .*out"),
        new(tmp_path / "out"),
    ):
        raise OSError(code, os.strerror(code))

    assert not list(tmp_path.iterdir())


def test_other_errors_of_the_system_stay_what_they_are(tmp_path):
    with pytest.raises(PermissionError), new_file(tmp_path / "out"):
        raise PermissionError(errno.EACCES, "Permission denied")
