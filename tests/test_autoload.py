"""The start-up hook, on stand-ins for ESPnet's modules."""

import importlib
import importlib.util
import inspect
import pickle
import runpy
import subprocess
import sys
import threading
import types
import warnings

import pytest

import espnet_mega_bias_autoload as _autoload
from espnet_mega_bias import registration

HOST = "mega_bias_fake_host.tasks"


class Host:
    """A package on `sys.path` with one module that the hook watches."""

    def __init__(self, folder):
        self.folder = folder / "mega_bias_fake_host"
        self.folder.mkdir()
        (self.folder / "__init__.py").write_text("")
        self.registered = []

    def write(self, source, name="tasks"):
        (self.folder / f"{name}.py").write_text(source)
        importlib.invalidate_caches()

    def record(self, module):
        # Only complete modules count: `complete` is the last line of each source.
        assert module.complete
        self.registered.append(module)


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_autoload, "HOST_MODULES", (HOST,))
    monkeypatch.setattr(_autoload, "_reported", set())
    host = Host(tmp_path)
    host.write("complete = True\n")
    monkeypatch.setattr(registration, "register_module", host.record)
    _autoload.install_finder()
    yield host
    for name in [n for n in sys.modules if n.startswith("mega_bias_fake_host")]:
        del sys.modules[name]


def finders():
    return [f for f in sys.meta_path if isinstance(f, _autoload.HostFinder)]


def test_a_host_module_is_registered_once_after_it_ran(host):
    module = importlib.import_module(HOST)
    assert host.registered == [module]
    assert importlib.import_module(HOST) is module
    assert host.registered == [module]


@pytest.mark.parametrize("name", ["json", "espnet2", "mega_bias_fake_host"])
def test_the_finder_leaves_other_modules_alone(host, name):
    assert finders()[0].find_spec(name) is None


def test_a_host_that_no_finder_knows_is_not_found(host, monkeypatch):
    monkeypatch.setattr(_autoload, "HOST_MODULES", ("mega_bias_fake_host.absent",))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mega_bias_fake_host.absent")


def test_the_module_sees_its_own_loader_while_it_runs(host):
    host.write(
        "seen = type(__loader__).__name__, type(__spec__.loader).__name__\n"
        "complete = True\n"
    )
    module = importlib.import_module(HOST)
    assert module.seen == ("SourceFileLoader", "SourceFileLoader")
    assert inspect.getsource(module).startswith("seen = ")


def test_reloading_registers_with_the_new_contents(host):
    module = importlib.import_module(HOST)
    host.write("complete = True\nnew = 1\n")
    assert importlib.reload(module) is module
    assert host.registered == [module, module]
    assert module.new == 1


def test_the_hosts_own_error_comes_through_and_a_retry_registers(host):
    host.write("raise OSError('the host is broken')\n")
    with pytest.raises(OSError, match="the host is broken"):
        importlib.import_module(HOST)
    assert host.registered == []
    host.write("complete = True\n")
    module = importlib.import_module(HOST)
    assert host.registered == [module]


def test_an_import_cycle_registers_once_and_completely(host):
    host.write("from mega_bias_fake_host import other\ncomplete = True\n")
    host.write(f"import {HOST}\n", name="other")
    module = importlib.import_module("mega_bias_fake_host.other")
    assert host.registered == [sys.modules[HOST]]
    assert module


def test_threads_register_once(host):
    host.write("import time\ntime.sleep(0.1)\ncomplete = True\n")
    threads = [
        threading.Thread(target=importlib.import_module, args=(HOST,)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert host.registered == [sys.modules[HOST]]


def test_a_lazily_loaded_host_is_registered_when_it_is_used(host):
    spec = importlib.util.find_spec(HOST)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[HOST] = module
    spec.loader.exec_module(module)
    assert host.registered == []
    assert module.complete
    assert host.registered == [module]


def test_runpy_runs_a_host_as_a_script(host):
    host.write("complete = True\nname = __name__\n")
    assert runpy.run_module(HOST, run_name="__main__")["name"] == "__main__"


def test_a_spec_survives_pickling_before_and_after_the_import(host):
    spec = importlib.util.find_spec(HOST)
    copy = pickle.loads(pickle.dumps(spec))
    assert copy.origin == spec.origin
    assert copy.loader.get_source(HOST) == "complete = True\n"
    module = importlib.import_module(HOST)
    loader = pickle.loads(pickle.dumps(module.__spec__)).loader
    assert type(loader).__name__ == "SourceFileLoader"


def test_a_failing_registration_is_one_warning_and_the_host_goes_on(host, monkeypatch):
    def fail(module):
        raise ImportError("no decoder today")

    monkeypatch.setattr(registration, "register_module", fail)
    with pytest.warns(RuntimeWarning, match=f"{HOST}.*no decoder today") as caught:
        module = importlib.import_module(HOST)
    assert len(caught) == 1
    assert module.complete
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        importlib.reload(module)
    assert caught == []


def test_a_failing_registration_survives_warnings_as_errors(host, monkeypatch, capsys):
    def fail(module):
        raise ImportError("no decoder today")

    monkeypatch.setattr(registration, "register_module", fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = importlib.import_module(HOST)
    assert module.complete
    assert "no decoder today" in capsys.readouterr().err


def test_a_hook_in_front_bypasses_ours_until_it_is_installed_again(host):
    class Bypass:
        def find_spec(self, fullname, path=None, target=None):
            if fullname == HOST:
                return importlib.machinery.PathFinder.find_spec(fullname, path)
            return None

    sys.meta_path.insert(0, Bypass())
    module = importlib.import_module(HOST)
    assert host.registered == []
    _autoload.install_finder()
    assert importlib.reload(module) is module
    assert host.registered == [module]


def test_installing_again_keeps_one_finder_and_puts_it_first(host):
    sys.meta_path.reverse()
    _autoload.install_finder()
    _autoload.install_finder()
    assert finders() == sys.meta_path[:1]


def test_autoload_registers_with_a_host_that_is_imported_already(host, monkeypatch):
    module = types.ModuleType(HOST)
    module.complete = True
    monkeypatch.setitem(sys.modules, HOST, module)
    _autoload.autoload()
    assert host.registered == [module]


@pytest.mark.parametrize(("value", "count"), [("0", 0), ("1", 1), ("", 1)])
def test_only_0_switches_the_hook_off(host, monkeypatch, value, count):
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setenv("ESPNET_MEGA_BIAS_AUTOLOAD", value)
    _autoload.autoload()
    assert len(finders()) == count


def test_the_hook_imports_nothing_but_itself():
    # -S: without site, so that what is imported comes from the hook.
    code = (
        "import sys, os; sys.path.insert(0, sys.argv[1]); before = set(sys.modules)\n"
        "from espnet_mega_bias_autoload import autoload; autoload()\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    folder = _autoload.__file__.rpartition("espnet_mega_bias")[0]
    out = subprocess.check_output([sys.executable, "-S", "-c", code, folder], text=True)
    assert out.split() == ["espnet_mega_bias_autoload"]
