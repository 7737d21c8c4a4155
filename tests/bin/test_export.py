"""`espnet-mega-bias export`: what it prints, and how it ends."""

from pathlib import Path

import pytest

from espnet_mega_bias.bin.main import main
from espnet_mega_bias.tools import onnx_export
from espnet_mega_bias.tools.onnx_export import Report

DIFFERENCES = {"encoder": 1.26e-6, "decoder_step": 5e-7, "joint": 2e-7}
SIZES = {"encoder": 2_340_000, "decoder_step": 500_000, "joint": 120_000}


@pytest.fixture
def asked(monkeypatch):
    """Leave the work away; give what was asked for, and a place for the report."""
    asked = {}

    def export(experiment, directory, int8):
        asked.update(checkpoint=experiment.checkpoint, directory=directory, int8=int8)

        return asked["report"]

    monkeypatch.setattr(onnx_export, "export", export)

    return asked


def test_differences_sizes_and_remarks_are_printed(asked, make_experiment, capsys):
    folder = make_experiment()
    asked["report"] = Report(DIFFERENCES, {}, SIZES, ["trained with ESPnet's mega"])

    assert main(["export", str(folder), "some/dir"]) == 0

    out = capsys.readouterr().out
    assert "encoder      1.3e-06   2.3 MB" in out
    assert "joint        2.0e-07   0.1 MB" in out
    assert "int8" not in out
    assert "note: trained with ESPnet's mega" in out
    assert "python some/dir/decode.py" in out
    assert asked["checkpoint"] == folder / "valid.loss.ave.pth"
    assert asked["directory"] == Path("some/dir")
    assert asked["int8"] is False


def test_int8_is_handed_on_and_its_differences_printed(asked, make_experiment, capsys):
    int8 = dict.fromkeys(DIFFERENCES, 0.034)
    asked["report"] = Report(DIFFERENCES, int8, SIZES, [])

    assert main(["export", str(make_experiment()), "some/dir", "--int8"]) == 0
    assert asked["int8"] is True
    assert "encoder      1.3e-06   int8 3.4e-02   2.3 MB" in capsys.readouterr().out


def test_another_decoder_ends_in_one_line(make_experiment, tmp_path, capsys):
    folder = make_experiment(decoder="stateless", decoder_conf={})

    assert main(["export", str(folder), str(tmp_path / "new")]) == 1

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("espnet-mega-bias export: error: ")
    assert "the decoder is 'stateless', not mega or mega_bias" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "new").exists()
