"""What pip puts into an environment, takes out again, and what start-up costs."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from environments import HEAVY_FILE, ROOT, STARTUP_FILES

FINDER = "import sys; print('HostFinder' in [type(f).__name__ for f in sys.meta_path])"


@pytest.fixture(scope="module", params=["wheel", "sdist", "editable"])
def installed(request, make_environment):
    return make_environment(request.param)


@pytest.fixture(params=["wheel", "editable"])
def disposable(request, make_environment):
    return make_environment(request.param)


def record(environment):
    (path,) = environment.site_packages.glob("espnet_mega_bias-*.dist-info/RECORD")
    return {line.split(",")[0] for line in path.read_text().splitlines()}


def start(environment, *args, **options):
    """Return what an interpreter that does nothing prints, and its exit status."""
    done = environment.run(*args, "-c", "pass", **options)
    return done.returncode, done.stdout + done.stderr


def test_both_startup_files_are_installed_and_recorded(installed):
    for name in STARTUP_FILES:
        written = (installed.site_packages / name).read_text()
        assert written == (ROOT / "startup" / name).read_text()
        assert name in record(installed)


def test_the_startup_file_sorts_after_the_paths_of_editable_installs(installed):
    """E2."""
    others = {p.name for p in installed.site_packages.glob("__editable__*.pth")}
    assert all(name < STARTUP_FILES[0] for name in {"__editable__.z.pth", *others})
    assert STARTUP_FILES[0].endswith(".pth")


def test_the_startup_line_calls_the_hook_that_the_package_has():
    (line,) = (ROOT / "startup" / STARTUP_FILES[0]).read_text().splitlines()
    (entry,) = (ROOT / "startup" / STARTUP_FILES[1]).read_text().split()
    module, function = entry.split(":")
    assert line.startswith("import ")
    assert f"from {module} import {function}" in line
    assert callable(getattr(importlib.import_module(module), function))


def test_a_new_process_has_the_hook_and_its_own_copy_of_the_package(installed):
    """E1."""
    assert installed.output(FINDER) == "True"
    path = installed.output("import espnet_mega_bias as m; print(m.__file__)")
    editable = list(installed.site_packages.glob("__editable__*"))
    assert path.startswith(str(installed.source if editable else installed.folder))


def test_only_the_package_is_installed(installed):
    commands = {"../../../bin/espnet-mega-bias"}
    names = {name.split("/")[0] for name in record(installed) - commands}
    assert commands <= record(installed)
    unexpected = {
        name
        for name in names
        if not name.startswith(("espnet_mega_bias", "__editable__", "__pycache__"))
    }
    assert unexpected == set()


def test_the_distribution_has_the_packages_version(installed):
    code = (
        "import espnet_mega_bias as m, importlib.metadata as i;"
        "print(m.__version__ == i.version('espnet-mega-bias'))"
    )
    assert installed.output(code) == "True"


def test_the_command_is_installed_and_helps(installed):
    command = [installed.folder / "bin" / "espnet-mega-bias", "--help"]

    said = subprocess.check_output(command, text=True, cwd=installed.folder)

    for name in ("doctor", "plot", "convert", "export", "explain"):
        assert f"    {name} " in said


def test_the_switch_keeps_the_hook_out(installed):
    assert installed.output(FINDER, ESPNET_MEGA_BIAS_AUTOLOAD="0") == "False"


def test_starting_imports_the_hook_and_nothing_heavy(installed):
    """E3."""
    done = installed.run("-X", "importtime", "-c", "pass")
    imported = set(re.findall(r"\| +(\S+)$", done.stderr, re.MULTILINE))
    own = {name for name in imported if name.startswith("espnet_mega_bias")}
    assert own == {"espnet_mega_bias_autoload"}
    heavy = {"torch", "espnet", "espnet2", "espnet3", "typeguard", "numpy", "re"}
    assert not imported & heavy


def test_pip_starts_without_the_body_of_the_package(installed):
    done = installed.run("-X", "importtime", "-m", "pip", "--version")
    assert done.returncode == 0
    assert "espnet_mega_bias_autoload" in done.stderr
    assert "espnet_mega_bias.registration" not in done.stderr


def test_starting_is_silent_whatever_is_missing(disposable):
    """E4."""
    assert start(disposable) == (0, "")
    assert start(disposable, "-W", "error") == (0, "")
    code = "import espnet_mega_bias as m; print(m.__file__)"
    package = Path(disposable.output(code)).parent
    hook = package.parent / "espnet_mega_bias_autoload.py"
    (package / "__init__.py").unlink()
    assert start(disposable) == (0, "")
    hook.write_text("")
    assert start(disposable) == (0, "")
    hook.unlink()
    assert start(disposable) == (0, "")
    shutil.rmtree(package)
    assert start(disposable) == (0, "")
    shutil.rmtree(disposable.source)
    assert start(disposable) == (0, "")


def test_starting_is_silent_without_espnet_and_the_finder_waits(make_environment):
    environment = make_environment("wheel")
    for path in (HEAVY_FILE, "distutils-precedence.pth"):
        (environment.site_packages / path).unlink(missing_ok=True)
    assert start(environment) == (0, "")
    assert environment.output(FINDER) == "True"
    done = environment.run("-c", "import espnet2.tasks.asr_transducer")
    assert "No module named 'espnet2'" in done.stderr
    done = environment.run("-c", "import espnet_mega_bias as m; m.register()")
    assert re.search(r"ImportError: ESPnet is not installed.*pip install", done.stderr)


def test_uninstalling_leaves_nothing_behind_and_starts_silently(disposable):
    before = {p.name for p in disposable.site_packages.iterdir()}
    assert set(STARTUP_FILES) <= before
    disposable.uninstall()
    after = {p.name for p in disposable.site_packages.iterdir()}
    assert {name for name in after if "mega_bias" in name} == set()
    assert start(disposable) == (0, "")


def test_the_requirements_hold_in_this_environment():
    """What pip would check: each requirement that applies here is satisfied."""
    from packaging.requirements import Requirement

    for line in importlib.metadata.requires("espnet-mega-bias"):
        requirement = Requirement(line)
        # `extra == ...` is false for an empty extra: the extras are left out.
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            version = importlib.metadata.version(requirement.name)
            assert requirement.specifier.contains(version, prereleases=True), line


def test_the_startup_benchmark_runs(tmp_path):
    script = ROOT / "benchmarks" / "bench_startup.py"
    report = tmp_path / "startup.json"
    out = subprocess.check_output(
        [sys.executable, script, "--smoke", "--json", report], text=True
    )
    medians = json.loads(report.read_text())["median_ms"]
    assert medians["with"] > 0
    assert f"{medians['with']:.2f}" in out
