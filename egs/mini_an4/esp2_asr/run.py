#!/usr/bin/env python3
"""mini_an4 with a rotary MEGA decoder, in ESPnet3's form; README.md tells more.

`python run.py` does everything, from the data to a scored, packed model.
`python run.py --help` lists the stages and the configurations.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

RECIPE = Path(__file__).resolve().parent
STAGES = [
    "create_dataset",
    "train_tokenizer",
    "collect_stats",
    "train",
    "infer",
    "measure",
    "pack_model",
]


def main() -> None:
    """Hand the command line to ESPnet3, with this recipe's defaults."""
    # the model is small: threads gain little, and lose much where they must wait
    # for a core that another program has
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        import jiwer  # noqa: F401  (for the scores: better missed now than at the end)
        from espnet3.systems.launch import build_parser, launch
        from src.system import MiniAn4System

        import espnet_mega_bias  # noqa: F401  (its decoder registers at start-up)
    except ModuleNotFoundError as exc:
        sys.exit(
            f"this recipe needs ESPnet 202611 (Python 3.12 or 3.13) and what it trains "
            f"and scores with: {exc}. pip install -e '{RECIPE.parents[2]}[egs3]'"
        )
    logging.getLogger("distributed").setLevel(logging.WARNING)  # it hides the progress

    parser = build_parser(MiniAn4System)
    parser.set_defaults(
        stages=STAGES,
        training_config=RECIPE / "conf" / "training.yaml",
        inference_config=RECIPE / "conf" / "inference.yaml",
        metrics_config=RECIPE / "conf" / "metrics.yaml",
        publication_config=RECIPE / "conf" / "publication.yaml",
    )
    argv = sys.argv[1:]
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # Lightning starts each further training process with the same command
        argv += ["--stages", "train"]
    launch(
        MiniAn4System, conf_package="egs3.TEMPLATE.esp2_asr", parser=parser, argv=argv
    )


# worker processes import this file again, and must not start all over
if __name__ == "__main__":
    main()
