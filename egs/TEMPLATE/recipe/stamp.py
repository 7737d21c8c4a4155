"""Remember what a finished stage was made from, and whether that still holds.

    stamp.py finished STAMP --input FILE ...          exit 0: finished, 3: to be run
    stamp.py record STAMP --input FILE ... --output FILE ...
    stamp.py claim CLAIM --directory DIR --input FILE ...

with [--setting NAME=VALUE ...] for each: an input that is no file.  A stamp is a JSON
file with the SHA-256 of each input and output, and the settings.  A claim keeps a
directory in which work can be continued, such as a training's, for one set of
inputs.  `record --content FILE` writes one SHA-256 of all outputs there: an input of
later stages that stands for thousands of files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

from recipe.files import RecipeError, replacing

TO_BE_RUN = 3


def hashes(paths: list[Path]) -> dict[str, str]:
    """Return the SHA-256 of each file.

    Raises:
        FileNotFoundError: If one is missing.
    """
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def read(path: Path) -> dict:
    """Return what a stamp holds; nothing where it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write(path: Path, content: dict) -> None:
    """Write a stamp, whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_content(path: Path, outputs: dict[str, str]) -> None:
    """Write one hash of what all outputs hold."""
    together = hashlib.sha256("".join(outputs.values()).encode()).hexdigest()
    with replacing(path) as partial:
        partial.write_text(together + "\n", encoding="utf-8")


def is_finished(stamp: Path, inputs: dict[str, str]) -> bool:
    """Tell whether the stamp was made from `inputs` and its outputs are unchanged."""
    content = read(stamp)
    if content.get("inputs") != inputs:
        return False
    try:
        return hashes([Path(path) for path in content["outputs"]]) == content["outputs"]
    except (KeyError, FileNotFoundError):
        return False


def claim(path: Path, directory: Path, inputs: dict[str, str]) -> None:
    """Keep `directory` for work on `inputs`.

    Raises:
        ValueError: If it already holds work on other inputs; names them.
    """
    earlier = read(path).get("inputs")
    if directory.is_dir() and any(directory.iterdir()) and earlier != inputs:
        known = earlier or {}
        changed = sorted(
            name for name in {*known, *inputs} if known.get(name) != inputs.get(name)
        )
        raise ValueError(
            f"{directory} holds a training that was begun with another "
            f"{', '.join(changed)}; name another --expdir, or remove that directory"
        )
    if earlier != inputs:
        write(path, {"inputs": inputs})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["finished", "record", "claim"])
    parser.add_argument("stamp", type=Path)
    parser.add_argument("--input", nargs="*", type=Path, default=[])
    parser.add_argument("--output", nargs="*", type=Path, default=[])
    parser.add_argument("--content", type=Path)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--setting", action="append", default=[])
    args = parser.parse_args()
    try:
        settings = dict(setting.split("=", 1) for setting in args.setting)
        inputs = {**hashes(args.input), **settings}
        if args.action == "finished":
            return 0 if is_finished(args.stamp, inputs) else TO_BE_RUN
        if args.action == "claim":
            claim(args.stamp, args.directory, inputs)
        else:
            outputs = hashes(args.output)
            if args.content:
                write_content(args.content, outputs)
                outputs |= hashes([args.content])
            write(args.stamp, {"inputs": inputs, "outputs": outputs})
    except FileNotFoundError as exc:
        error = f"{exc.filename} is missing; an earlier stage makes it"
    except (RecipeError, ValueError, OSError) as exc:
        error = exc
    else:
        return 0
    print(f"stamp.py: error: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
