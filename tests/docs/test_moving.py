"""The commands of docs/moving.md, after those of docs/own_corpus.md."""

import re
import zipfile

import pytest
import yaml

from docs.pages import blocks, read, run_shell

PAGE = read("moving.md")


@pytest.mark.slow
def test_a_packed_model_hears_the_same_elsewhere(own_corpus):
    folder, _, _ = own_corpus
    pack, load = blocks(PAGE, "sh")
    before = {
        name: (folder / "exp/decode/1best_recog" / name).read_text().splitlines()
        for name in ("text", "score")
    }
    text, score = (
        next(line for line in lines if line.startswith("cen8-fcaw-b")).split(" ", 1)[1]
        for lines in before.values()
    )

    run_shell(pack, folder)
    hidden = folder / "exp.hidden"
    (folder / "exp").rename(hidden)
    try:
        printed = run_shell(load, folder)
    finally:
        hidden.rename(folder / "exp")

    first = re.findall(r"^(-?\d+\.\d+)  (.*)$", printed, re.M)[0]
    assert first == (f"{float(score):.2f}", text)
    unpacked = folder / "elsewhere" / "unpacked"
    config = yaml.safe_load((unpacked / "exp/train/config.yaml").read_text())
    assert config["normalize_conf"]["stats_file"] == (
        "unpacked/exp/stats/train/feats_stats.npz"
    )
    with zipfile.ZipFile(folder / "model.zip") as files:
        made_with = yaml.safe_load(files.read("meta.yaml"))
    assert {"python", "torch", "espnet"} <= set(made_with)
    assert "mega_bias" not in str(made_with)


@pytest.mark.slow
def test_paths_from_elsewhere_make_an_archive_that_cannot_be_moved(
    own_corpus, tmp_path
):
    folder, _, _ = own_corpus
    (command, _) = blocks(PAGE, "sh")
    absolute = re.sub(r"(?<= )(exp/|decode)", rf"{folder}/\1", command)

    run_shell(absolute, tmp_path)

    with zipfile.ZipFile(tmp_path / "model.zip") as files:
        names = files.namelist()
        files_of = yaml.safe_load(files.read("meta.yaml"))
    assert f"{folder}/exp/train/config.yaml".lstrip("/") in names
    assert files_of["yaml_files"]["asr_train_config"] == (
        f"{folder}/exp/train/config.yaml"
    )
