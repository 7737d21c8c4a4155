"""`espnet-mega-bias explain`: its arguments, its output, its errors."""

import pytest
import yaml

from espnet_mega_bias.bin.main import main

CONF = {
    "block_size": 12,
    "linear_size": 16,
    "qk_size": 8,
    "v_size": 10,
    "num_blocks": 1,
    "max_positions": 9,
}


@pytest.fixture
def explain(tmp_path, monkeypatch, capsys):
    """Return a function that explains a configuration in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*options, **config):
        config = {"decoder": "mega_bias", "decoder_conf": CONF, **config}
        (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
        status = main(["explain", "train.yaml", *options])
        return status, *capsys.readouterr()

    return run


def test_prints_cost_and_measures_it(explain):
    status, out, err = explain()

    assert status == 0
    assert err == ""
    assert out.startswith("train.yaml: decoder mega_bias\n1 block, simple bias")
    assert "ms: median, measured on this machine, now" in out
    assert out.endswith("No setting was found that hurts.\n")

    status, out, _ = explain("--no-measure")
    assert status == 0
    assert "measured" not in out


def test_texts_are_divided_as_the_configuration_says(explain, tmp_path):
    (tmp_path / "first").write_text("a GO\n")
    (tmp_path / "second").write_text("b FEE FI FO\n")
    texts = ["--no-measure", "--text", "first", "--text", "second"]

    status, out, _ = explain(*texts, token_type="char")
    assert status == 0
    assert "less than the 10 positions of utterance b of second (9 labels" in out

    status, out, _ = explain(*texts, token_type="word")
    assert "4 positions of utterance b of second" in out
    assert "No setting was found that hurts." in out

    # An option comes before the configuration.
    _, out, _ = explain(*texts, "--token_type", "char", token_type="word")
    assert "less than the 10 positions" in out


def test_the_longest_text_can_be_given_as_a_number(explain, tmp_path):
    (tmp_path / "text").write_text("a GO\n")
    labels = ["--no-measure", "--training_labels", "5", "9", "--training_labels", "7"]

    for options in (labels, [*labels, "--text", "text"]):
        _, out, _ = explain(*options, token_type="char")
        assert "less than the 10 positions of the longest training text (9" in out

    _, out, _ = explain("--no-measure", "--training_labels", "8")
    assert "No setting was found that hurts." in out

    # A text that is longer counts, and so do its words beside a number.
    (tmp_path / "text").write_text("a LONG ENOUGH\n")
    _, out, _ = explain(*labels, "--text", "text", token_type="char")
    assert "less than the 12 positions of utterance a of text" in out


def test_the_token_list_gives_the_size_of_the_embedding(explain, tmp_path):
    (tmp_path / "tokens").write_text("<blank>\nA\nB\n")

    _, out, _ = explain("--no-measure", "--token_list", "tokens")

    assert "3 tokens" in out


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        (["--training_labels", "0"], {}, "--training_labels must be at least 1, got 0"),
        (["--text", "absent"], {"token_type": "char"}, "absent"),
        (["--text", "absent"], {}, "no token_type to divide --text with: give it by"),
        (["--token_list", "absent"], {}, "train.yaml: token_list: "),
        ([], {"decoder": "rnn"}, "train.yaml: the decoder is 'rnn'"),
        ([], {"decoder_conf": {"qk_sise": 1}}, "did you mean qk_size?"),
        ([], {"decoder_conf": {"num_blocks": 0}}, "num_blocks must be at least 1"),
        (
            ["--text", "train.yaml", "--bpemodel", "absent.model"],
            {"token_type": "bpe"},
            "no tokenizer of token_type bpe",
        ),
    ],
)
def test_errors_are_one_line_and_nothing_is_printed_before(
    explain, options, config, message
):
    status, out, err = explain(*options, **config)

    assert status == 1
    assert out == ""
    assert err.startswith("espnet-mega-bias explain: error: ")
    assert message in err
    assert len(err.splitlines()) == 1


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit) as end:
        main(["explain", "--help"])

    assert end.value.code == 0
    assert "espnet-mega-bias explain conf/" in capsys.readouterr().out
