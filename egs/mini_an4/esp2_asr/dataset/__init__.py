"""mini_an4 for ESPnet3: the two names that it looks for in a recipe."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "TEMPLATE"))
from esp2_asr import builder, dataset, modules

LOCAL = Path(__file__).resolve().parents[2] / "local"


class DatasetBuilder(builder.CorpusBuilder):
    """mini_an4 from the installed ESPnet, an ESPnet wheel, or a local archive."""

    CORPUS = modules.load(LOCAL / "corpus.py")
    NAME = "mini_an4"


class Dataset(dataset.ManifestDataset):
    """One set of mini_an4; "speech" is audio at 16 kHz."""

    SPLITS = ("train", "valid", "test")
