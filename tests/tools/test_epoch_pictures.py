import io
import shutil
import sys

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from espnet_mega_bias.tools import epoch_pictures
from espnet_mega_bias.tools.epoch_pictures import write_epochs
from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.experiment import load
from espnet_mega_bias.tools.pictures import to_pixels
from espnet_mega_bias.tools.plotting import draw


@pytest.fixture
def training(make_experiment):
    """Return an experiment folder, and a function that adds checkpoints of epochs."""
    folder = make_experiment(token_type="char")
    state = folder / "valid.loss.ave.pth"

    def add(*epochs, linked=True):
        for epoch in epochs:
            shutil.copy(state, folder / f"{epoch}epoch.pth")

        if linked:
            (folder / "latest.pth").unlink(missing_ok=True)
            (folder / "latest.pth").symlink_to(f"{max(epochs)}epoch.pth")

    return folder, add


@pytest.fixture
def _no_drawing(monkeypatch):
    """Spare the time where it matters only which pictures there are."""
    monkeypatch.setattr(
        epoch_pictures, "to_pixels", lambda figure: np.zeros((4, 4, 3), np.uint8)
    )


def read_steps(folder):
    logs = folder / "tensorboard" / "bias"
    events = EventAccumulator(str(logs), size_guidance={"images": 0}).Reload()

    return {
        # files of one second are not read in the order of writing
        tag: sorted(event.step for event in events.Images(tag))
        for tag in events.Tags()["images"]
    }


def test_the_picture_is_that_of_the_epoch(training):
    folder, add = training
    add(7)
    write_epochs(folder)
    expected = to_pixels(draw({"": load(folder / "7epoch.pth")}))
    logs = folder / "tensorboard" / "bias"
    (event,) = EventAccumulator(str(logs)).Reload().Images("mega_bias")

    with Image.open(io.BytesIO(event.encoded_image_string)) as image:
        np.testing.assert_array_equal(np.asarray(image), expected)


@pytest.mark.usefixtures("_no_drawing")
def test_each_epoch_gets_one_picture_however_often_it_is_asked_for(training):
    folder, add = training
    add(2, 10)

    assert write_epochs(folder) == [2, 10]
    assert write_epochs(folder) == []

    (folder / "2epoch.pth").unlink()
    add(11)

    assert write_epochs(folder) == [11]
    assert read_steps(folder) == {"mega_bias": [2, 10, 11]}


@pytest.mark.usefixtures("_no_drawing")
def test_attention_has_pictures_of_its_own(training):
    folder, add = training
    add(3)

    assert write_epochs(folder) == [3]
    assert write_epochs(folder, text="AB") == [3]
    assert read_steps(folder) == {"mega_bias": [3], "mega_bias_attention": [3]}


@pytest.mark.usefixtures("_no_drawing")
def test_a_checkpoint_that_is_being_written_waits(training):
    folder, add = training
    add(1)
    (folder / "2epoch.pth").write_bytes(b"half of it")

    assert write_epochs(folder) == [1]

    add(2)
    assert write_epochs(folder) == [2]


def test_a_folder_without_epochs_is_refused(training):
    folder, _ = training

    with pytest.raises(ToolError, match="no checkpoint of an epoch"):
        write_epochs(folder)

    assert not (folder / "tensorboard").exists()


def test_a_missing_tensorboard_is_told_how_to_install(training, monkeypatch):
    folder, _ = training
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)

    with pytest.raises(ToolError, match=r"pip install 'espnet-mega-bias\[recipe\]'"):
        write_epochs(folder)
