"""recipe.stamp: when a stage is run again, and what a directory is kept for."""

import pytest


@pytest.fixture
def stage(tmp_path, run_tool):
    """A finished stage: its files, and a function that runs stamp.py on them."""
    source, result = tmp_path / "input", tmp_path / "output"
    source.write_text("what it depends on")
    result.write_text("what it made")

    def stamp(action, *arguments):
        stamp = tmp_path / "stamp"
        return run_tool("stamp", action, stamp, "--input", source, *arguments)

    assert stamp("finished").returncode == 3
    assert stamp("record", "--output", result).returncode == 0
    return source, result, stamp


def test_a_stage_is_finished_while_its_files_stay(stage):
    _, _, stamp = stage

    assert stamp("finished").returncode == 0


@pytest.mark.parametrize("which", ["input", "output", "stamp"])
@pytest.mark.parametrize("harm", ["changed", "emptied", "removed"])
def test_a_stage_is_run_again_after_a_change(stage, tmp_path, which, harm):
    _, _, stamp = stage
    path = tmp_path / which
    if harm == "removed":
        path.unlink()
    else:
        path.write_text("{another" if harm == "changed" else "")

    result = stamp("finished")

    if (which, harm) == ("input", "removed"):
        assert result.returncode == 1
        assert result.stderr == (
            f"stamp.py: error: {path} is missing; an earlier stage makes it\n"
        )
    else:
        assert result.returncode == 3


def test_a_directory_is_kept_for_the_inputs_of_its_training(stage, tmp_path):
    source, _, stamp = stage
    train = tmp_path / "train"

    assert stamp("claim", "--directory", train).returncode == 0
    source.write_text("another configuration")  # nothing was trained yet
    assert stamp("claim", "--directory", train).returncode == 0
    train.mkdir()
    (train / "checkpoint.pth").write_text("work of hours")
    assert stamp("claim", "--directory", train).returncode == 0
    source.write_text("a third configuration")
    result = stamp("claim", "--directory", train)

    assert result.returncode == 1
    assert f"{train} holds a training that was begun with another {source};" in (
        result.stderr
    )
    assert (train / "checkpoint.pth").read_text() == "work of hours"


def test_a_setting_counts_as_the_files_do(stage, tmp_path):
    _, _, stamp = stage
    train = tmp_path / "train"
    train.mkdir()
    (train / "checkpoint.pth").write_text("work of hours")
    (tmp_path / "stamp").unlink()
    claim = ("claim", "--directory", train, "--setting")

    train.joinpath("checkpoint.pth").unlink()
    assert stamp(*claim, "seed=1").returncode == 0
    (train / "checkpoint.pth").write_text("work of hours")
    assert stamp(*claim, "seed=1").returncode == 0
    result = stamp(*claim, "seed=2")

    assert result.returncode == 1
    assert "a training that was begun with another seed;" in result.stderr


def test_one_hash_stands_for_what_all_outputs_hold(stage, tmp_path):
    _, result, stamp = stage
    content, more = tmp_path / "content", tmp_path / "more"
    more.write_text("and more")

    def of(*outputs):
        record = stamp("record", "--content", content, "--output", *outputs)
        assert record.returncode == 0
        return content.read_text()

    whole = of(result, more)
    assert of(result) != whole
    assert of(result, more) == whole
    more.write_text("and other")
    assert of(result, more) != whole

    assert stamp("finished").returncode == 0
    content.unlink()
    assert stamp("finished").returncode == 3
