"""Pictures of ESPnet2's epochs for TensorBoard."""

import re
from pathlib import Path

from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.experiment import load
from espnet_mega_bias.tools.pictures import check_matplotlib, to_pixels
from espnet_mega_bias.tools.plotting import LENGTH, draw

TAG = "mega_bias"
ATTENTION_TAG = f"{TAG}_attention"


def write_epochs(
    folder: Path, length: int = LENGTH, text: str | None = None
) -> list[int]:
    """Add a picture of each epoch to the TensorBoard logs of an ESPnet2 training.

    Those of ESPnet2 take scalars alone from a model of this kind, and nothing of its
    training can be added to. So this is for any time during or after the training:
    ESPnet2 keeps the checkpoints of the last and of the best epochs, and those that
    have no picture yet get one, at the step that is the epoch.

    Args:
        folder: Experiment folder.
        length: Number of offsets and of lags that are drawn.
        text: Text whose attention weights are drawn (None = bias and EMA kernels).

    Returns:
        : Epochs that got a picture now.

    Raises:
        ToolError: If there is no checkpoint of an epoch, or it cannot be read, or
            Matplotlib or TensorBoard is missing.

    """
    check_matplotlib()

    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as exc:
        raise ToolError(
            "tensorboard is missing: pip install 'espnet-mega-bias[recipe]'"
        ) from exc

    epochs = _epochs(folder)
    logs = folder / "tensorboard" / "bias"
    tag = TAG if text is None else ATTENTION_TAG
    new = sorted(epochs.keys() - _steps(logs, tag))

    if new:
        with SummaryWriter(str(logs)) as writer:
            for epoch in new:
                figure = draw({"": load(epochs[epoch])}, length, text)
                writer.add_image(tag, to_pixels(figure), epoch, dataformats="HWC")

    return new


def _epochs(folder: Path) -> dict[int, Path]:
    """Find the checkpoints of an experiment folder that are complete."""
    epochs = {
        int(found[1]): path
        for path in folder.glob("*epoch.pth")
        if (found := re.fullmatch(r"(\d+)epoch\.pth", path.name))
    }

    # ESPnet2 links to a checkpoint once it is written.
    newest = re.match(r"\d+", (folder / "latest.pth").resolve().name)

    if newest is not None:
        epochs = {e: path for e, path in epochs.items() if e <= int(newest[0])}

    if not epochs:
        raise ToolError(
            f"{folder} holds no checkpoint of an epoch (1epoch.pth, ...) as ESPnet2 "
            "saves them; in ESPnet3 a callback draws during the training"
        )

    return epochs


def _steps(logs: Path, tag: str) -> set[int]:
    """Read which epochs have a picture."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not logs.is_dir():
        return set()

    events = EventAccumulator(str(logs), size_guidance={"images": 0}).Reload()

    if tag not in events.Tags()["images"]:
        return set()

    return {event.step for event in events.Images(tag)}
