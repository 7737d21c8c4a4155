"""AN4 for ESPnet3: the two names that it looks for in a recipe."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "TEMPLATE"))
from esp2_asr import builder, dataset, modules
from esp2_asr.manifest import Row
from recipe.an4 import Utterance
from recipe.audio import check_audio
from recipe.files import RecipeError

LOCAL = Path(__file__).resolve().parents[2] / "local"
corpus = modules.load(LOCAL / "corpus.py")
cepstra = modules.load(LOCAL / "cepstra.py")


class DatasetBuilder(builder.CorpusBuilder):
    """AN4 from CMU, or from a local archive of audio or of cepstra."""

    CORPUS = corpus
    NAME = "an4"

    def kind_of(self, corpus_dir: Path) -> str:
        """Tell what recordings were unpacked: "audio" or "cepstra".

        Raises:
            RecipeError: If there are none.
        """
        return corpus.kind_of(corpus_dir)

    def utterances(self, corpus_dir: Path) -> dict[str, list[Utterance]]:
        """Check every recording and transcript, and list them by set.

        Raises:
            RecipeError: If one is missing or cannot be used.
        """
        check = {"audio": check_audio, "cepstra": cepstra.read_mfc}
        found = super().utterances(corpus_dir)
        for utterances in found.values():
            for utterance in utterances:
                check[self.kind_of(corpus_dir)](utterance.utt_id, utterance.path)
        return found

    def prepare_source(
        self, download_dir, data_dir, archive=None, recordings=None, **others
    ) -> None:
        """Fetch and unpack what is missing or broken.

        Raises:
            RecipeError: If the archive cannot be had or used.
        """
        if archive is None and recordings == "cepstra":
            raise RecipeError(
                "cepstra are not to be downloaded: name their archive by "
                "AN4_ARCHIVE=FILE or create_dataset.archive"
            )
        super().prepare_source(download_dir, data_dir, archive, recordings, **others)


class Dataset(dataset.ManifestDataset):
    """One set of AN4.

    "speech" is audio at 16 kHz, or the log mel energies that cepstra give, float32 of
    shape (frames, 40).
    """

    SPLITS = ("train_nodev", "train_dev", "test")

    @staticmethod
    def read(row: Row) -> np.ndarray:
        """Return the audio or the features of an utterance.

        Raises:
            RecipeError: If its cepstra cannot be used.
        """
        if row.path.suffix == corpus.KINDS["cepstra"][1]:
            return cepstra.features(cepstra.read_mfc(row.utt_id, row.path))
        return dataset.ManifestDataset.read(row)
