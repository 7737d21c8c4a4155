"""ESPnet3's ASR system, with stages that can be stopped and started again."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

from espnet2.asr_transducer.espnet_transducer_model import ESPnetASRTransducerModel
from espnet2.asr_transducer.joint_network import JointNetwork
from espnet3.systems.esp2_asr.system import ASRSystem
from espnet3.utils.task_utils import get_task_class
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf, open_dict

from esp2_asr.tokens import write_characters

logger = logging.getLogger(__name__)


def check_model_keys(task: str, model: DictConfig) -> None:
    """Compare the keys of the ``model`` section with what ESPnet takes.

    ESPnet3 passes an unknown key of the section over in silence, and meets one of
    a ``*_conf`` only when it builds the model, two stages later.

    Args:
        task: Dotted path of the task class.
        model: The ``model`` section of the training configuration.

    Raises:
        ValueError: If a key is unknown, with the ones that are known, or if the
            class that is chosen is unknown.
    """

    def check(section: str, given: set[str], known: set[str]) -> None:
        unknown = sorted(given - known)
        if unknown:
            raise ValueError(
                f"{section} in the training configuration has no key "
                f"{', '.join(map(repr, unknown))}; it takes {', '.join(sorted(known))}"
            )

    task_class = get_task_class(task)
    # freeze_param is read by ESPnet3's own wrapper around the model
    check("model", set(model), {*task_class.get_default_config(), "freeze_param"})
    built = {
        "model_conf": ESPnetASRTransducerModel,
        "joint_network_conf": JointNetwork,
    }
    for choices in task_class.class_choices_list:
        built[f"{choices.name}_conf"] = choices.get_class(
            model.get(choices.name, choices.default)
        )
    for section, cls in built.items():
        if cls is not None and model.get(section):
            parameters = inspect.signature(cls).parameters
            # the arguments that the task fills in itself have no default; to these
            # classes it gives none
            free = section in ("frontend_conf", "specaug_conf", "normalize_conf")
            known = {
                n for n, p in parameters.items() if free or p.default is not p.empty
            }
            check(f"model.{section}", set(model[section]), known)


class RecipeSystem(ASRSystem):
    """ASRSystem, changed where a stage could not be run a second time.

    Raises:
        ValueError: If the model section has a key that ESPnet doesn't know.
    """

    def __init__(self, training_config: DictConfig | None = None, **configs) -> None:
        if training_config is not None:
            check_model_keys(training_config.task, training_config.model)
        super().__init__(training_config=training_config, **configs)

    @property
    def _has_characters(self) -> bool:
        """Whether the tokens are characters, which need no model."""
        return self.training_config.dataset.preprocessor.token_type == "char"

    def _tokenizer_files(self) -> list[Path]:
        """Return the tokenizer's files, in the order in which they get into place."""
        tokenizer = self.training_config.tokenizer
        names = ["tokens.txt"]
        if not self._has_characters:
            names += [f"{tokenizer.model_type}.{kind}" for kind in ("vocab", "model")]
        return [Path(tokenizer.save_path) / name for name in names]

    def _has_tokenizer(self) -> bool:
        return all(path.is_file() for path in self._tokenizer_files())

    def _write_characters(self, folder: Path) -> None:
        builder = dict(self.training_config.tokenizer.text_builder)
        texts = get_method(builder.pop("func"))(**builder)
        write_characters(texts, folder / "train.txt", folder / "out" / "tokens.txt")

    def train_tokenizer(self, *args, **kwargs):
        """Make the tokens in a folder of its own, then move them into place.

        ESPnet3 trains in the current directory, and refuses to train again after an
        interruption. Characters are not trained, but counted as ESPnet2 does.
        """
        if self._has_tokenizer():
            return super().train_tokenizer(*args, **kwargs)
        settings = self.training_config.tokenizer
        target = Path(settings.save_path).resolve()
        target.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=target, prefix=".partial.") as folder,
            contextlib.chdir(folder),
        ):
            if self._has_characters:
                self._write_characters(Path(folder))
            else:
                staged = {"save_path": f"{folder}/out"}
                staged["train_file"] = f"{folder}/train.txt"
                self.training_config.tokenizer = OmegaConf.merge(settings, staged)
                try:
                    super().train_tokenizer(*args, **kwargs)
                finally:
                    self.training_config.tokenizer = settings
            for path in self._tokenizer_files():
                os.replace(f"{folder}/out/{path.name}", target / path.name)

    def train(self, *args, **kwargs):
        """Train, with the tokens themselves, not their file's name, in the config.

        The config.yaml beside the checkpoints then holds on any machine.
        """
        if not self._has_tokenizer():
            self.train_tokenizer()
        with self._tokenizer_files()[0].open(encoding="utf-8") as lines:
            tokens = [line.rstrip("\n") for line in lines]
        with open_dict(self.training_config) as config:
            config.model.token_list = tokens
            config.dataset.preprocessor.token_list = tokens
        return super().train(*args, **kwargs)

    def infer(self, *args, **kwargs):
        """Decode, keeping only what the same model and settings decoded before.

        ESPnet3 keeps every finished set, also one of a model trained less.

        Raises:
            FileNotFoundError: If there is no checkpoint.
        """
        config = self.inference_config
        checkpoint = Path(config.model.asr_model_file)
        if not checkpoint.is_file():
            raise FileNotFoundError(f"no checkpoint {checkpoint}: run the train stage")
        wanted = OmegaConf.to_container(config, resolve=True)
        wanted.pop("parallel", None)  # says how, not what
        wanted["sha256"] = hashlib.sha256(checkpoint.read_bytes()).hexdigest()
        text = json.dumps(wanted, indent=1, sort_keys=True)
        folder = Path(config.inference_dir)
        stamp = folder / "decoded_with.json"
        if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == text):
            for entry in config.dataset.test:
                shutil.rmtree(folder / entry.name, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            stamp.write_text(text, encoding="utf-8")
        return super().infer(*args, **kwargs)

    def pack_model(self, *args, **kwargs):
        """Pack, with the statistics of a global normalisation found in the pack.

        ESPnet3 rewrites paths in the configurations that it packs itself, and not in
        the config.yaml beside the checkpoints, which names this file.
        """
        pack = super().pack_model(*args, **kwargs)
        for path in pack.glob("**/config.yaml"):
            config = OmegaConf.load(path)
            stats_file = OmegaConf.select(config, "normalize_conf.stats_file")
            if stats_file is not None:
                (packed,) = pack.glob(f"**/{Path(stats_file).name}")
                # who loads the pack does so from its folder
                config.normalize_conf.stats_file = str(packed.relative_to(pack))
                OmegaConf.save(config, path)
        return pack
