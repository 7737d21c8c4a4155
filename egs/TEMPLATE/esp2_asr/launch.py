"""The command of a recipe: ESPnet3's, with this recipe's configurations as defaults."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

STAGES = [
    "create_dataset",
    "train_tokenizer",
    "collect_stats",
    "train",
    "infer",
    "measure",
    "pack_model",
]
ROLES = ("training", "inference", "metrics", "publication")


def main(recipe: Path) -> None:
    """Hand the command line to ESPnet3.

    Args:
        recipe: Folder of the recipe, which has ``conf/<role>.yaml`` for each role.
    """
    # the models are small: threads gain little, and lose much where they must wait
    # for a core that another program has
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        import jiwer  # noqa: F401  (for the scores: better missed now than at the end)
        from espnet3.systems.launch import build_parser, launch

        import espnet_mega_bias  # noqa: F401  (its decoder registers at start-up)
        from esp2_asr.system import RecipeSystem
    except ModuleNotFoundError as exc:
        sys.exit(
            f"this recipe needs ESPnet 202611 (Python 3.12 or 3.13) and what it trains "
            f"and scores with: {exc}. pip install -e '{recipe.parents[2]}[egs3]'"
        )
    logging.getLogger("distributed").setLevel(logging.WARNING)  # it hides the progress

    parser = build_parser(RecipeSystem)
    parser.set_defaults(
        stages=STAGES,
        **{f"{role}_config": recipe / "conf" / f"{role}.yaml" for role in ROLES},
    )
    argv = sys.argv[1:]
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # Lightning starts each further training process with the same command
        argv += ["--stages", "train"]
    launch(
        RecipeSystem, conf_package="egs3.TEMPLATE.esp2_asr", parser=parser, argv=argv
    )
