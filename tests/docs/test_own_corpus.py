"""The commands of docs/own_corpus.md, in their order."""

import re

import pytest
import yaml

pytestmark = pytest.mark.slow


def test_the_data_files_list_every_utterance(own_corpus):
    folder, outputs, _ = own_corpus
    names = {path.stem for path in (folder / "corpus/train").glob("*.wav")}

    for file in ("wav.scp", "text"):
        lines = (folder / "data" / "train" / file).read_text().splitlines()
        assert {line.split(" ")[0] for line in lines} == names

    assert "an253-fash-b GO" in (folder / "data/train/text").read_text()
    assert "data/train/wav.scp" in outputs[0]


def test_tokens_are_the_characters_of_the_training_text(own_corpus):
    _, _, tokens = own_corpus

    assert tokens[:2] == ["<blank>", "<unk>"]
    assert tokens[-1] == "<sos/eos>"
    assert {"<space>", "A"} < set(tokens)


def test_the_training_is_of_this_decoder_and_the_score_is_printed(own_corpus):
    folder, outputs, _ = own_corpus
    config = yaml.safe_load((folder / "exp/train/config.yaml").read_text())

    assert config["decoder"] == "mega_bias"
    assert "the transducer loss is torchaudio's: warprnnt_pytorch" in outputs[4]
    assert (folder / "exp/train/images/loss.png").is_file()

    heard = (folder / "exp/decode/1best_recog/text").read_text().splitlines()
    assert {line.split(" ")[0] for line in heard} == {"cen8-fcaw-b", "cen8-mmxg-b"}
    assert re.fullmatch(r"WER \d+\.\d %, CER \d+\.\d %\n", outputs[-1])


def test_bpe_units_take_the_characters_place(own_corpus):
    folder, _, characters = own_corpus
    tokens = (folder / "data" / "tokens.txt").read_text().splitlines()

    assert tokens[0] == "<blank>"
    assert any(token.startswith("▁") for token in tokens)
    assert set(tokens) != set(characters)
