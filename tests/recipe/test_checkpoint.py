"""recipe.checkpoint: what an interrupted training leaves, and how it ends."""

from datetime import timedelta

import numpy as np
import pytest
import torch


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


def written(directory):
    """What and when each file was written: all but when it was read."""
    stats = {path: path.lstat() for path in directory.iterdir()}
    return {
        path: (
            stat.st_mode,
            stat.st_ino,
            stat.st_size,
            stat.st_mtime_ns,
            stat.st_ctime_ns,
        )
        for path, stat in stats.items()
    }


def test_a_whole_checkpoint_is_left_alone(local, trained):
    directory, _ = trained
    before = written(directory)

    assert local("checkpoint").mend(directory) == "epochs trained earlier: 3"

    assert written(directory) == before


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
