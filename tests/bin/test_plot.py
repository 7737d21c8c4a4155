"""`espnet-mega-bias plot`, as it is typed."""

import shutil

import pytest

from espnet_mega_bias.bin.main import main


@pytest.fixture(autouse=True)
def _logging_stays(monkeypatch):
    monkeypatch.setattr("logging.disable", lambda level: None)


def plot(*arguments):
    return main(["plot", *map(str, arguments)])


def test_draws_into_the_file_and_names_it(make_experiment, tmp_path, capsys):
    folder = make_experiment(token_type="char")
    blocks, attention = tmp_path / "blocks.svg", tmp_path / "attention.svg"

    assert plot(folder, "--output", blocks, "--length", 6) == 0
    assert capsys.readouterr().out == f"{blocks}\n"
    assert "<!-- bias by offset -->" in blocks.read_text()

    assert plot(folder, "--output", attention, "--labels", "A CAB") == 0
    assert "<!-- &lt;space&gt; -->" in attention.read_text()
    assert "<!-- attention weight -->" in attention.read_text()

    assert plot(folder, "--output", blocks) == 1
    assert "exists" in capsys.readouterr().err


def test_compared_models_are_in_the_legend(make_experiment, tmp_path):
    folders = [make_experiment(name) for name in ("one", "two", "three")]
    output = tmp_path / "a.svg"

    assert plot(folders[0], "--compare", *folders[1:], "--output", output) == 0

    for name in ("one", "two", "three"):
        assert f"<!-- {name} -->" in output.read_text()


def test_the_configuration_may_be_named(make_experiment, tmp_path, capsys):
    folder = make_experiment()
    (folder / "config.yaml").rename(tmp_path / "train.yaml")
    arguments = [folder / "valid.loss.ave.pth", "--output", tmp_path / "a.svg"]

    assert plot(*arguments) == 1
    assert "--config" in capsys.readouterr().err
    assert plot(*arguments, "--config", tmp_path / "train.yaml") == 0


def test_epochs_go_into_the_logs_of_the_training(make_experiment, capsys):
    folder = make_experiment()
    shutil.copy(folder / "valid.loss.ave.pth", folder / "3epoch.pth")
    logs = folder / "tensorboard" / "bias"

    assert plot(folder, "--tensorboard") == 0
    assert capsys.readouterr().out == f"{logs}: epoch 3\n"
    assert plot(folder, "--tensorboard") == 0
    assert capsys.readouterr().out == f"{logs}: nothing new\n"


@pytest.mark.parametrize("option", ["--compare", "--config"])
def test_logs_are_of_one_training(tmp_path, capsys, option):
    assert plot(tmp_path, "--tensorboard", option, tmp_path) == 1
    assert "--tensorboard goes with neither --compare" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--output", "a.png", "--tensorboard"]])
def test_one_place_to_draw_to_must_be_named(tmp_path, capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        plot(tmp_path, *arguments)

    assert stop.value.code == 2
    assert "--tensorboard" in capsys.readouterr().err


def test_another_ending_is_refused_in_one_line(tmp_path, capsys):
    assert plot(tmp_path, "--output", tmp_path / "a.pdf") == 1

    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"espnet-mega-bias plot: error: {tmp_path}/a.pdf: "
        "a picture ends in .png or .svg\n"
    )
