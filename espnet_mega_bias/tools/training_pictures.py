"""Pictures for TensorBoard during a training with ESPnet3."""

import logging

import lightning
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

from espnet_mega_bias.decoder import MEGABiasDecoder
from espnet_mega_bias.tools.epoch_pictures import TAG
from espnet_mega_bias.tools.learnt import read_learnt
from espnet_mega_bias.tools.pictures import check_matplotlib, draw_blocks, to_pixels
from espnet_mega_bias.tools.plotting import LENGTH

logger = logging.getLogger(__name__)


class TrainingPictures(lightning.Callback):
    """Lightning callback that draws bias and EMA kernels after the validation.

    In ESPnet3's training configuration:

        trainer:
          callbacks:
            - _target_: espnet_mega_bias.tools.training_pictures.TrainingPictures

    The picture is that of `espnet-mega-bias plot`, at the step of the training that
    Lightning's other logs have too. It is drawn from the weights alone: mode, random
    numbers and gradients stay as they are.

    Args:
        every_n_epochs: Draw after the validation of each n-th epoch.
        length: Number of offsets and of lags that are drawn.

    Raises:
        ValueError: If a value is below 1. When the training starts: if the decoder is
            not mega_bias, or its weights are divided among processes.
        ToolError: If Matplotlib is missing.

    """

    def __init__(self, every_n_epochs: int = 1, length: int = LENGTH) -> None:
        """Construct a TrainingPictures object."""
        for key, value in (("every_n_epochs", every_n_epochs), ("length", length)):
            if value < 1:
                raise ValueError(f"{key} must be at least 1, got {value}")

        check_matplotlib()

        self.every_n_epochs = every_n_epochs
        self.length = length

    def on_fit_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Check that there is something to draw, and where to."""
        if not isinstance(pl_module.model.decoder, MEGABiasDecoder):
            raise ValueError(
                "TrainingPictures draws what decoder: mega_bias has learnt, got "
                f"{type(pl_module.model.decoder).__name__}"
            )

        if isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy):
            raise ValueError(
                "TrainingPictures needs all weights in one process, got "
                f"{type(trainer.strategy).__name__}"
            )

        if trainer.is_global_zero and not _writers(trainer):
            logger.warning("TrainingPictures draws nothing: there is no TensorBoard")

    def on_validation_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Draw, if it is the turn of this epoch."""
        if (
            trainer.sanity_checking
            or not trainer.is_global_zero
            or (trainer.current_epoch + 1) % self.every_n_epochs != 0
            or not (writers := _writers(trainer))
        ):
            return

        with torch.no_grad():
            learnt = read_learnt(pl_module.model.decoder, self.length)

        pixels = to_pixels(draw_blocks({"": learnt}))

        for writer in writers:
            writer.add_image(TAG, pixels, trainer.global_step, dataformats="HWC")


def _writers(trainer: lightning.Trainer) -> list:
    """Give what writes TensorBoard's logs."""
    return [
        log.experiment for log in trainer.loggers if isinstance(log, TensorBoardLogger)
    ]
