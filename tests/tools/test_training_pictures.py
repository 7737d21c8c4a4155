import importlib
import io
import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from espnet_mega_bias import MEGABiasDecoder
from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.learnt import read_learnt
from espnet_mega_bias.tools.pictures import draw_blocks, to_pixels

lightning = pytest.importorskip("lightning", reason="ESPnet3 came with ESPnet 202611")
loggers = lightning.pytorch.loggers
# Not at the top, since it imports lightning.
training_pictures = importlib.import_module("espnet_mega_bias.tools.training_pictures")
TrainingPictures = training_pictures.TrainingPictures

TARGET = "espnet_mega_bias.tools.training_pictures.TrainingPictures"
VOCAB = 7


class Training(lightning.LightningModule):
    """A decoder that is trained on random labels, with dropout."""

    def __init__(self, decoder=None):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.decoder = decoder or MEGABiasDecoder(
            VOCAB,
            block_size=6,
            linear_size=8,
            qk_size=4,
            v_size=5,
            num_blocks=1,
            rel_pos_bias_type="rotary",
            dropout_rate=0.3,
        )

    def training_step(self, labels, _):
        return self.model.decoder(labels).square().mean()

    def validation_step(self, labels, _):
        self.model.decoder(labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self):
        batches = list(torch.randint(1, VOCAB, (2, 3, 5)))

        return torch.utils.data.DataLoader(batches, batch_size=None)

    val_dataloader = train_dataloader


def train(folder, callbacks, epochs=3, log=loggers.TensorBoardLogger, module=None):
    torch.manual_seed(1)
    module = module or Training()
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=callbacks,
        logger=log(folder),
        max_epochs=epochs,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module)

    return module.model.decoder


def read_images(folder):
    (events,) = folder.rglob("events.*")
    events = EventAccumulator(str(events.parent), size_guidance={"images": 0}).Reload()

    return {
        tag: {image.step: image.encoded_image_string for image in events.Images(tag)}
        for tag in events.Tags()["images"]
    }


def pixels_of(encoded):
    with Image.open(io.BytesIO(encoded)) as image:
        return np.asarray(image)


@pytest.fixture
def _no_drawing(monkeypatch):
    """Spare the time where it matters only which pictures there are."""
    monkeypatch.setattr(
        training_pictures, "to_pixels", lambda figure: np.zeros((4, 4, 3), np.uint8)
    )


def test_the_picture_is_that_of_the_weights_and_changes_no_training(tmp_path):
    plain = train(tmp_path / "plain", [])
    drawn = train(tmp_path / "drawn", [TrainingPictures(every_n_epochs=3, length=12)])

    for name, value in plain.state_dict().items():
        assert torch.equal(drawn.state_dict()[name], value)

    assert drawn.training == plain.training

    images = read_images(tmp_path / "drawn")
    assert {tag: list(steps) for tag, steps in images.items()} == {"mega_bias": [6]}
    np.testing.assert_array_equal(
        pixels_of(images["mega_bias"][6]),
        to_pixels(draw_blocks({"": read_learnt(drawn, 12)})),
    )


@pytest.mark.usefixtures("_no_drawing")
@pytest.mark.parametrize(("every", "steps"), [(1, [2, 4, 6, 8]), (2, [4, 8])])
def test_draws_after_the_validation_of_each_nth_epoch(tmp_path, every, steps):
    train(tmp_path, [TrainingPictures(every)], epochs=4)

    assert list(read_images(tmp_path)["mega_bias"]) == steps


@pytest.mark.usefixtures("_no_drawing")
def test_mode_random_numbers_and_gradients_stay(tmp_path):
    module = Training().train()
    module.training_step(torch.ones(1, 4, dtype=torch.long), 0).backward()
    before = [(p.clone(), p.grad) for p in module.parameters()]
    gradients = [grad if grad is None else grad.clone() for _, grad in before]
    state = torch.get_rng_state()
    log = loggers.TensorBoardLogger(tmp_path)
    trainer = SimpleNamespace(
        sanity_checking=False,
        is_global_zero=True,
        current_epoch=0,
        global_step=1,
        loggers=[log],
    )
    TrainingPictures().on_validation_end(trainer, module)
    log.finalize("success")

    assert list(read_images(tmp_path)["mega_bias"]) == [1]
    assert module.model.decoder.training
    assert torch.equal(torch.get_rng_state(), state)

    for parameter, (value, held), grad in zip(
        module.parameters(), before, gradients, strict=True
    ):
        assert torch.equal(parameter, value)
        assert parameter.grad is held
        assert grad is None or torch.equal(parameter.grad, grad)


def test_only_the_first_process_draws(monkeypatch):
    monkeypatch.setattr(
        training_pictures, "_writers", lambda trainer: pytest.fail("draws")
    )
    trainer = SimpleNamespace(
        sanity_checking=False, is_global_zero=False, current_epoch=0
    )
    TrainingPictures().on_validation_end(trainer, Training())


def test_another_logger_is_told_once_and_the_training_goes_on(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger=training_pictures.__name__):
        train(tmp_path, [TrainingPictures()], log=loggers.CSVLogger)

    (record,) = [r for r in caplog.records if r.name == training_pictures.__name__]
    assert "no TensorBoard" in record.getMessage()


def test_another_decoder_stops_the_training_before_it_starts(tmp_path):
    with pytest.raises(ValueError, match="decoder: mega_bias has learnt, got Linear"):
        train(tmp_path, [TrainingPictures()], module=Training(torch.nn.Linear(2, 2)))


def test_weights_that_are_divided_among_processes_are_refused():
    trainer = SimpleNamespace(strategy=lightning.pytorch.strategies.FSDPStrategy())

    with pytest.raises(ValueError, match="in one process, got FSDPStrategy"):
        TrainingPictures().on_fit_start(trainer, Training())


@pytest.mark.parametrize("key", ["every_n_epochs", "length"])
def test_values_below_one_are_refused(key):
    with pytest.raises(ValueError, match=f"{key} must be at least 1, got 0"):
        TrainingPictures(**{key: 0})


def test_a_missing_matplotlib_is_told_before_the_training(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(ToolError, match=r"pip install 'espnet-mega-bias\[plot\]'"):
        TrainingPictures()


class RandomFeatures(torch.utils.data.Dataset):
    """Utterances of random features, as ESPnet3's data organizer gives them."""

    use_espnet_collator = True

    def __init__(self):
        self.datasets = [self]
        self.train = self.valid = self

    def log_summary(self, logger):
        """Say nothing."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        draw = np.random.default_rng(index)
        text = draw.integers(1, VOCAB, 3)

        return str(index), {
            "speech": draw.normal(size=(40, 10)).astype(np.float32),
            "text": text,
        }


@pytest.mark.slow
def test_espnet3_trains_with_the_entry_beside_its_own_callbacks(
    tmp_path, make_experiment
):
    pytest.importorskip("espnet3")
    from espnet3.systems.base.training import train as train_espnet3
    from omegaconf import OmegaConf

    written = yaml.safe_load((make_experiment() / "config.yaml").read_text())
    kept = ("token_list", "input_size", "frontend", "encoder_conf", "decoder")
    kept += ("decoder_conf", "joint_network_conf")
    loader = {"iter_factory": None, "batch_size": 2}
    precision = torch.get_float32_matmul_precision()

    try:
        train_espnet3(
            OmegaConf.create(
                {
                    "task": "espnet3.systems.esp2_asr.src.transducer_task."
                    "ASRTransducerTask",
                    "exp_dir": str(tmp_path / "espnet3"),
                    "num_device": 1,
                    "seed": 1,
                    "dataset": {"_target_": f"{__name__}.RandomFeatures"},
                    "dataloader": {
                        "collate_fn": {
                            "_target_": "espnet2.train.collate_fn.CommonCollateFn",
                            "int_pad_value": -1,
                        },
                        "train": loader,
                        "valid": loader,
                    },
                    "model": {key: written[key] for key in kept},
                    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
                    "scheduler": {
                        "_target_": "espnet2.schedulers.warmup_lr.WarmupLR",
                        "warmup_steps": 1,
                    },
                    "scheduler_interval": "step",
                    "best_model_criterion": [],
                    "trainer": {
                        "accelerator": "cpu",
                        "max_epochs": 2,
                        "log_every_n_steps": 1,
                        "logger": [
                            {
                                "_target_": "lightning.pytorch.loggers."
                                "TensorBoardLogger",
                                "save_dir": str(tmp_path / "tensorboard"),
                            }
                        ],
                        "callbacks": [{"_target_": TARGET}],
                    },
                }
            )
        )
    finally:
        torch.set_float32_matmul_precision(precision)

    images = read_images(tmp_path / "tensorboard")["mega_bias"]
    assert list(images) == [2, 4]
    assert min(pixels_of(images[4]).shape[:2]) > 300
    assert not np.array_equal(pixels_of(images[2]), pixels_of(images[4]))
    # ESPnet3's own callback is still there.
    assert (tmp_path / "espnet3" / "last.ckpt").exists()
