"""Pack a trained model so that it decodes in any folder, on any machine.

ESPnet's `espnet2.bin.pack` finds the files that a configuration names (statistics, BPE
model) by their paths, when it is unpacked: they must be relative, to the folder where
it packs. A recipe trains with absolute ones. So all files are gathered in a folder
first, with a configuration that names them there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from recipe.files import RecipeError, replacing

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz")
# of a training's configuration, and needed to decode
NAMED_FILES = (
    ("bpemodel",),
    ("non_linguistic_symbols",),
    ("normalize_conf", "stats_file"),
)


def gather(config: Path, model: Path, folder: Path) -> list[str]:
    """Copy what decoding needs into `folder`, which then holds all that it names.

    Args:
        config: ESPnet's config.yaml of the training.
        model: The checkpoint.
        folder: Gets ``exp``.

    Returns:
        Files beside the configuration and the checkpoint, relative to `folder`.

    Raises:
        RecipeError: If the configuration names a file that is missing.
    """
    import yaml

    (folder / "exp").mkdir()
    shutil.copyfile(model, folder / "exp" / model.name)
    conf = yaml.safe_load(config.read_text(encoding="utf-8"))
    others = []
    for *outer, key in NAMED_FILES:
        section = conf
        for name in outer:
            section = section.get(name) or {}
        if section.get(key) is None:
            continue
        named = Path(section[key])
        if not named.is_file():
            raise RecipeError(
                f"{config}: {'.'.join([*outer, key])} names {named}, which is missing"
            )
        # a folder in the name tells the model zoo's downloader that it is a file's
        others.append(f"exp/{named.name}")
        shutil.copyfile(named, folder / others[-1])
        section[key] = others[-1]
    if conf["decoder"] == "mega_bias":
        others.append("exp/requirements.txt")
        needed = f"espnet-mega-bias>={version('espnet-mega-bias')}\n"
        (folder / others[-1]).write_text(needed, encoding="utf-8")
    with (folder / "exp" / "config.yaml").open("w", encoding="utf-8") as file:
        yaml.safe_dump(conf, file, sort_keys=False, allow_unicode=True)
    return others


def pack(config: Path, model: Path, output: Path, options: list[Path]) -> None:
    """Pack a model with ESPnet's own command.

    Args:
        config: ESPnet's config.yaml of the training.
        model: The checkpoint.
        output: The archive; one of `SUFFIXES` decides its kind.
        options: Further files to go with it.

    Raises:
        RecipeError: If a file is missing, or ESPnet's command fails.
    """
    if not output.name.endswith(SUFFIXES):
        raise RecipeError(f"{output}: a packed model ends in {', '.join(SUFFIXES)}")
    with tempfile.TemporaryDirectory() as name, replacing(output) as partial:
        folder = Path(name)
        others = gather(config, model, folder)
        for path in options:
            others.append(f"exp/{path.name}")
            shutil.copyfile(path, folder / others[-1])
        archive = folder / output.name
        command = [
            *(sys.executable, "-m", "espnet2.bin.pack", "asr"),
            *("--asr_train_config", "exp/config.yaml"),
            *("--asr_model_file", f"exp/{model.name}"),
            *(word for other in others for word in ("--option", other)),
            *("--outpath", archive),
        ]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            why = (done.stderr.strip() or "no message").splitlines()[-1]
            raise RecipeError(f"espnet2.bin.pack: {why}")
        shutil.copyfile(archive, partial)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="of the training")
    parser.add_argument("--model", type=Path, required=True, help="the checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="the archive")
    parser.add_argument("--option", type=Path, action="append", default=[])
    args = parser.parse_args()
    try:
        pack(args.config, args.model, args.output, args.option)
    except (RecipeError, OSError) as exc:
        print(f"pack.py: error: {exc}", file=sys.stderr)
        return 1
    print(f"  {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
