"""Registration with ESPnet: the decoder `mega_bias` and a transducer loss to train it.

ESPnet looks decoders up in two module-level tables, ESPnet2's and ESPnet3's. Its
transducer model asks for the loss in `warprnnt_pytorch`, a package that has to be
compiled by hand; the model gets torchaudio's loss where that package is missing or
unusable. torch and ESPnet are imported where they are used: a process that imports
neither host module needs neither.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import re
import sys
import threading
from types import ModuleType
from typing import TYPE_CHECKING

from espnet_mega_bias_autoload import HOST_MODULES, install_finder

if TYPE_CHECKING:
    import torch
    from espnet2.asr_transducer.espnet_transducer_model import (
        ESPnetASRTransducerModel,
    )
    from espnet2.train.class_choices import ClassChoices

DECODER_NAME = "mega_bias"
OLDEST_ESPNET = 202511
TESTED_ESPNET = 202611

_SUPPORTED = (
    f"espnet_mega_bias needs ESPnet {OLDEST_ESPNET} or newer "
    f"(tested up to {TESTED_ESPNET}): pip install 'espnet>={OLDEST_ESPNET}'"
)
_MARK = "_espnet_mega_bias"

# One problem whose loss and gradient are known: 2 frames, 1 label, 3 symbols. The
# distributions at (frame, label position) are, over (blank, label, other symbol):
_WEIGHTS = (((1, 2, 3), (2, 1, 1)), ((1, 1, 2), (3, 1, 1)))
# Label in frame 0: 2/6 * 2/4 * 3/5 = 0.1; in frame 1: 1/6 * 1/4 * 3/5 = 0.025.
_COST = math.log(8)
# occupancy * distribution - expected transition, with respect to the logits.
_GRADIENT = (
    ((-1 / 30, -7 / 15, 1 / 2), (-0.4, 0.2, 0.2)),
    ((0.05, -0.15, 0.1), (-0.4, 0.2, 0.2)),
)

_decision_lock = threading.Lock()
_announced: set[str] = set()


def register() -> None:
    """Add `mega_bias` to ESPnet's decoders in this process.

    Does by hand what the start-up hook does: registers with the ESPnet modules that
    are imported already, and leaves a finder that registers with those imported
    later. Calling it again changes nothing.

    Raises:
        ImportError: If ESPnet is not installed.
        RuntimeError: If ESPnet is too old, or another class has the decoder's name.
    """
    check_espnet()
    install_finder()
    for name in HOST_MODULES:
        if name in sys.modules:
            # Not sys.modules[name]: another thread may still be executing it.
            register_module(importlib.import_module(name))


def register_module(module: ModuleType) -> None:
    """Register with one of ESPnet's modules.

    Args:
        module: A module named in `HOST_MODULES`, after it ran.

    Raises:
        ImportError: If ESPnet is not installed.
        RuntimeError: If ESPnet is too old, another class has the decoder's name, or
            the module lacks the table or the class that belongs there.
    """
    check_espnet()
    attribute, add = (
        ("ESPnetASRTransducerModel", add_loss_fallback)
        if module.__name__ == "espnet2.asr_transducer.espnet_transducer_model"
        else ("decoder_choices", add_decoder)
    )
    if not hasattr(module, attribute):
        raise RuntimeError(
            f"{module.__name__} has no {attribute}: either its import is still under "
            "way, or this ESPnet differs from the tested ones. " + _SUPPORTED
        )
    add(getattr(module, attribute))


def check_espnet() -> None:
    """Check that a supported ESPnet is there.

    Raises:
        ImportError: If ESPnet is not installed.
        RuntimeError: If ESPnet is too old.
    """
    try:
        import espnet2
    except ModuleNotFoundError as exc:
        if exc.name != "espnet2":
            raise
        raise ImportError(f"ESPnet is not installed. {_SUPPORTED}") from exc

    version = espnet2.__version__
    # ESPnet calls a source tree that pip never installed 0.0.0.
    release = re.match(r"\d+", version)
    if version != "0.0.0" and release and int(release[0]) < OLDEST_ESPNET:
        raise RuntimeError(f"ESPnet {version} is installed. {_SUPPORTED}")


def add_decoder(choices: ClassChoices) -> None:
    """Add the decoder to one of ESPnet's tables.

    Args:
        choices: ESPnet's table of decoders.

    Raises:
        RuntimeError: If another class has the name already.
        TypeError: If the table takes another kind of decoder.
    """
    from espnet_mega_bias.decoder import MEGABiasDecoder

    if not issubclass(MEGABiasDecoder, choices.base_type):
        raise TypeError(
            f"the table takes subclasses of {_full_name(choices.base_type)}, and "
            f"{_full_name(MEGABiasDecoder)} is none"
        )
    present = choices.classes.get(DECODER_NAME, MEGABiasDecoder)
    # By name: after a reload, the class that was registered is an older copy.
    if _full_name(present) != _full_name(MEGABiasDecoder):
        raise RuntimeError(
            f"the decoder name {DECODER_NAME!r} belongs to {_full_name(present)} "
            f"already; {_full_name(MEGABiasDecoder)} was not registered"
        )
    choices.classes[DECODER_NAME] = MEGABiasDecoder


def add_loss_fallback(model_class: type[ESPnetASRTransducerModel]) -> None:
    """Let a model without a transducer loss get a usable one at its first batch.

    The choice waits for the first loss, because only training needs one: building,
    loading and decoding a model import no loss library.

    Args:
        model_class: ESPnet's transducer model. Wrapped once.
    """
    compute = model_class._calc_transducer_loss
    if hasattr(compute, _MARK):
        return

    @functools.wraps(compute)
    def _calc_transducer_loss(self, encoder_out, joint_out, *args, **kwargs):
        if self.criterion_transducer is None:
            choose_criterion(self, joint_out.device)
        return compute(self, encoder_out, joint_out, *args, **kwargs)

    setattr(_calc_transducer_loss, _MARK, True)
    model_class._calc_transducer_loss = _calc_transducer_loss


def choose_criterion(model: ESPnetASRTransducerModel, device: torch.device) -> None:
    """Give the model torchaudio's loss, unless `warprnnt_pytorch` does its work.

    Args:
        model: A model without a criterion. Left alone where ESPnet's own is usable.
        device: Where the loss will be computed.

    Raises:
        ValueError: If the model's FastEmit weight is negative or not finite, and
            `warprnnt_pytorch` is not usable.
    """
    with _decision_lock:
        defect = warprnnt_defect(str(device), model.fastemit_lambda)
        if defect is None:
            return

        from espnet_mega_bias.rnnt_loss import RNNTLoss

        model.criterion_transducer = RNNTLoss(
            blank=0, fastemit_lambda=model.fastemit_lambda, reduction="mean"
        )
        if defect not in _announced:
            _announced.add(defect)
            logging.getLogger(__name__).warning(
                "espnet_mega_bias: the transducer loss is torchaudio's: %s", defect
            )


@functools.cache
def warprnnt_defect(device: str, fastemit_lambda: float) -> str | None:
    """Say why the loss that ESPnet asks for cannot be used.

    An import proves little: builds without their GPU part, builds for another torch,
    and packages of the same name are common. So the loss computes a problem with a
    known answer.

    Args:
        device: Where the loss will be computed, such as ``"cuda:0"``.
        fastemit_lambda: The model's FastEmit weight.

    Returns:
        The reason in words, or None where `warprnnt_pytorch` is usable.
    """
    try:
        from warprnnt_pytorch import RNNTLoss
    except ModuleNotFoundError as exc:
        if exc.name == "warprnnt_pytorch":
            return "warprnnt_pytorch is not installed"
        return f"importing warprnnt_pytorch fails ({_describe(exc)})"
    except Exception as exc:
        return f"importing warprnnt_pytorch fails ({_describe(exc)})"

    weights = sorted({0.0, fastemit_lambda})
    try:
        losses = [RNNTLoss(reduction="mean", fastemit_lambda=w) for w in weights]
    except Exception as exc:
        return (
            "warprnnt_pytorch's RNNTLoss rejects reduction='mean' with "
            f"fastemit_lambda={fastemit_lambda} ({_describe(exc)})"
        )
    try:
        plain, *with_fastemit = (_solve(loss, device) for loss in losses)
    except Exception as exc:
        return f"warprnnt_pytorch fails on {device} ({_describe(exc)})"

    import torch

    cost, gradient = plain
    if not math.isclose(cost, _COST, rel_tol=1e-4):
        return (
            f"warprnnt_pytorch computes {cost:.6g} on {device} where {_COST:.6g} is "
            "right"
        )
    if not torch.allclose(gradient, torch.tensor(_GRADIENT), atol=1e-4):
        return f"warprnnt_pytorch computes a wrong gradient on {device}"
    # FastEmit's cost and gradient depend on the implementation.
    for cost, gradient in with_fastemit:
        if not (math.isfinite(cost) and gradient.isfinite().all()):
            return (
                f"warprnnt_pytorch computes values that are not finite on {device} "
                f"with fastemit_lambda={fastemit_lambda}"
            )
    return None


def _solve(loss: torch.nn.Module, device: str) -> tuple[float, torch.Tensor]:
    """Compute the known problem as ESPnet's model would.

    Args:
        loss: Called as ESPnet calls it: (logits, targets, logit lengths, target
            lengths).
        device: Where to compute.

    Returns:
        The cost, and the gradient with respect to the logits on the CPU, (T, U+1, V).
    """
    import torch

    # The first loss of a process may be a validation loss.
    with torch.inference_mode(False), torch.enable_grad():
        logits = torch.tensor([_WEIGHTS], dtype=torch.float32, device=device).log()
        logits.requires_grad_()
        integers = [
            torch.tensor(values, dtype=torch.int32, device=device)
            for values in ([[1]], [2], [1])
        ]
        cost = loss(logits, *integers)
        cost.sum().backward()
    return cost.sum().item(), logits.grad[0].float().cpu()


def _describe(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
