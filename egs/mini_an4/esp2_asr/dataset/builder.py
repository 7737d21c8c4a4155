"""From the archive to one manifest per set."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from espnet3.components.data.dataset_builder import DatasetBuilder

from .manifest import SPLITS, Row, format_manifest, manifest_path


def _load_corpus_module() -> ModuleType:
    """Import ``egs/mini_an4/local/corpus.py``, which both recipes share.

    It is loaded from its path, because ESPnet3 gives this package a made-up name,
    under which no relative import reaches beyond the recipe.
    """
    name = "mini_an4_corpus"
    if name not in sys.modules:
        path = Path(__file__).resolve().parents[2] / "local" / "corpus.py"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # its dataclass looks itself up there
        spec.loader.exec_module(module)
    return sys.modules[name]


corpus = _load_corpus_module()


class MiniAn4Builder(DatasetBuilder):
    """Unpack mini_an4 and list its utterances, for the create_dataset stage.

    Every method takes the keys of ``create_dataset`` in conf/training.yaml:

    Args:
        download_dir: Where the archive is kept and unpacked.
        data_dir: Where the manifests are written.
        archive: A local copy of the archive (or an ESPnet wheel, which holds it);
            None takes the one of the installed ESPnet, or downloads it.
        func, dataset_dir: Keys of ESPnet3's template, without effect here.
    """

    @staticmethod
    def _corpus_dir(download_dir: Path | str) -> Path:
        return Path(download_dir) / "mini_an4"

    def is_source_prepared(
        self, download_dir, data_dir, archive=None, func=None, dataset_dir=None
    ) -> bool:
        """Tell whether every recording and transcript is there and whole.

        False where `archive` is given: only `prepare_source`, which keeps what
        is equal, can tell whether the recordings come from that one.
        """
        if archive is not None:
            return False
        try:
            corpus.splits(self._corpus_dir(download_dir))
        except corpus.CorpusError:
            return False
        return True

    def prepare_source(
        self, download_dir, data_dir, archive=None, func=None, dataset_dir=None
    ) -> None:
        """Fetch and unpack what is missing or broken.

        Raises:
            CorpusError: If the archive cannot be had or used.
        """
        fetched = corpus.fetch_archive(download_dir, archive)
        corpus.extract(fetched, self._corpus_dir(download_dir))

    def _manifests(self, download_dir, data_dir) -> dict[Path, str]:
        """Return the file and the text of each manifest, from checked recordings."""
        found = corpus.splits(self._corpus_dir(download_dir))
        return {
            manifest_path(data_dir, split): format_manifest(
                [Row(item.utt_id, item.path, item.text) for item in found[split]]
            )
            for split in SPLITS
        }

    def is_built(
        self, download_dir, data_dir, archive=None, func=None, dataset_dir=None
    ) -> bool:
        """Tell whether the manifests on disk say what the recordings say."""
        return all(
            path.is_file() and path.read_bytes() == text.encode()
            for path, text in self._manifests(download_dir, data_dir).items()
        )

    def build(
        self, download_dir, data_dir, archive=None, func=None, dataset_dir=None
    ) -> None:
        """Write the manifests.

        Raises:
            CorpusError: If an utterance has no words or no usable audio, or no
                space is left.
        """
        for path, text in self._manifests(download_dir, data_dir).items():
            with corpus.replacing(path) as partial:
                partial.write_text(text, encoding="utf-8")
