"""A trained model: its checkpoint, and the configuration that lies beside it."""

import argparse
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.quiet import quiet_imports

if TYPE_CHECKING:
    import torch

CONFIG = "config.yaml"

# Checkpoints of an experiment folder, the one that is decoded with first: averages by
# ESPnet2 and ESPnet3, ESPnet2's best and newest, Lightning's newest.
_PREFERRED = ("*.ave.pth", "*.ave_*best.pth", "*.best.pth", "latest.pth", "last.ckpt")


@dataclass(frozen=True)
class Configuration:
    """A configuration, and where it was read.

    Args:
        config_file: File of the configuration.
        config: Configuration, under ESPnet2's keys. ESPnet3's training adds its own.

    """

    config_file: Path
    config: dict[str, Any]

    @property
    def tokens(self) -> list[str]:
        """Tokens, by label.

        Raises:
            ToolError: If the configuration has none.

        """
        tokens = self.config.get("token_list")

        if isinstance(tokens, str):
            try:
                text = self.find_file(tokens).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as exc:
                raise ToolError(f"{self.config_file}: token_list: {exc}") from exc
            # Not splitlines(), which splits at some characters that can be tokens.
            tokens = text.removesuffix("\n").split("\n") if text else None

        if not isinstance(tokens, list) or not tokens:
            raise ToolError(f"{self.config_file}: no token_list")

        return tokens

    def find_file(self, file: str) -> Path:
        """Find a file that the configuration names from where the training ran.

        Args:
            file: Path in the configuration.

        Returns:
            : Path where the file is found, seen from here or from a folder above the
                configuration, else `file` itself.

        """
        folders = [Path(), *self.config_file.absolute().parents]

        return next(
            (folder / file for folder in folders if (folder / file).is_file()),
            Path(file),
        )


@dataclass(frozen=True)
class Experiment(Configuration):
    """A checkpoint with its configuration.

    Args:
        config_file: File of the configuration.
        config: Configuration, as ESPnet's training wrote it.
        checkpoint: File of the weights.
        state: Weights of the whole model, under ESPnet2's names.

    """

    checkpoint: Path
    state: "dict[str, torch.Tensor]"

    def decoder_state(self) -> "dict[str, torch.Tensor]":
        """Give the weights of the decoder, under the decoder's own names.

        Raises:
            ToolError: If the checkpoint has none.

        """
        prefix = "decoder."
        state = {
            name.removeprefix(prefix): value
            for name, value in self.state.items()
            if name.startswith(prefix)
        }

        if not state:
            raise ToolError(f"{self.checkpoint} holds no decoder")

        return state

    def build_decoder(self, name: str | None = None):
        """Build the decoder with its weights.

        Args:
            name: "mega" or "mega_bias", whatever the configuration says.

        Returns:
            : ESPnet's decoder, in evaluation mode.

        Raises:
            ToolError: If it is another decoder, or its weights do not fit.

        """
        decoder_classes = _decoder_classes()
        chosen = self.config.get("decoder")

        if chosen not in ("mega", "mega_bias"):
            raise ToolError(
                f"{self.config_file}: the decoder is {chosen!r}, not mega or mega_bias"
            )

        try:
            decoder = decoder_classes[name or chosen](
                len(self.tokens), **(self.config.get("decoder_conf") or {})
            )
        except Exception as exc:  # from ESPnet's look-ups and typeguard's checks
            raise ToolError(
                f"{self.config_file}: decoder_conf: {type(exc).__name__}: {exc}"
            ) from exc

        self._fill(decoder, self.decoder_state())

        return decoder

    def build_model(self):
        """Build ESPnet's whole model with its weights.

        Returns:
            : ESPnetASRTransducerModel, in evaluation mode.

        Raises:
            ToolError: If the model cannot be built, or the weights do not fit.

        """
        _decoder_classes()
        from espnet2.tasks.asr_transducer import ASRTransducerTask

        config = {**self.config, "token_list": self.tokens}

        if file := (config.get("normalize_conf") or {}).get("stats_file"):
            config["normalize_conf"] = {
                **config["normalize_conf"],
                "stats_file": str(self.find_file(file)),
            }

        # What a part of the model is initialised with comes from the checkpoint.
        config["init"] = None

        try:
            model = ASRTransducerTask.build_model(argparse.Namespace(**config))
        except Exception as exc:  # from any of the model's parts
            raise ToolError(
                f"{self.config_file}: no transducer can be built: "
                f"{type(exc).__name__}: {exc}"
            ) from exc

        self._fill(model, self.state)

        return model

    def _fill(self, module: "torch.nn.Module", state) -> None:
        own = module.state_dict()
        misfits = [
            *(f"{name} is missing" for name in own if name not in state),
            *(f"{name} is unknown" for name in state if name not in own),
            *(
                f"{name} is {tuple(state[name].shape)}, not {tuple(value.shape)}"
                for name, value in own.items()
                if name in state and state[name].shape != value.shape
            ),
        ]

        if misfits:
            more = f", and {len(misfits) - 1} more like it" if misfits[1:] else ""
            raise ToolError(
                f"{self.checkpoint} does not fit {self.config_file}: {misfits[0]}{more}"
            )

        module.load_state_dict(state)
        module.eval()


def load(path: Path | str, config: Path | str | None = None) -> Experiment:
    """Read a trained model.

    Args:
        path: Checkpoint (ESPnet's .pth or Lightning's .ckpt), or the experiment folder
            of ESPnet2 or ESPnet3, whose averaged, else best, else newest one is taken.
        config: The configuration that the training wrote, if it isn't beside.

    Returns:
        : Checkpoint and configuration.

    Raises:
        ToolError: If either is missing, damaged, or of something else.

    """
    path = Path(path)
    checkpoint = _checkpoint_in(path) if path.is_dir() else path
    config_file = checkpoint.parent / CONFIG if config is None else Path(config)

    if not checkpoint.is_file():
        raise ToolError(f"no such file: {checkpoint}")

    if not config_file.is_file():
        raise ToolError(
            f"no configuration {config_file}; if it lies elsewhere, name it (--config)"
        )

    return Experiment(
        config_file, read_config(config_file), checkpoint, read_state(checkpoint)
    )


def read_config(path: Path) -> dict[str, Any]:
    """Read a configuration.

    Raises:
        ToolError: If it is no YAML with keys at its top.

    """
    import yaml

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ToolError(f"{path} is no YAML: {exc}") from exc

    if not isinstance(config, dict):
        raise ToolError(f"{path} holds no keys")

    return config


def read_state(path: Path) -> "dict[str, torch.Tensor]":
    """Read the weights in a checkpoint, on the CPU, without running code in it.

    Args:
        path: What ESPnet2 or ESPnet3 saved: a model, a whole training (ESPnet2's
            checkpoint.pth) or a Lightning checkpoint.

    Returns:
        : Weights, under ESPnet2's names.

    Raises:
        ToolError: If the file is damaged, would run code, or holds no weights.

    """
    import torch

    saved = read_saved(path)

    for key in ("model", "module", "state_dict"):
        if isinstance(saved, dict) and isinstance(saved.get(key), dict):
            saved = saved[key]

    if not (
        isinstance(saved, dict)
        and saved
        and all(isinstance(value, torch.Tensor) for value in saved.values())
    ):
        raise ToolError(f"{path} holds no weights of a model")

    if all(name.startswith("model.") for name in saved):
        saved = {name.removeprefix("model."): value for name, value in saved.items()}

    return saved


def read_saved(path: Path, allowed: Sequence[type] = ()) -> Any:
    """Read what torch saved, on the CPU, without running code in it.

    Args:
        path: File.
        allowed: Classes that the file may hold beside tensors and plain containers.

    Returns:
        : What was saved.

    Raises:
        ToolError: If the file is damaged, or would run code.

    """
    import torch

    # The system's own error, if it cannot be opened, names the file.
    with open(path, "rb") as file:
        try:
            with torch.serialization.safe_globals(list(allowed)):
                return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as exc:
            if refused := re.search(r"GLOBAL (\S+)", str(exc)):
                raise ToolError(
                    f"{path} wants to run code when it is loaded, which is not let: "
                    f"{refused[1]}"
                ) from exc
            raise ToolError(f"{path} is no checkpoint, or damaged") from exc
        except Exception as exc:  # whatever the bytes of a damaged file lead to
            first_sentence = re.split(r"\.\s|\n", str(exc))[0]
            raise ToolError(
                f"{path} is no checkpoint, or damaged: "
                f"{type(exc).__name__}: {first_sentence}"
            ) from exc


def _checkpoint_in(folder: Path) -> Path:
    for pattern in _PREFERRED:
        if found := sorted(path for path in folder.glob(pattern) if path.is_file()):
            return found[0]

    raise ToolError(f"{folder} holds no checkpoint ({', '.join(_PREFERRED)})")


def _decoder_classes() -> dict[str, type]:
    """Give ESPnet's decoders, ours among them."""
    with quiet_imports():
        from espnet2.tasks.asr_transducer import decoder_choices

        from espnet_mega_bias import register

        register()

    return decoder_choices.classes
