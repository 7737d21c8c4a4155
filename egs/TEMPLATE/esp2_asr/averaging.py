"""The average of the best epochs, the last one among them."""

from __future__ import annotations

from pathlib import Path

import lightning
from espnet3.components.callbacks.default_callbacks import AverageCheckpointsCallback


class AverageAtTheEnd(lightning.Callback):
    """Lightning callback that lets ESPnet3 average once more after the training.

    ESPnet3 averages at the end of each validation. Lightning calls the callbacks that
    save checkpoints after all others, so that an average lacks the epoch just
    validated, and the last one never gets into any. Averages of fewer epochs, which
    the first validations left, are removed.
    """

    def on_fit_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        if not trainer.is_global_zero:
            return
        for callback in trainer.callbacks:
            if isinstance(callback, AverageCheckpointsCallback):
                folder = Path(callback.output_dir)
                for best in callback.best_ckpt_callbacks:
                    monitored = best.monitor.replace("/", ".")
                    for old in folder.glob(f"{monitored}.ave_*best.pth"):
                        old.unlink()
                callback.on_validation_end(trainer, pl_module)
