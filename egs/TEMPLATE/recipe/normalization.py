"""Say what ESPnet's training is told of the normalisation, an option a line.

As in ESPnet's recipes, features are normalised by the training set's statistics, unless
the training YAML says otherwise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from recipe.files import RecipeError


def options(config: Path, stats_file: Path) -> list[str]:
    """Find the options that a training YAML leaves to the recipe.

    Args:
        config: The training YAML.
        stats_file: The training set's statistics, which need not exist yet.

    Returns:
        An empty list where the YAML chooses another normalisation, or none. Else
        ``--normalize global_mvn`` (in the YAML, ESPnet reads it in any case of
        letters), and the statistics, unless the YAML names its own.

    Raises:
        RecipeError: If the file is no YAML.
    """
    import yaml

    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise RecipeError(f"{config} is no YAML: {' '.join(str(exc).split())}") from exc
    if not isinstance(content, dict):
        content = {}  # what is wrong with it, the check says
    if str(content.get("normalize", "global_mvn")).lower() != "global_mvn":
        return []
    found = ["--normalize", "global_mvn"]
    conf = content.get("normalize_conf")
    if not isinstance(conf, dict) or "stats_file" not in conf:
        found += ["--normalize_conf", f"stats_file={stats_file}"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--stats_file", type=Path, required=True)
    args = parser.parse_args()
    try:
        for option in options(args.config, args.stats_file):
            print(option)
    except (RecipeError, OSError) as exc:
        print(f"normalization.py: error: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
