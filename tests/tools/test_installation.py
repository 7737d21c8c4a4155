"""tools/installation.py: the findings, on installations made up for it and this one."""

import re
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from espnet_mega_bias.registration import OLDEST_ESPNET
from espnet_mega_bias.tools import distributions, installation, probes
from espnet_mega_bias.tools.finding import NOTE, OK, PROBLEM, note, ok, problem

FAILED = {"error": "OSError: no library", "missing": None}
OURS = {
    "class": "espnet_mega_bias.decoder.MEGABiasDecoder",
    "file": "decoder.py",
    "remark": None,
}
NOT_THERE = {"class": None, "file": None, "remark": None}
FINE = ok("something", "is fine")
BROKEN = problem("something", "is broken", "pip install something")


@pytest.fixture
def versions(monkeypatch):
    """Return a function that lets distributions claim versions, or be missing."""

    def claim(**claimed):
        def installed(name):
            return claimed[name] if name in claimed else real(name)

        monkeypatch.setattr(distributions, "installed", installed)
        monkeypatch.setattr(installation, "installed", installed)

    real = distributions.installed

    return claim


def test_is_imported_without_torch_and_espnet():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; import espnet_mega_bias.tools.installation; "
            "print({'torch', 'espnet', 'espnet2', 'packaging'} & set(sys.modules))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("version", "state", "text", "mend"),
    [
        (None, PROBLEM, "not installed in", f"pip install 'espnet>={OLDEST_ESPNET}'"),
        (
            "202509",
            PROBLEM,
            "202509 is too old, 202511 is the oldest that works",
            "pip install --upgrade 'espnet>=202511'",
        ),
        ("0.10.6", PROBLEM, "0.10.6 is too old", "pip install --upgrade"),
        ("202511", OK, "202511", None),
        ("202511.post1", OK, "202511.post1", None),
        ("202703", OK, "202703", None),
    ],
)
def test_wants_an_espnet_that_is_new_enough(
    versions, monkeypatch, version, state, text, mend
):
    versions(espnet=version)
    there = version is not None
    monkeypatch.setattr(installation, "find_spec", lambda _: there or None)

    finding = installation.espnet()

    assert finding.state == state
    assert text in finding.text
    assert (finding.mend or "").startswith(mend or "")


def test_an_espnet_without_its_files_or_without_pip(versions, monkeypatch):
    versions(espnet="202611")
    monkeypatch.setattr(installation, "find_spec", lambda _: None)
    assert installation.espnet().mend == (
        "pip install --force-reinstall --no-deps 'espnet==202611'"
    )

    versions(espnet=None)
    monkeypatch.setattr(installation, "find_spec", lambda _: "a source tree")
    assert installation.espnet().state == OK


def test_a_torch_that_is_missing_or_of_another_version_comes_with_its_torchaudio(
    versions,
):
    for version, text in (
        (None, "not installed"),
        ("2.12.0", "2.12.0 does not go with espnet-mega-bias .*asks for .*2.11"),
        ("2.15.0+cu130", r"2\.15\.0\+cu130 does not go with"),
    ):
        versions(torch=version)
        finding = installation.torch({})

        assert finding.state == PROBLEM
        assert re.match(text, finding.text)

        # Whatever is asked for, pip is asked for.
        install, *wanted = finding.mend.split(" '")
        assert install == "pip install --upgrade"
        wanted = {r.name: r for r in (Requirement(each[:-1]) for each in wanted)}
        assert set(wanted) == {"torch", "torchaudio"}
        assert not wanted["torch"].specifier.contains("2.12.0")
        assert wanted["torch"].specifier.contains("2.11.0")


def test_a_torch_that_does_not_load_is_installed_again(versions):
    versions(torch="2.11.0+cu128")

    finding = installation.torch(FAILED)

    assert finding.text == "2.11.0+cu128 does not load (OSError: no library)"
    assert finding.mend == "pip install --force-reinstall 'torch==2.11.0'"


def test_a_torchaudio_that_does_not_load_is_named_with_both_versions(versions):
    versions(torch="2.11.0", torchaudio="2.11.1")

    finding = installation.torchaudio(FAILED, FINE)

    assert finding.state == PROBLEM
    assert finding.text == (
        "2.11.1 does not load beside torch 2.11.0 (OSError: no library)"
    )
    assert finding.mend == "pip install 'torchaudio==2.11.0'"


def test_the_right_torchaudio_that_does_not_load_is_installed_again(versions):
    versions(torch="2.11.0", torchaudio="2.11.0")

    assert installation.torchaudio(FAILED, FINE).mend == (
        "pip install --force-reinstall --no-deps 'torchaudio==2.11.0'"
    )


def test_a_missing_torchaudio_follows_torch(versions):
    versions(torch="2.14.1", torchaudio=None)
    assert installation.torchaudio(FAILED, FINE).mend == (
        "pip install 'torchaudio==2.11.1'"
    )

    versions(torch=None, torchaudio=None)
    assert installation.torchaudio(FAILED, BROKEN).mend == BROKEN.mend


def test_a_torchaudio_that_loads_may_still_be_of_another_version(versions):
    versions(torch="2.11.0", torchaudio="2.10.0")

    finding = installation.torchaudio({"version": "2.10.0"}, FINE)

    assert finding.state == PROBLEM
    assert "2.10.0 does not go with espnet-mega-bias" in finding.text


@pytest.mark.parametrize(
    ("tried", "state", "text"),
    [
        (
            {"cuda": "12.8", "devices": ["A", "B"], "remark": None},
            OK,
            "12.8: A, B",
        ),
        ({"cuda": None, "devices": [], "remark": None}, NOTE, "built without it"),
        (
            {"cuda": "12.8", "devices": [], "remark": "driver too old"},
            NOTE,
            r"built for 12.8, but sees no device (driver too old)",
        ),
        (FAILED, NOTE, "unknown"),
    ],
)
def test_names_the_cuda_devices(tried, state, text):
    finding = installation.cuda(tried)

    assert finding.state == state
    assert text in finding.text


def test_says_which_loss_is_used_and_whether_it_is_right():
    ours = {"device": "cpu", "defect": "is not installed", "value": probes.KNOWN_LOSS}
    real = {**ours, "defect": None}

    assert installation.warprnnt(ours).state == NOTE
    assert "is not installed: ESPnet's model trains with torchaudio's loss" in (
        installation.warprnnt(ours).text
    )
    assert installation.warprnnt(real).state == OK
    assert "1.386294 from torchaudio on cpu" in installation.loss(ours, []).text
    assert "1.386294 from warprnnt_pytorch" in installation.loss(real, []).text
    assert installation.loss(ours, []).state == OK

    for wrong in (1.0, float("nan"), -probes.KNOWN_LOSS):
        finding = installation.loss({**ours, "value": wrong}, [])
        assert finding.state == PROBLEM
        assert "where 1.386294 (2 ln 2) is right" in finding.text
        assert finding.mend.startswith("pip install 'torchaudio==")

    finding = installation.loss(FAILED, [FINE, BROKEN])
    assert finding.text == "cannot be computed: something does not work"
    assert finding.mend == BROKEN.mend
    assert "no library" in installation.loss(FAILED, [FINE]).text
    assert installation.warprnnt(FAILED).state == NOTE


@pytest.fixture
def no_switch(monkeypatch):
    monkeypatch.delenv("ESPNET_MEGA_BIAS_AUTOLOAD", raising=False)


def test_the_switch_is_named_with_the_line_that_takes_it_away(monkeypatch):
    monkeypatch.setenv("ESPNET_MEGA_BIAS_AUTOLOAD", "0")

    finding = installation.startup_hook({"ran": False})

    assert finding.state == PROBLEM
    assert finding.text == "ESPNET_MEGA_BIAS_AUTOLOAD=0 switches it off"
    assert finding.mend == "unset ESPNET_MEGA_BIAS_AUTOLOAD"


def test_the_start_up_file_has_to_be_there_to_run_and_in_the_record(
    no_switch, distribution, monkeypatch
):
    record = "espnet_mega_bias.pth,,\nespnet_mega_bias.start,,\n"
    folder = distribution("espnet-mega-bias", "0.1.0", files={"RECORD": record})
    file = folder / distributions.STARTUP_FILE

    finding = installation.startup_hook({"ran": False})
    assert finding.state == PROBLEM
    assert finding.text == f"{file} is missing"
    assert finding.mend == (
        "pip install --force-reinstall --no-deps 'espnet-mega-bias'"
    )
    assert installation.startup_hook({"ran": True}).state == NOTE

    file.write_text("")
    assert installation.startup_hook({"ran": True}).state == OK
    assert "runs no start-up files in that folder" in (
        installation.startup_hook({"ran": False}).text
    )
    assert installation.startup_hook(FAILED).text == "OSError: no library"

    monkeypatch.setattr("site.getsitepackages", lambda: [str(folder)])
    finding = installation.startup_hook({"ran": False})
    assert finding.state == PROBLEM
    assert finding.text == f"{file} is there, but does nothing in a new process"

    (folder / "espnet_mega_bias-0.1.0.dist-info" / "RECORD").write_text("other.py,,\n")
    finding = installation.startup_hook({"ran": True})
    assert finding.state == NOTE
    assert "not in RECORD" in finding.text


def test_the_decoder_in_the_tables_is_ours():
    for check in (installation.espnet2_decoders, installation.espnet3_decoders):
        assert check(OURS, FINE, []).state == OK


def test_a_decoder_that_is_not_registered_comes_with_the_reason():
    for check in (installation.espnet2_decoders, installation.espnet3_decoders):
        finding = check(NOT_THERE, BROKEN, [])
        assert finding.state == PROBLEM
        assert finding.mend == BROKEN.mend

        finding = check({**NOT_THERE, "remark": "because"}, FINE, [])
        assert finding.state == PROBLEM
        assert "because" in finding.text
        assert finding.mend.startswith("pip install")


@pytest.mark.parametrize(
    ("foreign", "mend"),
    [
        ("mine.Decoder", "${EDITOR:-vi} '/src/mine.py'"),
        ("yaml.Decoder", "pip uninstall PyYAML"),
        ("espnet2.x.Decoder", "pip install --force-reinstall --no-deps 'espnet=="),
    ],
)
def test_another_class_under_the_name_is_named_with_its_file(foreign, mend):
    finding = installation.espnet2_decoders(
        {"class": foreign, "file": "/src/mine.py", "remark": None}, FINE, []
    )

    assert finding.state == PROBLEM
    assert foreign in finding.text
    assert "/src/mine.py" in finding.text
    assert finding.mend.startswith(mend)


def test_an_espnet_that_cannot_be_imported_comes_with_what_mends_it(versions):
    versions(espnet="202611")
    check = installation.espnet2_decoders

    assert check(FAILED, FINE, [BROKEN]).mend == BROKEN.mend
    assert check(FAILED, FINE, [FINE]).mend == (
        "pip install --force-reinstall --no-deps 'espnet==202611'"
    )

    lacks = {"error": "ModuleNotFoundError: librosa", "missing": "librosa"}
    assert check(lacks, FINE, [FINE]).mend == "pip install 'espnet==202611'"
    assert "librosa" in check(lacks, FINE, [FINE]).text


def test_espnet3_may_be_missing():
    check = installation.espnet3_decoders

    assert check({**FAILED, "missing": "espnet3"}, FINE, []).state == NOTE
    assert "something does not work" in check(FAILED, FINE, [BROKEN]).text

    finding = check({**FAILED, "missing": "lightning"}, FINE, [])
    assert finding.state == NOTE
    assert "pip install 'espnet-mega-bias[egs3]'" in finding.text


def test_extras_are_there_or_named_with_what_they_are_for(distribution):
    distribution(
        "espnet-mega-bias",
        "9",
        requires=['PyYAML; extra == "here"', 'absent; extra == "gone"'],
    )

    assert installation.optional("here", "this") == ok("[here]", "there, for this")
    assert installation.optional("gone", "that") == note(
        "[gone]",
        "missing: absent, only needed for that: pip install 'espnet-mega-bias[gone]'",
    )


def test_every_extra_of_the_package_is_looked_at():
    extras = set(distributions.plugin().metadata.get_all("Provides-Extra"))

    assert set(installation.EXTRAS) == extras - {"test"}


def test_names_the_modules_that_are_missing():
    finding = installation.modules(("json", "no_such_module"), "recipe")

    assert finding.text == "missing: no_such_module"
    assert finding.mend == "pip install 'espnet-mega-bias[recipe]'"
    assert installation.modules(("json",), "recipe").state == OK


def test_a_python_that_is_not_supported_is_named(distribution):
    assert installation.python().state == OK

    distribution("espnet-mega-bias", "0.1.0", python=">=99")
    finding = installation.python()
    assert finding.state == PROBLEM
    assert "espnet-mega-bias asks for >=99" in finding.text


def test_a_package_that_pip_does_not_know_is_a_problem(monkeypatch):
    assert installation.plugin_version().state == OK

    monkeypatch.setattr(installation, "plugin", lambda: None)
    assert installation.plugin_version().state == PROBLEM
    assert installation.startup_hook({"ran": True}).state == OK
    assert installation.startup_hook({"ran": False}).state == PROBLEM
