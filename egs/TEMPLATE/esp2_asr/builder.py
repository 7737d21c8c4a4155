"""From the archive of a corpus to one manifest per set."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import ClassVar

from espnet3.components.data.dataset_builder import DatasetBuilder
from recipe.an4 import Utterance
from recipe.files import RecipeError, replacing

from esp2_asr.manifest import Row, format_manifest, manifest_path


class CorpusBuilder(DatasetBuilder):
    """Unpack a corpus and list its utterances, for the create_dataset stage.

    A recipe's class sets `CORPUS`, its local/corpus.py with `fetch_archive`, `extract`
    and `splits`, and `NAME`, the folder that gets what is unpacked.

    Every method takes the keys of ``create_dataset`` in conf/training.yaml:

    Args:
        download_dir: Where the archive is kept and unpacked.
        data_dir: Where the manifests are written.
        archive: A local copy of the archive; None takes what the recipe has by itself.
        recordings: What the corpus must hold, of what `kind_of` tells; None takes any.
        func, dataset_dir: Keys of ESPnet3's template, without effect here.
    """

    CORPUS: ClassVar[ModuleType]
    NAME: ClassVar[str]

    def kind_of(self, corpus_dir: Path) -> str:
        """Tell what recordings were unpacked."""
        return "audio"

    def utterances(self, corpus_dir: Path) -> dict[str, list[Utterance]]:
        """Check every recording and transcript, and list them by set."""
        return self.CORPUS.splits(corpus_dir)

    def _corpus_dir(self, download_dir: Path | str) -> Path:
        return Path(download_dir) / self.NAME

    def _checked(self, download_dir, recordings) -> dict[str, list[Utterance]]:
        corpus_dir = self._corpus_dir(download_dir)
        kind = self.kind_of(corpus_dir)
        if recordings not in (None, kind):
            raise RecipeError(
                f"{corpus_dir} holds {kind}, and create_dataset.recordings of the "
                f"training configuration wants {recordings}"
            )
        return self.utterances(corpus_dir)

    def is_source_prepared(
        self,
        download_dir,
        data_dir,
        archive=None,
        recordings=None,
        func=None,
        dataset_dir=None,
    ) -> bool:
        """Tell whether every recording and transcript is there and whole.

        False where `archive` is given: only `prepare_source`, which keeps what
        is equal, can tell whether the recordings come from that one.
        """
        if archive is not None:
            return False
        try:
            self._checked(download_dir, recordings)
        except RecipeError:
            return False
        return True

    def prepare_source(
        self,
        download_dir,
        data_dir,
        archive=None,
        recordings=None,
        func=None,
        dataset_dir=None,
    ) -> None:
        """Fetch and unpack what is missing or broken.

        Raises:
            RecipeError: If the archive cannot be had or used.
        """
        local = None if archive is None else Path(archive)
        fetched = self.CORPUS.fetch_archive(Path(download_dir), local)
        self.CORPUS.extract(fetched, self._corpus_dir(download_dir))

    def _manifests(self, download_dir, data_dir, recordings) -> dict[Path, str]:
        """Return the file and the text of each manifest, from checked recordings."""
        return {
            manifest_path(data_dir, split): format_manifest(
                [Row(item.utt_id, item.path, item.text) for item in utterances]
            )
            for split, utterances in self._checked(download_dir, recordings).items()
        }

    def is_built(
        self,
        download_dir,
        data_dir,
        archive=None,
        recordings=None,
        func=None,
        dataset_dir=None,
    ) -> bool:
        """Tell whether the manifests on disk say what the recordings say."""
        manifests = self._manifests(download_dir, data_dir, recordings)
        return all(
            path.is_file() and path.read_bytes() == text.encode()
            for path, text in manifests.items()
        )

    def build(
        self,
        download_dir,
        data_dir,
        archive=None,
        recordings=None,
        func=None,
        dataset_dir=None,
    ) -> None:
        """Write the manifests.

        Raises:
            RecipeError: If an utterance has no words or no usable recording, or no
                space is left.
        """
        manifests = self._manifests(download_dir, data_dir, recordings)
        for path, text in manifests.items():
            with replacing(path) as partial:
                partial.write_text(text, encoding="utf-8")
