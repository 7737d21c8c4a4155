"""A trained model from ESPnet's `mega` to `mega_bias`, or back."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.experiment import CONFIG, Experiment, load, read_config
from espnet_mega_bias.tools.output import check_is_free, new_directory

if TYPE_CHECKING:
    from espnet_mega_bias.tools.comparison import Comparison

DECODERS = ("mega_bias", "mega")

# Files that ESPnet opens when it loads a trained transducer, by their keys.
_FILE_KEYS = (("token_list",), ("bpemodel",), ("normalize_conf", "stats_file"))


@dataclass(frozen=True)
class NamedFile:
    """A file that a configuration names by a relative path.

    ESPnet looks for it from the current directory, wherever the configuration lies.

    Args:
        key: Key in the configuration, as a path of keys.
        name: What the configuration says.
        path: Where the file is, as it is written now; None where it was not found.

    """

    key: tuple[str, ...]
    name: str
    path: str | None


@dataclass(frozen=True)
class Conversion:
    """What a conversion wrote, and what it found.

    Args:
        checkpoint: Checkpoint that was written.
        config_file: Configuration that was written.
        source: Model that was converted.
        comparison: Differences between the two decoders.
        files: Files that the configuration names by relative paths.

    """

    checkpoint: Path
    config_file: Path
    source: Experiment
    comparison: "Comparison"
    files: list[NamedFile]


def convert(
    model: Path | str, output: Path | str, to: str, config: Path | str | None = None
) -> Conversion:
    """Write a trained model with the other decoder's name.

    The two decoders have the same parameters under the same names, so the checkpoint
    is copied byte for byte, whatever else is in it. In the configuration, `decoder`
    changes, and so does a relative path that leads nowhere from the current directory
    but does from a folder above the configuration: it becomes absolute.

    Args:
        model: Checkpoint or experiment folder, as for `experiment.load`.
        output: Directory to be made, or an empty one.
        to: Decoder to convert to, "mega_bias" or "mega".
        config: Configuration of the model, if it isn't beside.

    Returns:
        : What was written and found.

    Raises:
        ValueError: If `to` is none of the two.
        ToolError: If the model cannot be read, has another decoder or that one
            already, or if the two decoders differ where they must not. Nothing is
            written then.

    """
    if to not in DECODERS:
        raise ValueError(f"to must be one of {', '.join(DECODERS)}, got {to!r}")

    output = Path(output)
    check_is_free(output)

    experiment = load(model, config)
    chosen = experiment.config.get("decoder")

    if chosen == to:
        raise ToolError(f"{experiment.config_file}: the decoder is {to} already")

    from espnet_mega_bias.tools.comparison import compare

    comparison = compare(experiment)
    comparison.check()

    files = list(_named_files(experiment))
    changes = {("decoder",): to} | {
        file.key: file.path
        for file in files
        if file.path is not None and file.path != file.name
    }
    text = _with_changes(experiment, changes)

    with new_directory(output) as partial:
        (partial / CONFIG).write_bytes(text.encode())
        shutil.copyfile(experiment.checkpoint, partial / experiment.checkpoint.name)

    return Conversion(
        output / experiment.checkpoint.name,
        output / CONFIG,
        experiment,
        comparison,
        files,
    )


def _named_files(experiment: Experiment) -> Iterator[NamedFile]:
    for key in _FILE_KEYS:
        name = _value(experiment.config, key)

        if isinstance(name, str) and name and not Path(name).is_absolute():
            found = experiment.find_file(name)
            path = str(found) if found.is_absolute() else name
            yield NamedFile(key, name, path if found.is_file() else None)


def _value(config: Any, key: tuple[str, ...]) -> Any:
    for part in key:
        config = config.get(part) if isinstance(config, dict) else None

    return config


def _with_changes(experiment: Experiment, changes: dict[tuple[str, ...], str]) -> str:
    """Change values in the text of a configuration, and not a letter beside them.

    Args:
        experiment: Model whose configuration it is.
        changes: New values, by the path of keys.

    Returns:
        : Text of the new configuration.

    Raises:
        ToolError: If the text would not say what it should, as where one value is
            written for several keys (YAML's anchors).

    """
    import yaml

    text = experiment.config_file.read_bytes().decode()
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    places = []

    for key, value in changes.items():
        node = root
        for part in key:
            # The last one counts, where a key stands twice.
            node = [v for k, v in node.value if k.value == part][-1]
        places.append((node.start_mark.index, node.end_mark.index, value))

    for start, end, value in sorted(places, reverse=True):
        # What JSON writes for a string, YAML reads.
        quoted = value if value in DECODERS else json.dumps(value, ensure_ascii=False)
        text = text[:start] + quoted + text[end:]

    wanted = read_config(experiment.config_file)
    for key, value in changes.items():
        within = wanted
        for part in key[:-1]:
            within = within[part]
        within[key[-1]] = value

    try:
        as_wanted = yaml.safe_load(text) == wanted
    except yaml.YAMLError:
        as_wanted = False

    if not as_wanted:
        keys = " and ".join(".".join(key) for key in changes)
        raise ToolError(
            f"{experiment.config_file}: {keys} cannot be changed alone; write it out "
            "without YAML anchors"
        )

    return text
