"""recipe.score: errors, the table, and what the logs tell."""

from pathlib import Path

import pytest

SETS = ["train", "valid", "test"]


def test_counts_substitutions_deletions_and_insertions(local):
    pytest.importorskip("jiwer")
    said = {"a": "ONE TWO THREE", "b": "GO", "c": "YES"}
    heard = {"c": "", "b": "GO ON", "a": "ONE TEN THREE", "d": "not asked for"}

    found = local("score").count_errors(said, heard)

    # TWO/TEN, ON, YES are wrong; characters: WO/EN, " ON", YES
    assert (found.utterances, found.words, found.word_errors) == (3, 5, 3)
    assert (found.characters, found.character_errors) == (18, 8)
    assert found.wer == pytest.approx(60.0)
    assert found.cer == pytest.approx(100 * 8 / 18)
    assert found.by_utterance == {"a": 1, "b": 1, "c": 1}


def test_an_utterance_that_was_not_decoded_is_no_error_but_a_failure(local):
    pytest.importorskip("jiwer")

    with pytest.raises(ValueError, match="not decoded: b"):
        local("score").count_errors({"a": "GO", "b": "GO"}, {"a": "GO"})


@pytest.fixture
def decoded(tmp_path):
    """Data and hypotheses: one of two training words is right in the second search."""
    for name in ("train", "valid", "test"):
        (tmp_path / name).mkdir()
        text = f"{name}-1 GO\n" + ("train-2 STOP\n" if name == "train" else "")
        (tmp_path / name / "text").write_text(text)
    for search, word in (("first", "STOP"), ("second", "SHOP")):
        folder = tmp_path / search / "1best_recog"
        folder.mkdir(parents=True)
        lines = f"train-1 GO\ntrain-2 {word}\nvalid-1 \ntest-1 NO\n"
        (folder / "text").write_text(lines)
    return tmp_path


def test_the_table_has_a_row_for_each_search_and_set(local, decoded):
    pytest.importorskip("jiwer")
    score = local("score")
    references = {name: score.read_text(decoded / name / "text") for name in SETS}
    heard = score.read_hypotheses([decoded / "first", decoded / "second"])

    results = score.report(
        score.evaluate(references, heard),
        title="a corpus",
        note="Not how good a model can be.",
        about=("Decoder x",),
        utterances=score.utterance_table(references, heard),
        pictures=[Path("loss.png")],
    )

    rows = [line for line in results.splitlines() if line.startswith("| ")]
    assert rows[1:7] == [
        "| first | train | 2 | 2 | 0 | 0.0 | 6 | 0 | 0.0 |",
        "| first | valid | 1 | 1 | 1 | 100.0 | 2 | 2 | 100.0 |",
        "| first | test | 1 | 1 | 1 | 100.0 | 2 | 1 | 50.0 |",
        "| second | train | 2 | 2 | 1 | 50.0 | 6 | 1 | 16.7 |",
        "| second | valid | 1 | 1 | 1 | 100.0 | 2 | 2 | 100.0 |",
        "| second | test | 1 | 1 | 1 | 100.0 | 2 | 1 | 50.0 |",
    ]
    assert "| train | train-2 | STOP | STOP | SHOP |" in rows
    assert results.startswith("# a corpus\n")
    assert "\nDecoder x.\n" in results
    assert "\nNot how good a model can be.\n" in results
    assert "- loss.png\n" in results


def test_the_limit_holds_for_every_search(local, decoded):
    pytest.importorskip("jiwer")
    score = local("score")
    references = {"train": score.read_text(decoded / "train" / "text")}
    heard = score.read_hypotheses([decoded / "first", decoded / "second"])
    results = score.report(score.evaluate(references, heard))

    score.check_train_wer(results, "train", 50.0)
    with pytest.raises(ValueError, match=r"WER 50\.0 % with second, above 0 %"):
        score.check_train_wer(results, "train", 0.0)
    with pytest.raises(ValueError, match="no row"):
        score.check_train_wer(results, "train_nodev", 0.0)


def test_the_real_time_factor_leaves_the_start_out(local, tmp_path):
    log = tmp_path / "log"
    lines = [
        "2026-01-01 10:00:00,000 (x:1) INFO: config file: x",
        "2026-01-01 10:00:09,500 (x:508) INFO: Final best hypothesis: ['a']: GO",
        "[h] 2026-01-01 10:00:10,000 (x:508) INFO: Final best hypothesis: ['b']: ",
        "2026-01-01 10:00:11,250 (x:508) INFO: Final best hypothesis: ['c']: YES",
    ]
    log.write_text("\n".join(lines))
    factor = local("score").real_time_factor

    assert factor(log, {"a": 100.0, "b": 2.0, "c": 5.0}) == 1.75 / 7.0
    log.write_text("\n".join(lines[:2]))
    assert factor(log, {"a": 100.0}) is None


def test_the_minutes_of_a_training_are_those_of_its_epochs(local, tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "INFO: 1epoch results: [train] iter_time=0.1, train_time=2.5, "
        "time=1 minute and 6.5 seconds, total_count=3, [valid] loss=58.4, "
        "time=0.5 seconds, total_count=6, [att_plot] time=3 seconds, total_count=0\n"
        "INFO: 1epoch:train:1-5batch: time=9 seconds\n"
        "INFO: 2epoch results: [train] time=1 hour, 2 minutes and 20 seconds, [v"
    )

    minutes = local("score").minutes_of_training(log)

    assert minutes == pytest.approx((66.5 + 0.5 + 3 + 3600 + 120 + 20) / 60)
