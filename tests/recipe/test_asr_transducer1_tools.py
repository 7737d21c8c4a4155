"""asr_transducer1/local: stamps, jobs, checkpoints, scores and the picture."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch


def local_command(recipe_dir, name, *arguments):
    return [sys.executable, recipe_dir / "local" / name, *arguments]


def run(command, **options):
    return subprocess.run(
        command, capture_output=True, text=True, check=False, **options
    )


# Stamps


@pytest.fixture
def stage(tmp_path, recipe_dir):
    """A finished stage: its files, and a function that runs stamp.py on them."""
    source, result = tmp_path / "input", tmp_path / "output"
    source.write_text("what it depends on")
    result.write_text("what it made")

    def stamp(action, *arguments):
        command = local_command(recipe_dir, "stamp.py", action, tmp_path / "stamp")
        return run([*command, "--input", source, *arguments])

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


# Jobs


def job(recipe_dir, log, *arguments):
    return local_command(recipe_dir, "job.py", "--log", log, *arguments)


def test_a_failed_job_shows_the_end_of_its_log(recipe_dir, tmp_path):
    log = tmp_path / "logs" / "job.log"
    script = "for i in $(seq 40); do echo line $i; done; echo broken >&2; exit 7"

    result = run(job(recipe_dir, log, "--", "sh", "-c", script))

    assert result.returncode == 7
    *lines, last = result.stderr.splitlines()
    assert lines == [f"  | line {n}" for n in range(27, 41)] + ["  | broken"]
    assert last == f"job.py: error: sh ended with status 7; the whole log is in {log}"
    assert result.stdout == ""
    assert log.read_text().count("\nline ") == 40


def test_a_job_that_fills_the_device_is_told_apart(recipe_dir, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")

    script = "open('/dev/full', 'wb', buffering=0).write(b'a')"
    result = run(job(recipe_dir, tmp_path / "log", "--", sys.executable, "-c", script))

    assert result.returncode == 1
    assert "error: no space left on the device; " in result.stderr


def test_the_log_keeps_earlier_jobs_and_only_the_last_is_shown(recipe_dir, tmp_path):
    log = tmp_path / "log"

    assert run(job(recipe_dir, log, "--", "echo", "first")).returncode == 0
    result = run(job(recipe_dir, log, "--", "sh", "-c", "echo second; exit 1"))

    assert "second" in result.stderr
    assert "first" not in result.stderr
    assert "\nfirst\n" in log.read_text()


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")  # a zombie waits to be reaped, but has ended
    return not status.exists() or status.read_text().rpartition(") ")[2][0] != "Z"


def test_a_signal_ends_a_job_and_its_children(recipe_dir, tmp_path):
    pid_file = tmp_path / "pid"
    script = f"sleep 300 & echo $! > {pid_file}.new; mv {pid_file}.new {pid_file}; wait"
    process = subprocess.Popen(
        job(recipe_dir, tmp_path / "log", "--", "sh", "-c", script),
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 30
    while not pid_file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    grandchild = int(pid_file.read_text())
    assert is_running(grandchild)

    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)

    assert process.returncode == 128 + signal.SIGTERM
    while is_running(grandchild):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_only_one_job_at_a_time_has_the_lock(recipe_dir, tmp_path):
    lock = tmp_path / "lock"
    with_lock = ("--lock", lock, "--")
    first = subprocess.Popen(
        job(recipe_dir, tmp_path / "1", *with_lock, "sleep", "300")
    )
    try:
        deadline = time.monotonic() + 30
        while "sleep" not in (tmp_path / "1").read_text() if lock.exists() else True:
            assert time.monotonic() < deadline
            time.sleep(0.05)

        second = run(job(recipe_dir, tmp_path / "2", *with_lock, "echo", "ran"))
        mend = ("mend", tmp_path / "train", "--lock", lock)
        mended = run(local_command(recipe_dir, "checkpoint.py", *mend))
    finally:
        first.terminate()
        first.wait()
    third = run(job(recipe_dir, tmp_path / "3", *with_lock, "echo", "ran"))

    assert second.returncode == 1
    assert f"another run is at work here; it holds {lock}" in second.stderr
    assert mended.returncode == 1
    assert f"another run is at work here; it holds {lock}" in mended.stderr
    assert third.returncode == 0


def test_progress_has_one_line_for_each_epoch(local):
    progress = local("job").TrainProgress()
    results = (
        "[host] 2026 (trainer:392) INFO: 3epoch results: [train] iter_time=0.031, "
        "forward_time=0.903, loss=0.024, loss_transducer=0.021, train_time=2.535, "
        "time=2 minutes and 6.76 seconds, total_count=300, [valid] loss=58.449, "
        "loss_transducer=35.015, time=0.46 seconds, total_count=6"
    )

    assert progress("(trainer:322) INFO: 3/8epoch started") == "epoch 3/8 started"
    assert progress("INFO: 3epoch:train:1-5batch: loss=9.9, loss_transducer=9") is None
    assert progress(results) == (
        "epoch 3/8: loss 0.024 on train, 58.449 on valid (2 minutes and 6.76 seconds)"
    )
    assert progress("(trainer:316) INFO: 4/8epoch started. Estimated time") is None


# Checkpoints


@pytest.fixture
def trained(tmp_path):
    """What ESPnet leaves after epoch 3 of 5."""
    directory = tmp_path / "train"
    directory.mkdir()
    model = {"weight": torch.randn(100, 40)}
    for epoch in (2, 3):
        torch.save(model, directory / f"{epoch}epoch.pth")
    stats = {"loss": np.float64(0.5), "time": timedelta(seconds=2)}  # as in 202511
    reporter = {"epoch": 3, "stats": {3: {"train": stats}}}
    states = {"model": model, "reporter": reporter, "optimizers": []}
    torch.save(states, directory / "checkpoint.pth")
    (directory / "latest.pth").symlink_to("3epoch.pth")
    (directory / "config.yaml").write_text("max_epoch: 5\npatience: null\n")
    return directory, model["weight"]


def test_a_whole_checkpoint_is_left_alone(local, trained):
    directory, _ = trained
    before = {path: path.lstat() for path in directory.iterdir()}

    assert local("checkpoint").mend(directory) == "epochs trained earlier: 3"

    assert {path: path.lstat() for path in directory.iterdir()} == before


def test_a_training_without_a_checkpoint_has_nothing_to_mend(local, tmp_path):
    assert local("checkpoint").mend(tmp_path / "train") is None


@pytest.mark.parametrize("left", [0, 1, 400, 5000, 12000, -100, -1])
def test_a_half_written_checkpoint_is_set_aside(local, trained, left):
    directory, _ = trained
    checkpoint = directory / "checkpoint.pth"
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[:left])
    directory.with_name("train.broken1").mkdir()

    found = local("checkpoint").mend(directory)

    assert f"{checkpoint} is broken" in found
    assert not directory.exists()
    aside = directory.with_name("train.broken2")
    assert str(aside) in found
    assert (aside / "checkpoint.pth").read_bytes() == content[:left]
    assert (aside / "3epoch.pth").is_file()


def test_a_checkpoint_with_damage_inside_is_set_aside(local, trained):
    directory, weight = trained
    checkpoint = directory / "checkpoint.pth"
    content = checkpoint.read_bytes()
    values = weight.numpy().tobytes()[:64]
    assert content.count(values) == 1
    checkpoint.write_bytes(content.replace(values, values[::-1]))

    assert "is broken" in local("checkpoint").mend(directory)


@pytest.mark.parametrize(
    "harm", ["half-written model", "no model", "old link", "no link"]
)
def test_a_model_that_the_checkpoint_has_is_written_again(local, trained, harm):
    directory, weight = trained
    model, latest = directory / "3epoch.pth", directory / "latest.pth"
    if harm == "half-written model":
        model.write_bytes(model.read_bytes()[:500])
    elif harm == "no model":
        model.unlink()
    else:
        latest.unlink()
    if harm == "old link":
        latest.symlink_to("2epoch.pth")

    local("checkpoint").mend(directory)

    assert latest.is_symlink()
    assert latest.resolve() == model.resolve()
    assert torch.equal(torch.load(latest, weights_only=True)["weight"], weight)


def test_a_training_that_gave_up_is_no_finished_one(local, trained):
    directory, _ = trained
    checkpoint = local("checkpoint")

    with pytest.raises(ValueError, match="ended after epoch 3 of 5"):
        checkpoint.check_complete(directory)
    (directory / "config.yaml").write_text("max_epoch: 3\npatience: null\n")
    checkpoint.check_complete(directory)
    (directory / "config.yaml").write_text("max_epoch: 5\npatience: 2\n")
    checkpoint.check_complete(directory)


# Scores


def test_counts_substitutions_deletions_and_insertions(local):
    pytest.importorskip("jiwer")
    said = {"a": "ONE TWO THREE", "b": "GO", "c": "YES"}
    heard = {"c": "", "b": "GO ON", "a": "ONE TEN THREE", "d": "not asked for"}

    found = local("score").count_errors(said, heard)

    # TWO/TEN, ON, YES are wrong; characters: WO/EN, " ON", YES
    assert (found.utterances, found.words, found.word_errors) == (3, 5, 3)
    assert (found.characters, found.character_errors) == (18, 8)
    assert found.wer == pytest.approx(60.0)
    assert found.cer == pytest.approx(100 * 8 / 18)


def test_an_utterance_that_was_not_decoded_is_no_error_but_a_failure(local):
    pytest.importorskip("jiwer")

    with pytest.raises(ValueError, match="not decoded: b"):
        local("score").count_errors({"a": "GO", "b": "GO"}, {"a": "GO"})


@pytest.fixture
def decoded(tmp_path):
    """Data and hypotheses: one of two training words is right in the second search."""
    for name in ("train", "valid", "test"):
        (tmp_path / name).mkdir()
        text = f"{name}-1 GO\n" + ("train-2 STOP\n" if name == "train" else "")
        (tmp_path / name / "text").write_text(text)
    for search, word in (("first", "STOP"), ("second", "SHOP")):
        folder = tmp_path / search / "1best_recog"
        folder.mkdir(parents=True)
        lines = f"train-1 GO\ntrain-2 {word}\nvalid-1 \ntest-1 NO\n"
        (folder / "text").write_text(lines)
    return tmp_path


def test_the_table_has_a_row_for_each_search_and_set(local, decoded):
    pytest.importorskip("jiwer")
    searches = [decoded / "first", decoded / "second"]

    results = local("score").report(decoded, searches, [Path("loss.png")])

    rows = [line for line in results.splitlines() if line.startswith("| ")]
    assert rows[1:7] == [
        "| first | train | 2 | 2 | 0 | 0.0 | 6 | 0 | 0.0 |",
        "| first | valid | 1 | 1 | 1 | 100.0 | 2 | 2 | 100.0 |",
        "| first | test | 1 | 1 | 1 | 100.0 | 2 | 1 | 50.0 |",
        "| second | train | 2 | 2 | 1 | 50.0 | 6 | 1 | 16.7 |",
        "| second | valid | 1 | 1 | 1 | 100.0 | 2 | 2 | 100.0 |",
        "| second | test | 1 | 1 | 1 | 100.0 | 2 | 1 | 50.0 |",
    ]
    assert "| train | train-2 | STOP | STOP | SHOP |" in rows
    assert "not how good a model can be" in results
    assert "- loss.png\n" in results


def test_the_limit_holds_for_every_search(local, decoded):
    pytest.importorskip("jiwer")
    score = local("score")
    results = score.report(decoded, [decoded / "first", decoded / "second"], [])

    score.check_train_wer(results, 50.0)
    with pytest.raises(ValueError, match=r"WER 50\.0 % with second, above 0 %"):
        score.check_train_wer(results, 0.0)
    with pytest.raises(ValueError, match="no row"):
        score.check_train_wer("nothing", 0.0)


# The picture


def test_draws_the_bias_of_each_block_against_the_offset(local, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig

    def savefig(figure, *arguments, **options):
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    positions = np.arange(5)
    offset = positions[None, :] - positions[:, None]  # key minus query
    picture = tmp_path / "images" / "bias.png"

    local("plot_bias").draw([offset * 1.0, offset**2 * 1.0], picture)

    left, right = figures[0].axes[:2]
    first, second = left.get_lines()[:2]
    np.testing.assert_array_equal(first.get_xdata(), np.arange(-4, 5))
    np.testing.assert_array_equal(first.get_ydata(), np.arange(-4, 5))
    np.testing.assert_array_equal(second.get_ydata(), np.arange(-4, 5) ** 2)
    np.testing.assert_array_equal(right.images[0].get_array(), offset)
    assert left.get_xlabel() == "offset (key - query)"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in picture.parent.iterdir()] == ["bias.png"]
