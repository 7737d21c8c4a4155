"""See to it that an interrupted training can go on, and that a training got to its end.

ESPnet writes checkpoint.pth, the epoch's model and the links one after the other,
and each in place: a training that is killed can leave any of them half-written.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import zipfile
from pathlib import Path

from recipe.files import RecipeError, replacing
from recipe.job import LockedError, take_lock


def is_whole(path: Path) -> bool:
    """Tell whether what torch saved in `path` is there to its last byte."""
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None  # torch.load compares no checksums
    except (FileNotFoundError, zipfile.BadZipFile):
        return False


def load(path: Path) -> dict:
    """Return the states in a checkpoint of ESPnet."""
    import numpy as np
    import torch

    # ESPnet 202511 leaves such values in the reporter's state, later ones do not
    number = np.float64(0)
    allowed = [datetime.timedelta, np.dtype, type(number.dtype), number.__reduce__()[0]]
    with torch.serialization.safe_globals(allowed):
        return torch.load(path, map_location="cpu", weights_only=True)


def set_aside(directory: Path) -> Path:
    """Rename a directory to the first free name of <name>.broken1, ..."""
    number = 1
    while (target := directory.with_name(f"{directory.name}.broken{number}")).exists():
        number += 1
    return directory.rename(target)


def mend(directory: Path) -> str | None:
    """Make the output directory of a training fit to be continued.

    A checkpoint that is not whole goes, with all that was trained with it, to
    another directory: the training begins anew.  If the checkpoint is whole but the
    model of its epoch is not, or ``latest.pth`` is older, both are made again.

    Returns:
        What was found, in words; None where there is no checkpoint.
    """
    import torch

    checkpoint = directory / "checkpoint.pth"
    if not checkpoint.exists():
        return None
    if not is_whole(checkpoint):
        target = set_aside(directory)
        return (
            f"{checkpoint} is broken; what there was of the training is now in "
            f"{target}, and the training begins anew"
        )
    states = load(checkpoint)
    epoch = states["reporter"]["epoch"]
    model = directory / f"{epoch}epoch.pth"
    if not is_whole(model):
        with replacing(model) as partial:
            torch.save(states["model"], partial)
    latest = directory / "latest.pth"
    if not latest.exists() or latest.resolve() != model.resolve():
        latest.unlink(missing_ok=True)
        latest.symlink_to(model.name)
    return f"epochs trained earlier: {epoch}"


def check_complete(directory: Path) -> None:
    """Check that a training reached its last epoch, or stopped as `patience` asks.

    ESPnet ends with status 0 too when it gives a training up because no step of an
    epoch had finite gradients.

    Raises:
        ValueError: If the training ended early; names the epochs.
    """
    import yaml

    config = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))
    epoch = load(directory / "checkpoint.pth")["reporter"]["epoch"]
    if epoch < config["max_epoch"] and config["patience"] is None:
        raise ValueError(
            f"the training ended after epoch {epoch} of {config['max_epoch']}: "
            "no step of that epoch had finite gradients"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["mend", "check_complete"])
    parser.add_argument("directory", type=Path, help="ESPnet's output_dir")
    parser.add_argument("--lock", type=Path, help="nothing is done while a job has it")
    args = parser.parse_args()
    found = None
    try:
        if args.lock is not None:
            take_lock(args.lock)
        if args.action == "mend":
            found = mend(args.directory)
        else:
            check_complete(args.directory)
    except (RecipeError, LockedError, ValueError, OSError) as exc:
        print(f"checkpoint.py: error: {exc}", file=sys.stderr)
        return 1
    if found:
        print(f"  {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
