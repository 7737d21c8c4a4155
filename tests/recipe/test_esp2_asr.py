"""egs/mini_an4/esp2_asr: its stages in new processes, and its parts one by one."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import yaml
from espnet2.bin.asr_transducer_inference import Speech2Text

EGS = Path(__file__).resolve().parents[2] / "egs"
RECIPE, TEMPLATE = EGS / "mini_an4" / "esp2_asr", EGS / "TEMPLATE"
WORDS = {
    "train": {
        "fash-an253-b": "GO",
        "fbbh-cen8-b": "MARCH THIRD NINETEEN TWENTY EIGHT",
        "mwhw-an152-b": "START",
        "mwhw-cen8-b": "ELEVEN SEVENTEEN FIFTY ONE",
    },
    "valid": {"fash-an251-b": "YES"},
    "test": {
        "fcaw-cen8-b": "ELEVEN TWENTY SEVEN FIFTY SEVEN",
        "mmxg-cen8-b": "OCTOBER TWENTY FOUR NINETEEN SEVENTY",
    },
}
HAS_ESPNET3 = all(map(importlib.util.find_spec, ("espnet3", "lightning", "jiwer")))
needs_espnet3 = pytest.mark.skipif(
    not HAS_ESPNET3, reason="ESPnet3's recipes came with ESPnet 202611"
)


def run_recipe(folder, *arguments, **environment):
    """Start run.py in `folder`, which is not the recipe's."""
    env = {k: v for k, v in os.environ.items() if k != "MINI_AN4_ARCHIVE"}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.run(
        [sys.executable, RECIPE / "run.py", *arguments],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )


def write_configurations(folder, more=""):
    """Write configurations that only move what the recipe writes into `folder`."""
    head = f"data_dir: {folder}/data\nexp_dir: {folder}/exp\n"
    training = f"create_dataset: {{download_dir: {folder}/downloads}}\n{more}"
    for name, rest in {
        "training": training,
        "inference": "",
        "inference_maes": "",
        "publication": "",
    }.items():
        text = f"defaults: [{RECIPE}/conf/{name}.yaml, _self_]\n{head}{rest}"
        (folder / f"{name}.yaml").write_text(text)


def configurations(*, inference="inference"):
    names = {"training": "training", "publication": "publication"}
    names["inference"] = inference
    return [part for k, v in names.items() for part in (f"--{k}_config", f"{v}.yaml")]


def read_scp(path):
    pairs = (line.split(" ", 1) for line in path.read_text().splitlines())
    return {name: text.strip() for name, text in pairs}


def snapshot(folder, *patterns):
    found = [path for pattern in patterns for path in folder.glob(pattern)]
    assert len(found) >= len(patterns)
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("esp2_asr")
    write_configurations(folder)
    result = run_recipe(folder, *configurations())
    assert result.returncode == 0, result.stdout[-3000:]
    return folder, result.stdout


@pytest.fixture
def recipe_modules(monkeypatch):
    """Import from the recipe as run.py does, and forget it afterwards."""
    monkeypatch.syspath_prepend(str(TEMPLATE))
    monkeypatch.syspath_prepend(str(RECIPE))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.split(".")[0] in {"dataset", "mini_an4_corpus"}:
            del sys.modules[name]


@pytest.fixture
def dataset_module(recipe_modules):
    return recipe_modules("dataset")


@pytest.fixture
def places(tmp_path, dataset_module):
    """Keyword arguments for the builder, after it has done its work."""
    places = {
        "download_dir": tmp_path / "downloads",
        "data_dir": tmp_path / "data",
    }
    builder = dataset_module.DatasetBuilder()
    assert not builder.is_source_prepared(**places)
    builder.prepare_source(**places)
    assert not builder.is_built(**places)
    builder.build(**places)
    assert builder.is_source_prepared(**places)
    assert builder.is_built(**places)
    return places


@pytest.fixture
def system(tmp_path, recipe_modules, monkeypatch):
    """The recipe's system on the recipe's own configurations."""
    config_utils = recipe_modules("espnet3.utils.config_utils")
    run_utils = recipe_modules("espnet3.utils.run_utils")
    write_configurations(tmp_path)
    configs = {
        f"{role}_config": config_utils.load_and_merge_config(
            tmp_path / f"{role}.yaml",
            config_name=f"{role}.yaml",
            default_package="egs3.TEMPLATE.esp2_asr",
            resolve=False,
        )
        for role in ("training", "inference")
    }
    run_utils.resolve_loaded_configs(*configs.values())
    return recipe_modules("esp2_asr.system").RecipeSystem(**configs)


@needs_espnet3
@pytest.mark.slow
def test_learns_the_training_utterances(first_run):
    folder, output = first_run
    assert "results:" in output
    scores = json.loads((folder / "exp/inference/metrics.json").read_text())
    wer = scores["espnet3.systems.esp2_asr.metrics.wer.WER"]
    cer = scores["espnet3.systems.esp2_asr.metrics.cer.CER"]
    assert set(wer) == set(cer) == set(WORDS)
    assert wer["train"] == {"WER": 0.0}
    assert cer["train"] == {"CER": 0.0}
    decoded = {
        name: read_scp(folder / "exp/inference" / name / "text.scp") for name in WORDS
    }
    assert decoded["train"] == WORDS["train"]
    for name in ("valid", "test"):
        assert set(decoded[name]) == set(WORDS[name])
        assert wer[name]["WER"] > 0.0  # nobody can know them after four utterances


@needs_espnet3
@pytest.mark.slow
def test_a_second_run_does_nothing_again_and_maes_agrees(first_run):
    folder, _ = first_run
    patterns = ("downloads/*.tar.gz", "downloads/mini_an4/an4/wav/*/*/*.sph")
    patterns += ("data/manifest/*.tsv", "data/bpe_30/bpe.*", "data/bpe_30/tokens.txt")
    patterns += ("exp/stats/*/split.0/*", "exp/step*.ckpt")
    patterns += ("exp/inference/*/split.0/text.scp",)
    before = snapshot(folder, *patterns)
    for inference in ("inference", "inference_maes"):
        result = run_recipe(folder, *configurations(inference=inference))
        assert result.returncode == 0, result.stdout[-3000:]
        assert snapshot(folder, *patterns) == before
    maes = read_scp(folder / "exp/inference_maes/train/text.scp")
    assert maes == WORDS["train"]


@needs_espnet3
@pytest.mark.slow
def test_a_packed_model_decodes_alone(first_run, tmp_path):
    """D5."""
    folder, _ = first_run
    pack = tmp_path / "elsewhere" / "pack"
    shutil.copytree(folder / "exp" / "model_pack", pack)
    audio = tmp_path / "speech.sph"
    recorded = "downloads/mini_an4/an4/wav/an4_clstk/mwhw/cen8-mwhw-b.sph"
    shutil.copyfile(folder / recorded, audio)
    inference = yaml.safe_load((pack / "conf/inference.yaml").read_text())
    model = Speech2Text(
        str(folder / "exp/config.yaml"),
        str(folder / "exp/last.ckpt"),
        bpemodel=str(folder / "data/bpe_30/bpe.model"),
        # that of the run that packed last
        beam_search_config=inference["model"].get("beam_search_config"),
    )
    best = model(soundfile.read(audio)[0])[0]
    moved = folder.with_name("moved")
    folder.rename(moved)  # nothing of the first run is to be found any more
    try:
        script = (
            "import sys, soundfile"
            "; from espnet3.publication.inference_model import InferenceModel"
            "; model = InferenceModel.from_packed(sys.argv[1])"
            "; print('TEXT', model(sys.argv[2]))"
            "; *_, best = model.model(soundfile.read(sys.argv[2])[0])[0]"
            "; print('BEST', best.yseq, float(best.score))"
        )
        result = subprocess.run(
            [sys.executable, "-c", script, pack, audio],
            cwd=pack.parent,
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        moved.rename(folder)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "'text': 'ELEVEN SEVENTEEN FIFTY ONE'" in result.stdout
    assert f"BEST {best.yseq} {float(best.score)}\n" in result.stdout


@needs_espnet3
@pytest.mark.slow
def test_a_misspelt_key_stops_before_anything_is_written(tmp_path):
    write_configurations(tmp_path, "model: {decoder_conf: {num_blokcs: 2}}\n")
    result = run_recipe(tmp_path, *configurations())
    assert result.returncode != 0
    assert (
        "model.decoder_conf in the training configuration has no key 'num_blokcs'"
        in result.stdout.splitlines()[-1]
    )
    assert {path.suffix for path in tmp_path.iterdir()} == {".yaml"}


@pytest.mark.slow
def test_an_espnet_without_espnet3_is_told_in_one_line(tmp_path):
    # an empty espnet3 stands for one that lacks what the recipe is built on
    (tmp_path / "espnet3").mkdir()
    (tmp_path / "espnet3" / "__init__.py").touch()
    result = run_recipe(tmp_path, PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    (line,) = result.stdout.splitlines()
    assert line.startswith("this recipe needs ESPnet 202611")
    assert "espnet3.systems" in line
    assert "pip install -e" in line


@needs_espnet3
@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("model", "decodr_conf"),
        ("model.decoder_conf", "qk_sise"),
        ("model.joint_network_conf", "joint_spcae_size"),
        ("model.frontend_conf", "n_fttt"),
        ("model.model_conf", "auxiliary_ctc_wieght"),
    ],
)
def test_names_a_misspelt_key_and_the_known_ones(system, recipe_modules, section, key):
    omegaconf = recipe_modules("omegaconf")
    check = recipe_modules("esp2_asr.system").check_model_keys
    config = system.training_config
    check(config.task, config.model)  # the recipe's own keys are fine
    omegaconf.OmegaConf.update(config, f"{section}.{key}", 1, force_add=True)
    with pytest.raises(ValueError, match=rf"{section} in .* no key '{key}'; it takes"):
        check(config.task, config.model)


@needs_espnet3
def test_lists_the_decoders_where_the_chosen_one_is_unknown(system, recipe_modules):
    check = recipe_modules("esp2_asr.system").check_model_keys
    system.training_config.model.decoder = "giga_bias"
    with pytest.raises(ValueError, match=r"mega_bias.*giga_bias"):
        check(system.training_config.task, system.training_config.model)


@needs_espnet3
def test_an_interrupted_tokenizer_is_trained_again(system, places, monkeypatch):
    folder = Path(system.training_config.tokenizer.save_path)
    leftover = Path(system.training_config.data_dir) / "train_tokenizer" / "train.txt"
    for path in (folder / "bpe.model", leftover):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half of it")
    here = folder.parent / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    system.train_tokenizer()
    tokens = (folder / "tokens.txt").read_text().splitlines()
    assert tokens[0] == "<blank>"
    assert tokens[-1] == "<sos/eos>"
    assert len(set(tokens)) == len(tokens) == 30
    assert sorted(path.name for path in folder.iterdir()) == [
        "bpe.model",
        "bpe.vocab",
        "tokens.txt",
    ]
    assert not list(here.iterdir())
    before = snapshot(folder, "*")
    system.train_tokenizer()
    assert snapshot(folder, "*") == before


@needs_espnet3
def test_decodes_again_only_where_model_or_settings_changed(
    system, recipe_modules, monkeypatch
):
    base = recipe_modules("espnet3.systems.base.system")
    monkeypatch.setattr(base, "infer", lambda config: None)
    config = system.inference_config
    checkpoint = Path(config.model.asr_model_file)
    with pytest.raises(FileNotFoundError, match=r"last\.ckpt: run the train stage"):
        system.infer()
    checkpoint.write_bytes(b"one")
    decoded = Path(config.inference_dir) / "test" / "split.0" / "done"

    def is_kept():
        decoded.parent.mkdir(parents=True, exist_ok=True)
        decoded.touch()
        system.infer()
        return decoded.exists()

    assert not is_kept()  # nobody knows which model had made it
    assert is_kept()
    checkpoint.write_bytes(b"two")
    assert not is_kept()
    assert is_kept()
    config.model.beam_size += 1
    assert not is_kept()


@needs_espnet3
def test_a_half_written_manifest_is_written_again(dataset_module, places):
    builder = dataset_module.DatasetBuilder()
    manifest = places["data_dir"] / "manifest" / "train.tsv"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-5])
    assert not builder.is_built(**places)
    builder.build(**places)
    assert manifest.read_bytes() == whole


@needs_espnet3
def test_cut_audio_is_unpacked_again(dataset_module, places):
    builder = dataset_module.DatasetBuilder()
    (audio, *_) = places["download_dir"].glob("mini_an4/an4/wav/an4_clstk/*/*.sph")
    whole = audio.read_bytes()
    audio.write_bytes(whole[: len(whole) // 2])
    assert not builder.is_source_prepared(**places)
    builder.prepare_source(**places)
    assert audio.read_bytes() == whole
    assert builder.is_built(**places)


@needs_espnet3
def test_a_local_archive_is_taken(dataset_module, places, tmp_path):
    builder = dataset_module.DatasetBuilder()
    local = tmp_path / "local.tar.gz"
    shutil.copyfile(places["download_dir"] / "downloads.tar.gz", local)
    fresh = {"download_dir": tmp_path / "other", "data_dir": tmp_path / "other_data"}
    assert not builder.is_source_prepared(**fresh, archive=local)
    builder.prepare_source(**fresh, archive=local)
    builder.build(**fresh, archive=local)
    assert builder.is_built(**fresh, archive=local)
    with pytest.raises(Exception, match=r"no such archive.*missing"):
        builder.prepare_source(**fresh, archive=tmp_path / "missing.tar.gz")


@needs_espnet3
@pytest.mark.parametrize("split", WORDS)
def test_items_hold_the_recording_and_its_words(dataset_module, places, split):
    plain = dataset_module.Dataset(split, places["data_dir"])
    named = dataset_module.Dataset(split, places["data_dir"], with_utt_id=True)
    items = [named[index] for index in range(len(named))]
    assert {item["utt_id"]: item["text"] for item in items} == WORDS[split]
    assert set(plain[0]) == {"speech", "text"}
    for index, row in enumerate(plain.rows):
        speech = plain[index]["speech"]
        pcm = np.frombuffer(row.path.read_bytes()[1024:], dtype="<i2")
        assert speech.dtype == np.float32
        np.testing.assert_array_equal(speech, pcm.astype(np.float32) / 32768)


@needs_espnet3
@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("u1\t{audio}\t ", ValueError, "line 2: utterance u1 has an empty transcript"),
        (
            "u1\t{audio}.no\tGO",
            FileNotFoundError,
            "utterance u1 has no recording: .*no is",
        ),
        ("u1 {audio} GO", ValueError, "line 2: wanted name, recording and words"),
    ],
)
def test_names_the_bad_line_of_a_manifest(dataset_module, places, line, error, message):
    manifest = places["data_dir"] / "manifest" / "valid.tsv"
    audio = manifest.read_text().split("\t")[1]
    with manifest.open("a") as file:
        file.write(line.format(audio=audio) + "\n")
    with pytest.raises(error, match=message):
        dataset_module.Dataset("valid", places["data_dir"])


@needs_espnet3
def test_wants_a_known_split_and_a_manifest_with_lines(dataset_module, places):
    with pytest.raises(ValueError, match="one of train, valid, test, got 'dev'"):
        dataset_module.Dataset("dev", places["data_dir"])
    manifest = places["data_dir"] / "manifest" / "valid.tsv"
    manifest.write_text("")
    with pytest.raises(ValueError, match="lists no utterance"):
        dataset_module.Dataset("valid", places["data_dir"])
    manifest.unlink()
    with pytest.raises(FileNotFoundError, match="run the create_dataset stage"):
        dataset_module.Dataset("valid", places["data_dir"])
