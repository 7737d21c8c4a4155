"""tools/setting_warnings.py: each setting that hurts, and none that does not."""

from pathlib import Path

import pytest
import yaml

from espnet_mega_bias.tools import training_config
from espnet_mega_bias.tools.label_lengths import LabelLengths
from espnet_mega_bias.tools.setting_warnings import warn

CONFIGS = sorted((Path(__file__).parents[2] / "conf").glob("train*.yaml"))
SMALL = {"block_size": 12, "linear_size": 16, "qk_size": 8, "v_size": 10}


@pytest.fixture
def warnings(tmp_path):
    """Return a function that gives the warnings of a configuration."""

    def find(conf, lengths=None, decoder="mega_bias", **keys):
        path = tmp_path / "train.yaml"
        config = {"decoder": decoder, "decoder_conf": {**SMALL, **conf}, **keys}
        path.write_text(yaml.safe_dump(config))
        return warn(training_config.read(path), lengths)

    return find


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_configurations_of_this_project_hurt_nobody(path):
    assert warn(training_config.read(path), LabelLengths(33, "u", {5: 9})) == []


@pytest.mark.parametrize("decoder", ["mega", "mega_bias"])
@pytest.mark.parametrize(
    "conf",
    [
        {},
        {"block_size": 1, "linear_size": 1, "num_blocks": 1},
        {"chunk_size": 0},
        {"chunk_size": 30},
        {"chunk_size": 30, "max_positions": 30},
        {"rel_pos_bias_type": "rotary", "max_positions": 64},
        {"dropout_rate": 0.9, "att_dropout_rate": 0.0},
        {"truncation_length": None},
    ],
)
def test_settings_that_hurt_nobody_get_no_warning(warnings, decoder, conf):
    assert warnings(conf, decoder=decoder) == []
    assert warnings(conf, LabelLengths(63, "u", {5: 9, 20: 1}), decoder) == []


@pytest.mark.parametrize(
    ("decoder", "conf", "text", "instead"),
    [
        (
            "mega_bias",
            {"chunk_size": 1},
            "chunk_size: 1 lets each label attend to itself alone",
            "chunk_size: -1",
        ),
        ("mega", {"chunk_size": 1}, "stops the search", "decoder: mega_bias"),
        (
            "mega_bias",
            {"chunk_size": 3},
            "chunk_size: 3 is shorter than typical words (of English, by rule of thumb "
            "for token_type bpe, 9 of 10 have up to 4 labels)",
            "chunk_size: 16",
        ),
        (
            "mega_bias",
            {"chunk_size": 30, "max_positions": 100000},
            "max_positions: 100000 has no effect beside chunk_size: 30",
            "leave max_positions out",
        ),
        (
            "mega_bias",
            {"max_positions": 10_000_000, "rel_pos_bias_type": "rotary"},
            "max_positions: 10000000 makes tables of 1.3 GB",
            "max_positions: 1 more than the longest",
        ),
        (
            "mega_bias",
            {"max_positions": 10_000_000, "num_blocks": 2},
            "max_positions: 10000000 makes tables of 0.2 GB",
            "max_positions: 1 more than",
        ),
        (
            "mega_bias",
            {"truncation_length": 5},
            # D 12: inputs 12 * 5, the residual in one of them; 4 inputs.
            "then pays 60 multiply-adds per label for the EMA instead of 108, and "
            "keeps 192 bytes of state instead of 192",
            "truncation_length: null",
        ),
        (
            "mega",
            {"truncation_length": 5},
            "in training only: the search goes on with another function",
            "decoder: mega_bias",
        ),
        (
            "mega_bias",
            {"embed_pad": 3},
            "embed_pad: 3 makes label 3 padding",
            "embed_pad: 0",
        ),
        *(
            ("mega_bias", {f"{kind}dropout_rate": 1.0}, "1 drops everything", "0.1")
            for kind in ("", "embed_", "att_", "ema_", "ffn_")
        ),
    ],
)
def test_a_setting_that_hurts_comes_with_what_to_write_instead(
    warnings, decoder, conf, text, instead
):
    (warning,) = warnings(conf, decoder=decoder)

    assert text in warning.text
    assert instead in warning.instead
    assert next(iter(conf)) in warning.text


@pytest.mark.parametrize(
    ("decoder", "bias", "consequence"),
    [
        ("mega_bias", "simple", "training stops with an error"),
        ("mega_bias", "rotary", "training stops with an error"),
        ("mega", "simple", "training stops with an error"),
        ("mega", "rotary", "training grows its tables without a word"),
    ],
)
def test_max_positions_counts_the_blank_in_front(warnings, decoder, bias, consequence):
    conf = {"max_positions": 20, "rel_pos_bias_type": bias}

    assert warnings(conf, LabelLengths(19, "u", {}), decoder) == []

    (warning,) = warnings(conf, LabelLengths(20, "utterance u of text", {}), decoder)
    assert warning.text == (
        "max_positions: 20 is less than the 21 positions of utterance u of text (20 "
        f"labels and the blank in front): {consequence}"
    )
    assert warning.instead == "max_positions: 21"

    # Neither without a limit nor where the chunk takes its place.
    assert warnings({"chunk_size": 20}, LabelLengths(99, "u", {})) == []
    no_limit = {"max_positions": None, "rel_pos_bias_type": "rotary"}
    assert warnings(no_limit, LabelLengths(9999, "u", {})) == []


def test_a_chunk_is_compared_with_the_words_of_the_texts(warnings):
    lengths = LabelLengths(9, "u", {5: 9, 8: 1})

    assert warnings({"chunk_size": 5}, lengths) == []

    (warning,) = warnings({"chunk_size": 4}, lengths)
    assert "in the texts given, 9 of 10 have up to 5 labels" in warning.text
    assert warning.instead == "chunk_size: 20"


@pytest.mark.parametrize(
    ("token_type", "chunk", "warned"),
    [
        ("char", 8, True),
        ("char", 9, False),
        ("phn", 7, True),
        ("bpe", 4, False),
        ("word", 2, False),
        ("hugging_face", 3, True),
    ],
)
def test_without_texts_a_rule_of_thumb_decides(warnings, token_type, chunk, warned):
    assert bool(warnings({"chunk_size": chunk}, token_type=token_type)) == warned
    only_the_longest = LabelLengths(9, "u", {})
    found = warnings({"chunk_size": chunk}, only_the_longest, token_type=token_type)
    assert bool(found) == warned


def test_several_settings_give_several_warnings(warnings):
    conf = {"dropout_rate": 1, "embed_pad": 2, "chunk_size": 2, "max_positions": 9}

    assert len(warnings(conf)) == 4
