"""tools/label_lengths.py: utterances and words, counted in labels."""

import pytest

from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.label_lengths import LabelLengths, measure


@pytest.fixture
def text(tmp_path):
    def write(content, name="text"):
        (tmp_path / name).write_bytes(content.encode())
        return tmp_path / name

    return write


def test_the_longest_utterance_is_named_with_its_file(text):
    first = text("a ONE TWO\n\nb SIX\n", "first")
    second = text("c FIFTEEN\n d\n", "second")

    lengths = measure([first, second], list)

    assert lengths.longest == len("ONE TWO") == len("FIFTEEN")
    assert lengths.where == f"utterance a of {first}"
    assert lengths.words == {3: 3, 7: 1}


def test_labels_are_counted_as_the_tokenizer_divides(text):
    lengths = measure([text("u one two three\n")], str.split)

    assert lengths.longest == 3
    assert lengths.words == {1: 3}


@pytest.mark.parametrize(
    ("words", "typical"),
    [
        ({3: 9, 20: 1}, 3),
        ({3: 8, 20: 2}, 20),
        ({1: 1, 2: 1, 3: 1, 4: 7}, 4),
        ({}, 0),
    ],
)
def test_a_typical_word_is_one_that_nine_of_ten_do_not_exceed(words, typical):
    assert LabelLengths(1, "", words).typical_word() == typical


def test_utterances_without_words_have_no_labels(text):
    assert measure([text("a\nb \n")], list).longest == 0


def test_files_without_utterances_are_refused(text, tmp_path):
    with pytest.raises(ToolError, match="no utterance in"):
        measure([text("\n\n")], list)

    with pytest.raises(FileNotFoundError):
        measure([tmp_path / "absent"], list)

    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ToolError, match="binary is no text"):
        measure([tmp_path / "binary"], list)
