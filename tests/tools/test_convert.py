"""A converted model is the same weights under the other decoder's name."""

import errno
import os
import re
import shutil

import numpy
import pytest
import torch
import yaml
from espnet2.asr_transducer.decoder.mega_decoder import MEGADecoder
from espnet2.bin.asr_transducer_inference import Speech2Text

from espnet_mega_bias import MEGABiasDecoder
from espnet_mega_bias.tools import comparison as comparison_module
from espnet_mega_bias.tools.comparison import TOLERANCE, compare
from espnet_mega_bias.tools.convert import convert
from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.experiment import load

CLASSES = {"mega": MEGADecoder, "mega_bias": MEGABiasDecoder}


def read(path):
    return yaml.safe_load(path.read_text())


# --- what is written ---------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), [("mega", "mega_bias"), ("mega_bias", "mega")])
def test_the_other_decoder_gets_the_same_weights(old, new, make_experiment, tmp_path):
    folder = make_experiment(decoder=old)
    out = tmp_path / "out"

    conversion = convert(folder, out, new)

    assert sorted(path.name for path in out.iterdir()) == [
        "config.yaml",
        "valid.loss.ave.pth",
    ]
    assert conversion.checkpoint == out / "valid.loss.ave.pth"
    assert (
        conversion.checkpoint.read_bytes()
        == (folder / "valid.loss.ave.pth").read_bytes()
    )
    assert read(out / "config.yaml") == {**read(folder / "config.yaml"), "decoder": new}
    assert isinstance(load(out).build_decoder(), CLASSES[new])


def test_there_and_back_is_the_same_to_the_letter(make_experiment, tmp_path):
    folder = make_experiment(decoder="mega")

    convert(folder, tmp_path / "there", "mega_bias")
    convert(tmp_path / "there", tmp_path / "back", "mega")

    for name in ("config.yaml", "valid.loss.ave.pth"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()


def test_comments_order_and_line_ends_stay(make_experiment, tmp_path):
    folder = make_experiment(decoder="mega")
    config = folder / "config.yaml"
    text = config.read_text().replace("decoder: mega\n", "")
    lines = ["# Räume", 'decoder:  "mega"  # the decoder', *text.splitlines(), ""]
    config.write_bytes("\r\n".join(lines).encode())

    convert(folder, tmp_path / "out", "mega_bias")

    lines[1] = "decoder:  mega_bias  # the decoder"
    assert (tmp_path / "out" / "config.yaml").read_bytes().decode().split(
        "\r\n"
    ) == lines


@pytest.mark.parametrize("name", ["last.ckpt", "checkpoint.pth", "3epoch.pth"])
def test_a_checkpoint_keeps_its_kind_and_name(name, make_experiment, tmp_path):
    folder = make_experiment(decoder="mega")
    state = torch.load(folder / "valid.loss.ave.pth")
    training = {"optimizers": [{"state": {0: torch.ones(2)}}], "epoch": 3}
    key = {"last.ckpt": "state_dict", "checkpoint.pth": "model"}.get(name)
    torch.save(training | {key: state} if key else state, folder / name)

    convert(folder / name, tmp_path / "out", "mega_bias")

    assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_a_link_becomes_a_file(make_experiment, tmp_path):
    folder = make_experiment(decoder="mega")
    (folder / "valid.loss.ave.pth").rename(folder / "1epoch.pth")
    (folder / "latest.pth").symlink_to("1epoch.pth")

    convert(folder, tmp_path / "out", "mega_bias")
    shutil.rmtree(folder)

    load(tmp_path / "out").build_decoder()
    assert not (tmp_path / "out" / "latest.pth").is_symlink()


def test_the_optimizer_of_a_training_fits_the_other_decoder(make_experiment):
    # Optimizers know parameters by their order alone.
    experiment = load(make_experiment())

    theirs, ours = (
        [name for name, _ in experiment.build_decoder(decoder).named_parameters()]
        for decoder in CLASSES
    )

    assert ours == theirs


@pytest.mark.parametrize("new", ["mega_bias", "mega"])
def test_espnets_own_inference_takes_the_result(new, make_experiment, tmp_path):
    old = {"mega_bias": "mega", "mega": "mega_bias"}[new]
    folder = make_experiment(decoder=old)
    out = convert(folder, tmp_path / "out", new)

    speech2text = Speech2Text(out.config_file, out.checkpoint, beam_size=2)

    assert isinstance(speech2text.asr_model.decoder, CLASSES[new])
    assert all(
        torch.equal(value, out.source.state[name])
        for name, value in speech2text.asr_model.named_parameters()
    )


# --- paths in the configuration ----------------------------------------------------


@pytest.fixture
def recipe(make_experiment, tmp_path):
    """Return a model whose configuration names its statistics as a recipe does."""
    folder = make_experiment("recipe", decoder="mega")
    (folder / "exp").mkdir()

    for path in ("config.yaml", "valid.loss.ave.pth"):
        (folder / path).rename(folder / "exp" / path)

    numpy.savez(
        folder / "stats.npz", count=2, sum=numpy.zeros(10), sum_square=numpy.ones(10)
    )
    config = read(folder / "exp" / "config.yaml")
    config |= {"normalize": "global_mvn", "normalize_conf": {"stats_file": "stats.npz"}}
    (folder / "exp" / "config.yaml").write_text(yaml.safe_dump(config))

    return folder


def test_a_path_that_holds_from_here_stays(recipe, monkeypatch):
    monkeypatch.chdir(recipe)

    conversion = convert("exp", "out", "mega_bias")

    (file,) = conversion.files
    assert (file.key, file.name, file.path) == (
        ("normalize_conf", "stats_file"),
        "stats.npz",
        "stats.npz",
    )
    assert read(recipe / "out" / "config.yaml") == {
        **read(recipe / "exp" / "config.yaml"),
        "decoder": "mega_bias",
    }
    Speech2Text(conversion.config_file, conversion.checkpoint)


def test_a_path_that_holds_from_above_the_configuration_alone_becomes_absolute(
    recipe, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    conversion = convert(recipe / "exp", tmp_path / "out", "mega_bias")

    (file,) = conversion.files
    assert file.path == str(recipe / "stats.npz")
    assert read(tmp_path / "out" / "config.yaml")["normalize_conf"] == {
        "stats_file": str(recipe / "stats.npz")
    }
    Speech2Text(conversion.config_file, conversion.checkpoint)


def test_a_path_that_leads_nowhere_stays_and_is_told(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (recipe / "stats.npz").unlink()

    (file,) = convert(recipe / "exp", tmp_path / "out", "mega_bias").files

    assert (file.name, file.path) == ("stats.npz", None)
    assert read(tmp_path / "out" / "config.yaml")["normalize_conf"] == {
        "stats_file": "stats.npz"
    }


def test_an_absolute_path_is_no_matter(recipe, tmp_path):
    config = recipe / "exp" / "config.yaml"
    config.write_text(config.read_text().replace("stats.npz", f"{recipe}/stats.npz"))

    assert convert(recipe / "exp", tmp_path / "out", "mega_bias").files == []


# --- what is refused ---------------------------------------------------------------


def refused(match, *args, **kwargs):
    with pytest.raises(ToolError, match=match):
        convert(*args, **kwargs)


def test_the_decoder_that_it_has_already(make_experiment, tmp_path):
    folder = make_experiment(decoder="mega")

    refused(
        r"config\.yaml: the decoder is mega already", folder, tmp_path / "o", "mega"
    )
    assert not (tmp_path / "o").exists()


def test_another_decoder(make_experiment, tmp_path):
    folder = make_experiment(decoder="mega")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("decoder: mega\n", "decoder: rnn\n"))

    refused("the decoder is 'rnn', not mega", folder, tmp_path / "o", "mega_bias")
    assert not (tmp_path / "o").exists()


def test_a_name_of_no_decoder(make_experiment, tmp_path):
    with pytest.raises(
        ValueError, match="to must be one of mega_bias, mega, got 'rnn'"
    ):
        convert(make_experiment(), tmp_path / "o", "rnn")


def test_unlimited_positions_have_no_counterpart(make_experiment, tmp_path):
    folder = make_experiment()
    config = folder / "config.yaml"
    config.write_text(
        config.read_text().replace("max_positions: 20", "max_positions: null")
    )

    refused("decoder_conf: .*max_positions", folder, tmp_path / "o", "mega")
    assert not (tmp_path / "o").exists()


def test_an_output_that_exists_is_told_before_anything_is_read(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()

    refused("out exists, and is not empty", "no/model", tmp_path / "out", "mega")


def test_a_value_that_is_written_once_for_two_keys(make_experiment, tmp_path):
    folder = make_experiment(decoder="mega")
    config = folder / "config.yaml"
    text = config.read_text().replace("decoder: mega\n", "")
    config.write_text(f"note: &name mega\ndecoder: *name\n{text}")

    refused("decoder cannot be changed alone", folder, tmp_path / "o", "mega_bias")
    assert not (tmp_path / "o").exists()


def test_a_full_device_leaves_nothing(make_experiment, tmp_path, monkeypatch):
    folder = make_experiment(decoder="mega")

    def full(source, target):
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", full)

    refused("no space left .* to write .*out", folder, tmp_path / "out", "mega_bias")
    assert [path.name for path in tmp_path.iterdir()] == ["exp"]


@pytest.mark.parametrize("factor", [1.0 + 1e-4, float("nan")])
def test_decoders_that_differ_where_they_must_not(
    factor, make_experiment, tmp_path, monkeypatch
):
    forward = MEGADecoder.forward
    monkeypatch.setattr(
        MEGADecoder, "forward", lambda self, labels: forward(self, labels) * factor
    )

    refused(
        r"mega and mega_bias differ by .* nothing is written",
        make_experiment(decoder="mega"),
        tmp_path / "out",
        "mega_bias",
    )
    assert not (tmp_path / "out").exists()


# --- the comparison ----------------------------------------------------------------


def test_the_tolerance_is_that_of_the_tests(assert_close_espnet):
    theirs = torch.tensor([2.0, 0.0])

    assert_close_espnet(theirs + torch.tensor([0.0, 1.99 * TOLERANCE]), theirs)

    with pytest.raises(AssertionError):
        assert_close_espnet(theirs + torch.tensor([0.0, 2.01 * TOLERANCE]), theirs)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rel_pos_bias_type": "simple"},
        {"chunk_size": 3},
        {"truncation_length": 4},
        {"normalization_type": "rms_norm", "activation_type": "relu"},
    ],
    ids=str,
)
def test_both_are_one_function_over_labels_without_the_blank(change, make_experiment):
    folder = make_experiment()
    config = read(folder / "config.yaml")
    conf = {**config["decoder_conf"], **change}
    folder = make_experiment("changed", decoder_conf=conf)

    found = compare(load(folder))

    assert found.full <= TOLERANCE
    assert 0.0 < found.full_float64 <= TOLERANCE
    found.check()


def test_the_search_of_espnet_is_seen_to_differ(make_experiment):
    found = compare(load(make_experiment()))

    assert found.search > 1e-3


def test_an_espnet_search_that_stops_is_told(make_experiment):
    folder = make_experiment()
    conf = {**read(folder / "config.yaml")["decoder_conf"], "chunk_size": 1}

    found = compare(load(make_experiment("chunk", decoder_conf=conf)))

    assert re.match(r"\w+Error at position \d+: ", found.search)
    found.check()


def test_the_blank_shows_espnets_leak_in_an_untrained_model(make_experiment):
    folder = make_experiment()
    path = folder / "valid.loss.ave.pth"
    state = torch.load(path)
    torch.manual_seed(0)
    fresh = MEGADecoder(7, **read(folder / "config.yaml")["decoder_conf"]).state_dict()
    torch.save(state | {f"decoder.{n}": value for n, value in fresh.items()}, path)

    found = compare(load(folder))

    assert found.full <= TOLERANCE
    assert found.blank > 1e-2


@pytest.mark.parametrize("positions", [1, 2, 20])
def test_sequences_stay_within_max_positions(positions, make_experiment):
    folder = make_experiment()
    conf = {**read(folder / "config.yaml")["decoder_conf"], "max_positions": positions}

    found = compare(load(make_experiment("short", decoder_conf=conf)))

    assert found.lengths == sorted({1, min(7, positions), positions})
    assert (found.after_blank is None) == (positions == 1)


def test_sequences_run_over_chunks(make_experiment):
    folder = make_experiment()
    conf = {**read(folder / "config.yaml")["decoder_conf"], "chunk_size": 20}

    assert compare(load(make_experiment("c", decoder_conf=conf))).lengths[-1] == 41


def test_the_same_labels_are_drawn_each_time_and_no_blank(make_experiment):
    decoder = load(make_experiment()).build_decoder()

    first, again = (comparison_module._label_sequences(decoder) for _ in range(2))

    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(0 not in labels for labels in first)
    assert {label for labels in first for label in labels.tolist()} == set(range(1, 7))
