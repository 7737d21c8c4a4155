"""tools/probes.py: what only an import can tell, and what may end it."""

import sys
import types

import pytest

from espnet_mega_bias.tools import probes


def raises(exc):
    def probe():
        raise exc

    return probe


def test_the_installed_torch_loads_and_computes_the_known_loss():
    import torch

    assert probes.outcome(probes.load_torch)["version"] == torch.__version__
    assert "error" not in probes.outcome(probes.load_torchaudio)

    computed = probes.outcome(probes.compute_loss)

    assert computed["value"] == pytest.approx(probes.KNOWN_LOSS, rel=1e-6)


def test_the_loss_is_that_of_warprnnt_pytorch_where_it_is_usable(monkeypatch):
    from espnet_mega_bias import registration, rnnt_loss

    class Scaled(rnnt_loss.RNNTLoss):
        def forward(self, *args):
            return 3.0 * super().forward(*args)

    fake = types.ModuleType("warprnnt_pytorch")
    fake.RNNTLoss = Scaled
    monkeypatch.setitem(sys.modules, "warprnnt_pytorch", fake)

    monkeypatch.setattr(registration, "warprnnt_defect", lambda *_: None)
    assert probes.compute_loss()["value"] == pytest.approx(3 * probes.KNOWN_LOSS)

    monkeypatch.setattr(registration, "warprnnt_defect", lambda *_: "is broken")
    computed = probes.compute_loss()
    assert computed["value"] == pytest.approx(probes.KNOWN_LOSS)
    assert computed["defect"] == "is broken"


def test_a_broken_torchaudio_is_told_with_its_cause(monkeypatch):
    broken = types.ModuleType("torchaudio")

    def undefined_symbol(name):
        raise OSError("Could not load this library: x.so\nmore") from ImportError(
            "undefined symbol"
        )

    broken.__getattr__ = undefined_symbol
    monkeypatch.setitem(sys.modules, "torchaudio", broken)

    assert probes.outcome(probes.load_torchaudio)["error"] == (
        "OSError: Could not load this library: x.so (undefined symbol)"
    )


@pytest.mark.parametrize(
    ("exc", "error", "missing"),
    [
        (ValueError("a\nb"), "ValueError: a", None),
        (KeyError(), "KeyError: ", None),
        (SystemExit(1), "SystemExit: 1", None),
        (
            ModuleNotFoundError("No module named 'a.b'", name="a.b"),
            "ModuleNotFoundError: No module named 'a.b'",
            "a",
        ),
    ],
)
def test_an_error_becomes_one_line(exc, error, missing):
    assert probes.outcome(raises(exc)) == {"error": error, "missing": missing}


@pytest.fixture
def table(monkeypatch):
    """Put a module with a table of decoders in ESPnet's place."""

    def put(classes):
        module = types.ModuleType("made_up_table")
        module.decoder_choices = types.SimpleNamespace(classes=classes)
        monkeypatch.setitem(sys.modules, "made_up_table", module)
        monkeypatch.setattr(probes, "ESPNET2_TABLE", "made_up_table")

    return put


def test_the_decoder_is_looked_up_and_not_registered(table):
    classes = {}
    table(classes)

    assert probes.espnet2_decoders()["class"] is None
    assert classes == {}

    classes["mega_bias"] = types.SimpleNamespace
    found = probes.espnet2_decoders()
    assert found["class"] == "types.SimpleNamespace"
    assert found["file"] == types.__file__


def test_the_remark_of_the_start_up_hook_is_kept(monkeypatch, tmp_path):
    (tmp_path / "warning_table.py").write_text(
        "import types, warnings\n"
        "warnings.warn('something else')\n"
        "warnings.warn('espnet_mega_bias is not registered: because', RuntimeWarning)\n"
        "decoder_choices = types.SimpleNamespace(classes={})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(probes, "ESPNET2_TABLE", "warning_table")

    assert probes.espnet2_decoders()["remark"] == (
        "espnet_mega_bias is not registered: because"
    )


def test_a_start_without_the_package_is_told_by_its_last_words(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(probes, "__name__", "no_such_module")

    results = probes.collect(probes.start())

    assert set(results) == {"hook", *(probe.__name__ for probe in probes.PROBES)}
    for result in results.values():
        assert "No module named 'no_such_module'" in result["error"]


@pytest.mark.slow
def test_a_crash_is_told_and_what_came_before_it_is_kept(monkeypatch, tmp_path):
    (tmp_path / "torchaudio.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    results = probes.collect(probes.start())

    assert "version" in results["load_torch"]
    for name in ("load_torchaudio", "compute_loss", "espnet2_decoders"):
        assert "SIGSEGV" in results[name]["error"]
