"""egs/an4/esp2_asr: the data, the configurations, and its stages on a small corpus."""

import importlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import yaml

EGS = Path(__file__).resolve().parents[2] / "egs"
RECIPE, TEMPLATE = EGS / "an4" / "esp2_asr", EGS / "TEMPLATE"
ESPNET2 = EGS / "an4" / "asr_transducer1" / "conf" / "train_mega_bias_rotary.yaml"
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("espnet3", "lightning", "jiwer"))),
    reason="ESPnet3's recipes came with ESPnet 202611",
)
WORDS = {
    "train": {
        "an1-fa-b": "YES",
        "an2-fa-b": "NO",
        "an3-mb-b": "R U B OUT",
        "an4-mc-b": "ENTER",
    },
    "test": {"an5-md-b": "SO"},
}
FRAMES = 120


@pytest.fixture
def modules(monkeypatch):
    """Import from the recipe as run.py does, and forget it afterwards."""
    monkeypatch.syspath_prepend(str(TEMPLATE))
    monkeypatch.syspath_prepend(str(RECIPE))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.split(".")[0] in {"src", "dataset", "an4_corpus", "an4_cepstra"}:
            del sys.modules[name]


@pytest.fixture
def dataset(modules, monkeypatch):
    """The recipe's dataset, for a corpus of a few utterances."""
    module = modules("dataset")
    counts = {name: len(words) for name, words in WORDS.items()}
    monkeypatch.setattr(module.corpus, "UTTERANCES", counts)
    monkeypatch.setattr(module.corpus, "DEV_SIZE", 1)
    return module


@pytest.fixture
def archive(tmp_path):
    """An archive of cepstra."""
    members, noise = {}, np.random.default_rng(0)
    for name, words in WORDS.items():
        lines = [f"{text} ({source})\n" for source, text in words.items()]
        members[f"an4/etc/an4_{name}.transcription"] = "".join(lines).encode()
        folder = {"train": "an4_clstk", "test": "an4test_clstk"}[name]
        for source in words:
            values = noise.normal(size=(FRAMES, 13)).astype(">f4").tobytes()
            path = f"an4/feat/{folder}/{source.split('-')[1]}/{source}.mfc"
            members[path] = (len(values) // 4).to_bytes(4, "big") + values
    path = tmp_path / "cepstra.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def places(dataset, archive, tmp_path):
    """Keyword arguments for the builder, after it has done its work."""
    places = {
        "download_dir": tmp_path / "downloads",
        "data_dir": tmp_path / "data",
        "recordings": "cepstra",
    }
    builder = dataset.DatasetBuilder()
    assert not builder.is_source_prepared(**places)
    builder.prepare_source(**places, archive=archive)
    assert builder.is_source_prepared(**places)
    assert not builder.is_built(**places)
    builder.build(**places)
    assert builder.is_built(**places)
    return places


def load(modules, name, role=None):
    """Read a configuration as ESPnet3 does."""
    loaded = modules("espnet3.utils.config_utils").load_and_merge_config(
        RECIPE / "conf" / f"{name}.yaml",
        config_name=f"{role or name.split('_')[0]}.yaml",
        default_package="egs3.TEMPLATE.esp2_asr",
        resolve=False,
    )
    return modules("omegaconf").OmegaConf.to_container(loaded, resolve=True)


@pytest.mark.parametrize("name", ["training", "training_cepstra", "training_ddp"])
def test_model_optimiser_and_schedule_are_those_of_espnet2s_form(modules, name):
    theirs = yaml.safe_load(ESPNET2.read_text())
    ours = load(modules, name)
    classes = modules("espnet2.tasks.abs_task")
    task2 = modules("espnet2.tasks.asr_transducer").ASRTransducerTask
    task3 = modules("espnet3.utils.task_utils").get_task_class(ours["task"])
    batches = ours["dataloader"]["train"]["iter_factory"]["batches"]
    trainer = ours["trainer"]

    model = {k: v for k, v in ours["model"].items() if k != "token_list"}
    assert model.pop("input_size", None) == (40 if "cepstra" in name else None)

    default2, default3 = task2.get_default_config(), task3.get_default_config()
    others = {"optim_conf", "scheduler_conf"}
    parts = {key for key in default3 if key.endswith("_conf")} - others
    parts |= {choices.name for choices in task3.class_choices_list}
    for key in sorted(parts & {*model, *theirs}):
        wanted = theirs.pop(key, default2[key])
        assert model.pop(key, default3[key]) == wanted, key
    assert model == {}

    target = modules("hydra.utils").get_class
    for (kind, key), known in {
        ("optimizer", "optim"): classes.optim_classes,
        ("scheduler", "scheduler"): classes.scheduler_classes,
    }.items():
        built = {k: v for k, v in ours[kind].items() if k != "_convert_"}
        assert target(built.pop("_target_")) is known[theirs.pop(key)]
        assert built == theirs.pop(f"{key}_conf")
    assert ours["scheduler_interval"] == "step"

    assert trainer["max_epochs"] == theirs.pop("max_epoch")
    assert trainer["gradient_clip_val"] == theirs.pop("grad_clip")
    assert trainer["accumulate_grad_batches"] == theirs.pop("accum_grad", 1)
    assert batches["type"] == theirs.pop("batch_type")
    assert batches["batch_size"] == theirs.pop("batch_size")
    assert theirs.pop("num_workers") == 0  # ESPnet3's default
    assert ours["seed"] == theirs.pop("seed")
    preprocessor = ours["dataset"]["preprocessor"]
    assert preprocessor["token_type"] == theirs.pop("token_type")
    ((part, value, order),) = theirs.pop("best_model_criterion")
    best = [f"{part}/{value}", theirs.pop("keep_nbest_models"), order]
    assert ours["best_model_criterion"] == [best]
    inference = load(modules, "inference")
    assert inference["model"]["asr_model_file"].endswith(
        f"/{part}.{value}.ave_{best[1]}best.pth"
    )
    assert theirs == {}


@pytest.mark.parametrize(
    "name", ["training", "training_cepstra", "training_ddp", "inference_cepstra"]
)
def test_its_configurations_have_only_keys_that_espnet_knows(modules, name):
    config = load(modules, name)

    if name.startswith("training"):
        check = modules("esp2_asr.system").check_model_keys
        check(config["task"], modules("omegaconf").DictConfig(config["model"]))
        for callback in config["trainer"]["callbacks"]:
            modules("hydra.utils").get_class(callback["_target_"])
    else:
        contract = modules("espnet3.contract.inference").load_inference_contract(
            config["contract"]
        )
        assert [(f.name, f.kind) for f in contract.inputs] == [("speech", "features")]
        contract.validate_input_keys(config["input_key"])


def test_sets_are_listed_and_give_features(dataset, places, modules):
    sets = {
        name: dataset.Dataset(name, places["data_dir"], with_utt_id=True)
        for name in dataset.Dataset.SPLITS
    }
    named = {name: [item["utt_id"] for item in set_] for name, set_ in sets.items()}
    assert named == {
        "train_nodev": ["fa-an2-b", "mb-an3-b", "mc-an4-b"],
        "train_dev": ["fa-an1-b"],
        "test": ["md-an5-b"],
    }
    item = sets["test"][0]
    assert item["text"] == "SO"
    assert item["speech"].dtype == np.float32
    path = sets["test"].rows[0].path
    cepstra = np.frombuffer(path.read_bytes()[4:], ">f4").reshape(FRAMES, 13)
    np.testing.assert_array_equal(item["speech"], dataset.cepstra.features(cepstra))


def test_audio_is_given_as_it_is(dataset, tmp_path):
    soundfile = pytest.importorskip("soundfile")
    samples = np.arange(-80, 80, dtype=np.int16)
    soundfile.write(tmp_path / "a.sph", samples, 16000, format="NIST")
    manifest = tmp_path / "manifest" / "test.tsv"
    manifest.parent.mkdir()
    manifest.write_text(f"a\t{tmp_path / 'a.sph'}\tYES\n")

    (item,) = dataset.Dataset("test", tmp_path)

    np.testing.assert_array_equal(item["speech"], samples.astype(np.float32) / 32768)


def test_recordings_of_another_kind_are_refused(dataset, places, archive):
    builder, error = dataset.DatasetBuilder(), dataset.RecipeError
    audio = {**places, "recordings": "audio"}

    assert not builder.is_source_prepared(**audio)
    with pytest.raises(error, match=r"holds cepstra, and .*recordings .* wants audio"):
        builder.build(**audio)
    with pytest.raises(error, match="AN4_ARCHIVE=FILE"):
        builder.prepare_source(**places)


def test_a_cut_recording_is_found_and_replaced(dataset, places, archive):
    builder = dataset.DatasetBuilder()
    path = dataset.Dataset("test", places["data_dir"]).rows[0].path
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])

    assert not builder.is_source_prepared(**places)
    with pytest.raises(dataset.RecipeError, match=r"md-an5-b: .* declares 1560 values"):
        builder.build(**places)
    builder.prepare_source(**places, archive=archive)

    assert path.read_bytes() == whole
    assert builder.is_built(**places)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((5, 13)), r"'speech' must have 40 features .* shape \(5, 13\)"),
        (np.zeros(400), r"'speech' must be an array of shape .* got \(400,\)"),
        ("a.wav", r"'speech' must be an array of shape .* got str"),
    ],
)
def test_a_packed_model_refuses_what_are_no_features(modules, value, message):
    config = load(modules, "inference_cepstra")["contract"]
    load_contract = modules("espnet3.contract.inference").load_inference_contract
    contract = load_contract(config)
    given = np.ones((5, 40))

    assert contract.prepare_input({"speech": given}, None)["speech"].shape == (5, 40)
    with pytest.raises(TypeError, match=message):
        contract.prepare_input({"speech": value}, None)


def test_characters_are_those_of_espnet2s_form(modules, tmp_path):
    write = modules("esp2_asr.tokens").write_characters

    write(["A BA", "A C C"], tmp_path / "text", tmp_path / "out" / "tokens.txt")

    assert (tmp_path / "out" / "tokens.txt").read_text().split("\n") == [
        "<blank>", "<unk>", "A", "<space>", "C", "B", "<sos/eos>", "",
    ]  # fmt: skip


def test_the_average_has_the_last_epoch_in_it(modules, tmp_path):
    lightning, torch = modules("lightning"), modules("torch")
    callbacks = modules("espnet3.components.callbacks.default_callbacks")

    class Falling(lightning.LightningModule):
        """Its loss falls in each epoch, so that the last ones are the best."""

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([8.0]))

        def training_step(self, batch):
            return self.weight.sum()

        def validation_step(self, batch):
            self.log("valid/loss", self.weight.sum())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=4,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        callbacks=[
            *callbacks.get_default_callbacks(
                str(tmp_path), 1, [["valid/loss", 3, "min"]]
            )[:3],
            modules("esp2_asr.averaging").AverageAtTheEnd(),
        ],
    )
    batches = torch.utils.data.DataLoader([0.0])
    trainer.fit(Falling(), batches, batches)

    (path,) = tmp_path.glob("*.pth")
    assert path.name == "valid.loss.ave_3best.pth"
    # after the epochs: 7, 6, 5, 4
    assert torch.load(path)["weight"].item() == 5.0


@pytest.mark.slow
def test_all_stages_and_a_packed_model_that_decodes_features(
    modules, dataset, places, tmp_path
):
    moved = {"data_dir": str(places["data_dir"]), "exp_dir": str(tmp_path / "exp")}
    small = {
        "decoder_conf": {"block_size": 8, "linear_size": 8, "qk_size": 4, "v_size": 8},
        "joint_network_conf": {"joint_space_size": 8},
        "encoder_conf": {
            "input_conf": {"conv_size": 4, "subsampling_factor": 4},
            "body_conf": [
                {
                    "block_type": "conformer",
                    "hidden_size": 8,
                    "linear_size": 8,
                    "heads": 1,
                    "conv_mod_kernel_size": 3,
                }
            ],
        },
    }
    training = {
        "model": small,
        "trainer": {"max_epochs": 2, "log_every_n_steps": 1},
        "dataloader": {"train": {"iter_factory": {"batches": {"batch_size": 2}}}},
    }
    inference = {
        "model": {"asr_model_file": "${exp_dir}/valid.loss.ave_2best.pth"},
        "data_dir": moved["data_dir"],
    }
    for name, base, more in (
        ("training", "training_cepstra", {**training, **moved}),
        ("inference", "inference_cepstra", inference),
    ):
        head = {"defaults": [str(RECIPE / "conf" / f"{base}.yaml"), "_self_"]}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**head, **more}))

    command = [sys.executable, RECIPE / "run.py"]
    for name in ("training", "inference"):
        command += [f"--{name}_config", f"{name}.yaml"]
    stages = "train_tokenizer collect_stats train infer measure pack_model"
    done = subprocess.run(
        [*command, "--stages", *stages.split()],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]

    tokens = (places["data_dir"] / "char" / "tokens.txt").read_text().split()
    assert {*tokens} == {"<blank>", "<unk>", "<space>", *"NORUBTE", "<sos/eos>"}
    scores = yaml.safe_load((tmp_path / "exp/inference/metrics.json").read_text())
    for metric, sets in scores.items():
        assert set(sets) == {"train_dev", "test"}, metric
    (events,) = (tmp_path / "exp" / "tensorboard").rglob("events.*")
    assert b"mega_bias" in events.read_bytes()

    pack = tmp_path / "elsewhere" / "pack"
    pack.parent.mkdir()
    (tmp_path / "exp" / "model_pack").rename(pack)
    (tmp_path / "exp").rename(tmp_path / "moved")
    packed = modules("espnet3.publication.inference_model").InferenceModel
    with pytest.raises(ValueError, match="trust_user_code"):
        packed.from_packed(pack)
    model = packed.from_packed(pack, trust_user_code=True)
    item = dataset.Dataset("test", places["data_dir"])[0]
    (line,) = (tmp_path / "moved/inference/test/text.scp").read_text().splitlines()
    assert model(item["speech"])["text"] == line.partition(" ")[2]
