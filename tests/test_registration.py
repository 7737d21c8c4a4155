"""Registration: ESPnet's version, its tables, and the public names."""

import subprocess
import sys
import types
import warnings

import pytest

import espnet_mega_bias
import espnet_mega_bias_autoload as _autoload
from espnet_mega_bias import registration

MODEL_MODULE = "espnet2.asr_transducer.espnet_transducer_model"


@pytest.fixture
def choices():
    """A fresh table of ESPnet's own kind."""
    from espnet2.asr_transducer.decoder.abs_decoder import AbsDecoder
    from espnet2.asr_transducer.decoder.stateless_decoder import StatelessDecoder
    from espnet2.train.class_choices import ClassChoices

    return ClassChoices(
        "decoder",
        {"stateless": StatelessDecoder},
        type_check=AbsDecoder,
        default="stateless",
    )


@pytest.fixture
def espnet_version(monkeypatch):
    """Let ESPnet claim another version."""

    def claim(version):
        espnet2 = types.ModuleType("espnet2")
        espnet2.__version__ = version
        monkeypatch.setitem(sys.modules, "espnet2", espnet2)

    return claim


def test_each_public_name_is_found():
    for name in espnet_mega_bias.__all__:
        assert name in dir(espnet_mega_bias)
        value = getattr(espnet_mega_bias, name)
        assert value.__name__ == name
        assert value.__module__.startswith("espnet_mega_bias.")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="RotaryBias"):
        espnet_mega_bias.RotaryBias  # noqa: B018


def test_register_stays_a_function_after_the_hook_ran(choices, monkeypatch):
    # As a submodule's name, `register` would become that module.
    _autoload.register_or_warn(
        types.SimpleNamespace(__name__="a host", decoder_choices=choices)
    )
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    espnet_mega_bias.register()


def test_the_table_gets_the_decoder_and_keeps_its_own(choices):
    before = dict(choices.classes)
    registration.add_decoder(choices)
    assert choices.get_class("mega_bias") is espnet_mega_bias.MEGABiasDecoder
    assert "mega_bias" in choices.choices()
    registration.add_decoder(choices)
    assert choices.classes == {
        **before,
        "mega_bias": espnet_mega_bias.MEGABiasDecoder,
    }


def test_a_foreign_class_under_the_name_stays_and_both_are_named(choices):
    foreign = choices.classes["stateless"]
    choices.classes["mega_bias"] = foreign
    with pytest.raises(RuntimeError) as caught:
        registration.add_decoder(choices)
    for name in (
        "espnet2.asr_transducer.decoder.stateless_decoder.StatelessDecoder",
        "espnet_mega_bias.decoder.MEGABiasDecoder",
    ):
        assert name in str(caught.value)
    assert choices.classes["mega_bias"] is foreign


def test_an_older_copy_of_the_class_is_replaced(choices):
    current = espnet_mega_bias.MEGABiasDecoder
    choices.classes["mega_bias"] = type(
        current.__name__, (current,), {"__module__": current.__module__}
    )
    registration.add_decoder(choices)
    assert choices.classes["mega_bias"] is current


def test_a_table_of_another_kind_is_refused(choices):
    choices.base_type = dict
    with pytest.raises(TypeError, match=r"builtins\.dict.*MEGABiasDecoder"):
        registration.add_decoder(choices)
    assert "mega_bias" not in choices.classes


@pytest.mark.parametrize("version", ["202402", "202509.post2", "0.10.6"])
def test_an_older_espnet_is_an_error_with_the_way_out(espnet_version, version):
    espnet_version(version)
    with pytest.raises(RuntimeError) as caught:
        espnet_mega_bias.register()
    for part in (f"ESPnet {version} ", "202511", "202611", "pip install"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "version", ["202511", "202511.post1", "202611", "202712.dev0", "0.0.0"]
)
def test_a_supported_newer_or_unversioned_espnet_passes(espnet_version, version):
    espnet_version(version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registration.check_espnet()


def test_a_missing_espnet_is_an_error_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "espnet2", None)
    with pytest.raises(ImportError, match=r"not installed.*202511.*pip install"):
        espnet_mega_bias.register()


def test_an_espnet_that_misses_a_package_says_so_itself(monkeypatch, tmp_path):
    (tmp_path / "espnet2.py").write_text("import a_package_that_espnet_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "espnet2", raising=False)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_espnet_needs"):
        registration.check_espnet()


def test_an_older_espnet_is_one_warning_in_the_hook(espnet_version, monkeypatch):
    monkeypatch.setattr(_autoload, "_reported", set())
    espnet_version("202402")
    first, *others = map(types.ModuleType, _autoload.HOST_MODULES)
    with pytest.warns(RuntimeWarning, match=r"ESPnet 202402.*pip install"):
        _autoload.register_or_warn(first)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module in others:
            _autoload.register_or_warn(module)
    assert caught == []


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("espnet2.tasks.asr_transducer", "decoder_choices"),
        (MODEL_MODULE, "ESPnetASRTransducerModel"),
    ],
)
def test_a_host_without_its_table_or_class_is_named(name, lacking):
    with pytest.raises(RuntimeError, match=f"{name} has no {lacking}"):
        registration.register_module(types.ModuleType(name))


def test_register_by_hand_registers_with_imported_modules(choices, monkeypatch):
    name = _autoload.HOST_MODULES[0]
    module = types.ModuleType(name)
    module.decoder_choices = choices
    monkeypatch.setattr(registration, "HOST_MODULES", (name,))
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(
        sys,
        "meta_path",
        [f for f in sys.meta_path if not isinstance(f, _autoload.HostFinder)],
    )
    espnet_mega_bias.register()
    assert choices.classes["mega_bias"] is espnet_mega_bias.MEGABiasDecoder
    assert isinstance(sys.meta_path[0], _autoload.HostFinder)


def test_the_model_is_wrapped_once_and_keeps_its_signature():
    class Model:
        def _calc_transducer_loss(self, encoder_out, joint_out, target, t_len, u_len):
            """ESPnet's."""

    original = Model._calc_transducer_loss
    registration.add_loss_fallback(Model)
    wrapped = Model._calc_transducer_loss
    registration.add_loss_fallback(Model)
    assert Model._calc_transducer_loss is wrapped
    assert wrapped.__wrapped__ is original
    assert wrapped.__doc__ == "ESPnet's."


def test_importing_the_registration_imports_neither_torch_nor_espnet():
    code = (
        "import sys, espnet_mega_bias.registration as r\n"
        "print(*(m for m in ('torch', 'espnet', 'espnet2', 'typeguard')"
        " if m in sys.modules))"
    )
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert out.split() == []
