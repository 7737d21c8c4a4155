import pytest
import sentencepiece

from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.experiment import Configuration
from espnet_mega_bias.tools.labels import labels_of

CHARACTERS = ["<blank>", "<unk>", "A", "B", "C", "<space>", "<sos/eos>"]


@pytest.fixture
def trained(tmp_path):
    def make(**config):
        config = {"token_list": CHARACTERS, "token_type": "char", **config}

        return Configuration(tmp_path / "config.yaml", config)

    return make


def test_characters_follow_the_blank(trained):
    assert labels_of(trained(), "AB CA") == [0, 2, 3, 5, 4, 2]


def test_words_are_divided_at_spaces(trained):
    tokens = ["<blank>", "<unk>", "TEN", "ONE", "<sos/eos>"]
    experiment = trained(token_list=tokens, token_type="word")

    assert labels_of(experiment, "ONE  TEN") == [0, 3, 2]


@pytest.mark.parametrize("key", ["cleaner", "text_cleaner"])
def test_the_cleaner_is_used_whatever_espnet_calls_it(trained, monkeypatch, key):
    monkeypatch.setattr(
        "espnet2.text.cleaner.TextCleaner.__call__",
        lambda self, text: text.upper() if self.cleaner_types == ["up"] else text,
    )

    assert labels_of(trained(**{key: "up"}), "ab") == [0, 2, 3]


def test_subwords_come_from_the_model_that_the_training_named(trained, tmp_path):
    text = tmp_path / "text"
    text.write_text("ONE TWO\nTWO TEN\nTEN ONE ONE\n" * 9)
    (tmp_path / "data").mkdir()
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(tmp_path / "data" / "bpe"),
        vocab_size=14,
        model_type="bpe",
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(str(tmp_path / "data" / "bpe.model"))
    pieces = model.encode("TEN ONE", out_type=str)
    tokens = ["<blank>", "<unk>", *sorted(set(pieces)), "<sos/eos>"]

    # A path as seen from where the training ran.
    labels = labels_of(
        trained(token_list=tokens, token_type="bpe", bpemodel="data/bpe.model"),
        "TEN ONE",
    )

    assert labels == [0, *map(tokens.index, pieces)]


def test_unknown_tokens_are_named(trained):
    with pytest.raises(ToolError, match=r"no token 'X', 'Z' .* trained on: <blank>"):
        labels_of(trained(), "AZXA")


def test_a_text_without_tokens_is_refused(trained):
    with pytest.raises(ToolError, match="no token is left"):
        labels_of(trained(), "")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"token_type": None}, "no token_type"),
        ({"token_type": "bpe"}, "bpemodel is required"),
        ({"token_type": "bpe", "bpemodel": "gone.model"}, r"gone\.model"),
        ({"token_type": "syllable"}, "syllable"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_an_error(trained, config, message):
    with pytest.raises(ToolError, match=message):
        labels_of(trained(**config), "A")
