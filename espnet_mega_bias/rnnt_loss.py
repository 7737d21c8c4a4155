"""Transducer (RNN-T) loss on torchaudio, at the boundary that ESPnet expects."""

import math
from collections.abc import Callable
from importlib import metadata

import torch

from espnet_mega_bias.torchaudio_release import torchaudio_pip_line

# torchaudio's kernels count elements in 32 bits.
MAX_ELEMENTS = 2**31 - 1

REDUCTIONS = ("none", "mean", "sum")


class RNNTLoss(torch.nn.Module):
    """Negative log-probability of the labels, summed over all alignments.

    Stands in for `warprnnt_pytorch.RNNTLoss`, called in the same way, and computed in
    float32 by `torchaudio.functional.rnnt_loss`. Lengths and labels may be int32 or
    int64 and on any device; logits may be of any floating type and layout, and wider
    than the longest item. They are copied only where torchaudio could not read them.

    FastEmit favours early labels: the gradient of each label's log-probability is
    multiplied by 1 + `fastemit_lambda`, that of the blank is left alone, and so is the
    loss itself. It takes one more tensor of the logits' size, in float32.

    Source: arXiv:1211.3711, arXiv:2010.11148, and
    HawkAaron/warp-transducer@master pytorch_binding/warprnnt_pytorch/__init__.py

    Args:
        blank: Blank label.
        fastemit_lambda: Weight of FastEmit, at least 0.
        reduction: "mean" over the batch, "sum", or "none".

    Raises:
        ValueError: If `blank` is negative, `fastemit_lambda` is negative or not finite,
            or `reduction` is unknown.

    """

    def __init__(
        self,
        blank: int = 0,
        fastemit_lambda: float = 0.0,
        reduction: str = "mean",
    ) -> None:
        """Construct a RNNTLoss object."""
        super().__init__()

        if blank < 0:
            raise ValueError(f"blank must be at least 0, got {blank}")

        if not 0.0 <= fastemit_lambda < math.inf:
            raise ValueError(
                f"fastemit_lambda must be finite and at least 0, got {fastemit_lambda}"
            )

        if reduction not in REDUCTIONS:
            raise ValueError(
                f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}"
            )

        self.blank = blank
        self.fastemit_lambda = fastemit_lambda
        self.reduction = reduction

    def forward(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        logit_lengths: torch.Tensor,
        target_lengths: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the loss.

        Args:
            logits: Joint network output before the softmax. (B, T, U + 1, V)
            targets: Labels without blanks, anything after the end of each. (B, U),
                int32 or int64
            logit_lengths: Number of frames of each item, at least 1. (B,), integer
            target_lengths: Number of labels of each item. (B,), integer

        Returns:
            : Loss, float32. Scalar, or (B,) with reduction "none"

        Raises:
            ImportError: If torchaudio is missing or does not load.
            ValueError: If shapes, lengths and labels do not go together.

        """
        _check_shapes(logits, targets, logit_lengths, target_lengths)

        # Lengths decide shapes, so the host needs them.
        frames = logit_lengths.tolist()
        labels = target_lengths.tolist()

        _check_lengths(logits, targets, frames, labels)

        if self.blank >= logits.size(-1):
            raise ValueError(
                f"blank {self.blank} is not below the vocabulary size {logits.size(-1)}"
            )

        _check_labels(targets, target_lengths, logits.size(-1), self.blank)

        costs = self._costs(_load_rnnt_loss(), logits, targets, frames, labels)

        if self.reduction == "mean":
            return costs.mean()

        if self.reduction == "sum":
            return costs.sum()

        return costs

    def _costs(
        self,
        rnnt_loss: Callable[..., torch.Tensor],
        logits: torch.Tensor,
        targets: torch.Tensor,
        frames: list[int],
        labels: list[int],
    ) -> torch.Tensor:
        """Compute the loss of each item, in halves where torchaudio needs it.

        Args:
            rnnt_loss: torchaudio's function.
            logits: Joint network output. (B, T, U + 1, V)
            targets: Labels. (B, U)
            frames: Number of frames of each item. [B]
            labels: Number of labels of each item. [B]

        Returns:
            : Losses. (B,)

        """
        # torchaudio wants tensors exactly as long as the longest item.
        logits = logits[:, : max(frames), : max(labels) + 1]
        targets = targets[:, : max(labels)]

        if logits.numel() > MAX_ELEMENTS:
            if len(frames) == 1:
                raise ValueError(
                    f"the logits of one item have {logits.numel()} elements, more than "
                    f"the {MAX_ELEMENTS} that torchaudio's loss can address"
                )

            half = len(frames) // 2

            return torch.cat(
                [
                    self._costs(
                        rnnt_loss,
                        logits[part],
                        targets[part],
                        frames[part],
                        labels[part],
                    )
                    for part in (slice(half), slice(half, None))
                ]
            )

        fused = self.fastemit_lambda == 0.0

        if fused:
            logits = logits.float()
        else:
            logits = logits.log_softmax(-1, dtype=torch.float32)

            if logits.requires_grad:
                logits.register_hook(self._favour_labels)

        return rnnt_loss(
            logits.contiguous(),
            targets.to(logits.device, torch.int32).contiguous(),
            torch.tensor(frames, dtype=torch.int32, device=logits.device),
            torch.tensor(labels, dtype=torch.int32, device=logits.device),
            blank=self.blank,
            reduction="none",
            fused_log_softmax=fused,
        )

    def _favour_labels(self, gradient: torch.Tensor) -> torch.Tensor:
        """Apply FastEmit.

        Args:
            gradient: Gradient with respect to log-probabilities. (B, T, U + 1, V)

        Returns:
            : The same, larger for all but the blank. (B, T, U + 1, V)

        """
        scale = gradient.new_full((gradient.size(-1),), 1.0 + self.fastemit_lambda)
        scale[self.blank] = 1.0

        return gradient * scale


def _check_shapes(
    logits: torch.Tensor,
    targets: torch.Tensor,
    logit_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
) -> None:
    if logits.dim() != 4 or len(logits) == 0 or not logits.is_floating_point():
        raise ValueError(
            "logits must be floating point and (B, T, U + 1, V), got "
            f"{logits.dtype} {tuple(logits.shape)}"
        )

    batch = logits.size(0)

    for name, tensor, dims in (
        ("targets", targets, 2),
        ("logit_lengths", logit_lengths, 1),
        ("target_lengths", target_lengths, 1),
    ):
        if tensor.is_floating_point() or tensor.dtype == torch.bool:
            raise ValueError(f"{name} must be integers, got {tensor.dtype}")

        if tensor.dim() != dims or tensor.size(0) != batch:
            raise ValueError(
                f"{name} must have {dims} dimensions, {batch} items as in logits, got "
                f"{tuple(tensor.shape)}"
            )


def _check_lengths(
    logits: torch.Tensor,
    targets: torch.Tensor,
    frames: list[int],
    labels: list[int],
) -> None:
    if min(frames) < 1:
        raise ValueError(
            f"item {frames.index(min(frames))} has {min(frames)} frames: the loss "
            "needs at least 1 (is the utterance empty or too short?)"
        )

    if max(frames) > logits.size(1):
        raise ValueError(
            f"logit_lengths go up to {max(frames)}, but logits have {logits.size(1)} "
            "frames"
        )

    if min(labels) < 0 or max(labels) > targets.size(1):
        raise ValueError(
            f"target_lengths must be between 0 and {targets.size(1)}, the size of "
            f"targets, got {min(labels)} to {max(labels)}"
        )

    if max(labels) + 1 > logits.size(2):
        raise ValueError(
            f"logits have {logits.size(2)} label positions, but targets of "
            f"{max(labels)} labels need {max(labels) + 1}: one more than labels"
        )


def _check_labels(
    targets: torch.Tensor, target_lengths: torch.Tensor, vocab_size: int, blank: int
) -> None:
    # Outside, torchaudio reads and writes memory that is not its own; for a blank
    # among the labels, its gradient is wrong.
    position = torch.arange(targets.size(1), device=targets.device)
    used = position < target_lengths.to(targets.device).unsqueeze(1)
    bad = (targets < 0) | (targets >= vocab_size) | (targets == blank)
    wrong = targets[used & bad]

    if wrong.numel() > 0:
        raise ValueError(
            f"labels must be from 0 to {vocab_size - 1} and not the blank {blank}, got "
            f"{wrong[0].item()}"
        )


def _load_rnnt_loss() -> Callable[..., torch.Tensor]:
    """Import torchaudio's loss.

    Returns:
        : `torchaudio.functional.rnnt_loss`.

    Raises:
        ImportError: If torchaudio is missing or does not load beside this torch.

    """
    try:
        from torchaudio.functional import rnnt_loss

        # Looked up here: torchaudio imports without its compiled part.
        torch.ops.torchaudio.rnnt_loss_forward  # noqa: B018 (the access is the test)
    except (ImportError, OSError, RuntimeError, AttributeError) as exc:
        raise ImportError(
            "the Transducer loss needs torchaudio, and "
            f"torchaudio {_installed_version('torchaudio')} does not load beside torch "
            f"{torch.__version__} ({type(exc).__name__}: {exc}). Mend it with: "
            f"{torchaudio_pip_line(torch.__version__)}"
        ) from exc

    return rnnt_loss


def _installed_version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "(not installed)"
