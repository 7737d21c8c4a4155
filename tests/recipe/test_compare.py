"""recipe.compare: one table of several trainings."""

import json

import numpy as np
import pytest

VERSIONS = {"Python": "3.12.0", "espnet": "202611"}


def results(directory, config, seed, errors, **changes):
    """Write what recipe.score leaves: `errors` of two words in each utterance."""
    errors = {f"u{number}": wrong for number, wrong in enumerate(errors)}
    counted = {
        "utterances": len(errors),
        "words": 2 * len(errors),
        "word_errors": sum(errors.values()),
        "characters": 10 * len(errors),
        "character_errors": sum(errors.values()),
        "by_utterance": errors,
    }
    facts = {
        "train_config": f"conf/{config}.yaml",
        "decoder": "rnn",
        "seed": seed,
        "epochs": 30,
        "minutes": 20.4,
        "parameters": 2000000,
        "decoder_parameters": 300000,
        "versions": VERSIONS,
        "searches": {
            "decode_default": {"real_time_factor": 0.125, "sets": {"test": counted}}
        },
        **changes,
    }
    directory.mkdir()
    (directory / "results.json").write_text(json.dumps(facts))
    return directory


def test_a_row_for_each_training_with_its_command(local, tmp_path):
    folders = [
        results(tmp_path / "a", "train_rnn", 1, [1, 0, 1, 2]),
        results(tmp_path / "b", "train_mega_bias", 1, [1, 0, 0, 0]),
        results(tmp_path / "c", "train_mega_bias", 2, [1, 2, 0, 0]),
    ]
    compare = local("compare")

    text = compare.report(compare.read(folders), "a corpus", "train_rnn", "A note.\n")

    rows = text.splitlines()
    assert (
        "| train_rnn | 1 | 2,000,000 | 300,000 | 20 | decode_default | 0.12 "
        "| 50.0 (4) | 10.0 |" in rows
    )
    assert "    ./run.sh --train_config conf/train_mega_bias.yaml --seed 2" in rows
    # 12.5 and 37.5 %
    assert (
        "| train_mega_bias | decode_default | test | 2 | 25.0 | 17.7 | 12.5 to 37.5 |"
        in rows
    )
    assert "train_rnn | decode_default" not in text, "one seed has no spread"
    assert "| train_mega_bias | 1 | decode_default | -37.5 (" in text
    assert "| train_mega_bias | 2 | decode_default | " not in text, "no reference"
    assert "Python 3.12.0, espnet 202611; 30 epochs each" in text
    assert text.endswith("A note.\n")


def test_seeds_of_one_setting_need_no_reference(local, tmp_path):
    folders = [
        results(tmp_path / name, "train_mega_bias", seed, errors)
        for name, seed, errors in (("a", 1, [1, 0, 0, 0]), ("b", 2, [1, 2, 0, 0]))
    ]
    compare = local("compare")

    text = compare.report(compare.read(folders), "a corpus")

    assert "| test | 2 | 25.0 | 17.7 | 12.5 to 37.5 |" in text
    assert "Against" not in text


def test_divisions_of_the_corpus_have_a_mean_of_their_own(local, tmp_path):
    folders = [
        results(
            tmp_path / f"{config}_{name}",
            config,
            0,
            errors,
            fold={"name": f"test_{name}", "options": f"--test_speaker {name}"},
        )
        for config, name, errors in (
            ("train_rnn", "ann", [1, 1, 0, 0]),
            ("train_rnn", "bob", [2, 2, 0, 0]),
            ("train_mega_bias", "ann", [1, 0, 0, 0]),
            ("train_mega_bias", "bob", [1, 2, 0, 0]),
        )
    ]
    compare = local("compare")

    text = compare.report(compare.read(folders), "a corpus", "train_rnn")

    rows = text.splitlines()
    assert any(row.startswith("| train_mega_bias | 0 | test_bob | 2,0") for row in rows)
    command = "./run.sh --train_config conf/train_rnn.yaml --seed 0 --test_speaker bob"
    assert f"    {command}" in rows
    assert "## Seeds" not in text
    # 12.5 and 37.5 %
    assert (
        "| train_mega_bias | 0 | decode_default | test | 2 | 25.0 | 17.7 "
        "| 12.5 to 37.5 |" in rows
    )
    for name in ("ann", "bob"):  # against the reference on the same division
        row = f"| train_mega_bias | 0 | test_{name} | decode_default | -12.5 ("
        assert row in text


def test_seeds_are_told_apart_from_divisions(local, tmp_path):
    folders = [
        results(tmp_path / f"{seed}{name}", "train_rnn", seed, errors, fold=fold)
        for name in ("ann", "bob")
        for fold in ({"name": name, "options": ""},)
        for seed, errors in ((1, [1, 0, 0, 0]), (2, [1, 2, 0, 0]))
    ]
    compare = local("compare")

    text = compare.report(compare.read(folders), "a corpus")

    seeds, divisions = text.split("## Seeds")[1].split("## Divisions")
    for name in ("ann", "bob"):
        row = f"| train_rnn | {name} | decode_default | test | 2 | 25.0 | 17.7 |"
        assert row in seeds
    for seed, rate in ((1, "12.5"), (2, "37.5")):
        row = f"| train_rnn | {seed} | decode_default | test | 2 | {rate} | 0.0 |"
        assert row in divisions


def test_the_interval_is_that_of_paired_differences(local):
    generator = np.random.default_rng(5)
    shared = generator.poisson(1.0, 400)  # hard utterances are hard for both
    better = shared + generator.binomial(1, 0.05, 400)
    worse = shared + generator.binomial(1, 0.15, 400)

    def errors(counts):
        by_utterance = {str(number): int(n) for number, n in enumerate(counts)}
        return {"words": 2000, "by_utterance": by_utterance}

    difference, low, high = local("compare").interval(errors(better), errors(worse))

    paired = better - worse
    assert difference == pytest.approx(100 * paired.sum() / 2000)
    # the normal approximation, good for so many utterances
    deviation = 100 * paired.std() * np.sqrt(400) / 2000
    assert low == pytest.approx(difference - 1.96 * deviation, abs=0.1 * deviation)
    assert high == pytest.approx(difference + 1.96 * deviation, abs=0.1 * deviation)
    assert high < 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 40}, "epochs 40, but 30"),
        ({"versions": {**VERSIONS, "espnet": "202511"}}, "versions .*202511"),
    ],
)
def test_unlike_trainings_are_not_compared(local, tmp_path, changes, message):
    recipe_error = local("files").RecipeError
    folders = [
        results(tmp_path / "a", "train_rnn", 1, [0]),
        results(tmp_path / "b", "train_mega", 1, [0], **changes),
    ]

    with pytest.raises(recipe_error, match=message):
        local("compare").read(folders)


def test_other_sets_are_not_compared(local, tmp_path):
    folders = [
        results(tmp_path / "a", "train_rnn", 1, [0]),
        results(tmp_path / "b", "train_mega", 1, [0, 0]),
    ]

    with pytest.raises(local("files").RecipeError, match=r"words .*4.*2"):
        local("compare").read(folders)


def test_sets_of_other_names_are_not_compared(local, tmp_path):
    folders = [
        results(tmp_path / name, "train_rnn", 1, [0], fold={"name": name})
        for name in ("ann", "bob")
    ]
    path = folders[1] / "results.json"
    path.write_text(path.read_text().replace('"test"', '"dev"'))

    with pytest.raises(local("files").RecipeError, match=r"sets \['dev'\], but \['t"):
        local("compare").read(folders)


def test_divisions_may_be_of_different_size(local, tmp_path):
    folds = [{"name": name, "options": ""} for name in ("ann", "bob")]
    folders = [
        results(tmp_path / "a", "train_rnn", 1, [0], fold=folds[0]),
        results(tmp_path / "b", "train_rnn", 1, [0, 0], fold=folds[1]),
    ]

    assert [o.fold for o in local("compare").read(folders)] == ["ann", "bob"]


def test_what_is_missing_or_damaged_is_named(local, tmp_path):
    recipe_error = local("files").RecipeError
    folder = results(tmp_path / "a", "train_rnn", 1, [0])
    compare = local("compare")

    with pytest.raises(recipe_error, match="none of the configurations"):
        compare.differences(compare.read([folder]), "train_rn")
    with pytest.raises(recipe_error, match=r"none/results\.json is missing; stage 6"):
        compare.read([folder, tmp_path / "none"])
    (folder / "results.json").write_text("{")
    with pytest.raises(recipe_error, match=r"results\.json is damaged"):
        compare.read([folder])
