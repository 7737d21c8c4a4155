"""docs/configuration.md against the signatures that it describes."""

import inspect
import json
import re

import pytest
from espnet2.asr_transducer.activation import get_activation
from espnet2.asr_transducer.beam_search_transducer import BeamSearchTransducer
from espnet2.asr_transducer.espnet_transducer_model import ESPnetASRTransducerModel
from espnet2.asr_transducer.normalization import get_normalization

from docs.pages import ROOT, read, rows
from espnet_mega_bias import MEGABiasDecoder

PAGE = read("configuration.md")
KEYS = rows(PAGE, "key")
VOCABULARY = 10
SMALL = {
    "block_size": 4,
    "linear_size": 4,
    "qk_size": 4,
    "v_size": 4,
    "num_blocks": 1,
    "max_positions": 8,
}


def defaults(function):
    parameters = inspect.signature(function).parameters.values()

    return {p.name: p.default for p in parameters if p.default is not p.empty}


def documented(table):
    """Keys and defaults of a table; a value that is no JSON is a word."""

    def value(text):
        try:
            return json.loads(text)
        except ValueError:
            return text

    return {row[0].strip("`"): value(row[1]) for row in table}


def outside(key, allowed):
    """Values that the documented range excludes."""
    words = re.split(r", | or ", allowed)

    if allowed.startswith("at least 1"):
        yield {key: 0}
        if "even with rotary" in allowed:
            yield {key: 5, "rel_pos_bias_type": "rotary"}
        if "null with rotary" in allowed:
            yield {key: None, "rel_pos_bias_type": "simple"}
    elif allowed == "0 to 1":
        yield from ({key: -0.1}, {key: 1.1})
    elif allowed == "0 to the last label":
        yield from ({key: -1}, {key: VOCABULARY})
    elif key.endswith("_type"):
        assert len(words) > 1
        yield {key: "other"}


def inside(key, allowed):
    """Values at the documented range's ends, and all its words."""
    if allowed.startswith("at least 1"):
        yield {key: 1}
        if "even with rotary" in allowed:
            yield {key: 2, "rel_pos_bias_type": "rotary"}
        if "or null" in allowed:
            yield {key: None, "rel_pos_bias_type": "rotary"}
    elif allowed == "0 to 1":
        yield from ({key: 0}, {key: 1.0})
    elif allowed == "0 to the last label":
        yield from ({key: 0}, {key: VOCABULARY - 1})
    elif allowed == "any whole number":
        yield from ({key: -7}, {key: 0}, {key: 3})
    elif key.endswith("_type"):
        for word in re.split(r", | or ", allowed):
            yield {key: word}


def test_every_key_of_the_decoder_is_there_with_its_default():
    assert documented(KEYS) == defaults(MEGABiasDecoder)


@pytest.mark.parametrize("row", KEYS, ids=lambda row: row[0].strip("`"))
def test_the_range_of_a_key_is_what_the_decoder_takes(row):
    key, allowed = row[0].strip("`"), row[2]
    tried = list(inside(key, allowed))

    for conf in tried:
        MEGABiasDecoder(VOCABULARY, **{**SMALL, **conf})

    for conf in outside(key, allowed):
        with pytest.raises(ValueError, match=key):
            MEGABiasDecoder(VOCABULARY, **{**SMALL, **conf})

    assert tried or key.endswith("_args")


def test_arguments_of_normalisation_and_activation_are_those_of_espnet():
    ranges = {row[0].strip("`"): row[2] for row in KEYS}
    paragraph = PAGE[PAGE.index("`activation_args` takes") :].split("\n\n")[0]

    assert ranges["normalization_args"].split(", ") == list(defaults(get_normalization))
    assert re.findall(r"`(\w+_\w+)`", paragraph)[2:] == list(defaults(get_activation))


@pytest.mark.parametrize(
    ("header", "function", "left_out"),
    [
        (
            "key of `model_conf`",
            ESPnetASRTransducerModel,
            {
                "k2_pruned_loss_args",
                "warmup_steps",
                "auxiliary_ctc_dropout_rate",
                "auxiliary_lm_loss_smoothing",
                "ignore_id",
                "sym_space",
                "sym_blank",
                "extract_feats_in_collect_stats",
            },
        ),
        (
            "key of `beam_search_config`",
            BeamSearchTransducer,
            # ESPnet's command gives the first three, and the last one is refused by
            # alsd alone: docs/streaming.md.
            {"lm", "lm_weight", "nbest", "streaming"},
        ),
    ],
)
def test_keys_around_the_decoder_are_espnets(header, function, left_out):
    expected = defaults(function)

    assert documented(rows(PAGE, header)) == {
        key: expected[key] for key in expected if key not in left_out
    }


def test_the_package_has_no_other_variable():
    sources = [
        *ROOT.glob("espnet_mega_bias*.py"),
        *ROOT.glob("espnet_mega_bias/**/*.py"),
    ]
    found = {
        name for p in sources for name in re.findall(r"ESPNET_MEGA_\w+", p.read_text())
    }

    assert found == {"ESPNET_MEGA_BIAS_AUTOLOAD"}
    assert found <= set(re.findall(r"ESPNET_MEGA_\w+", PAGE))
