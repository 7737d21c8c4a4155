"""Start-up hook: registers the decoder right after ESPnet's own modules are imported.

ESPnet has no plug-in interface. `espnet_mega_bias.pth` (up to Python 3.14) or
`espnet_mega_bias.start` (PEP 829, from Python 3.15) in site-packages calls
`autoload` in every new interpreter, hence also in processes that ESPnet spawns. It
adds one finder to `sys.meta_path`, which reacts to the three names in
`HOST_MODULES` and to nothing else. This module imports only `os` and `sys`, because
each start of the interpreter pays for it.
"""

import os
import sys

SWITCH = "ESPNET_MEGA_BIAS_AUTOLOAD"
HOST_MODULES = (
    "espnet2.tasks.asr_transducer",
    "espnet3.systems.esp2_asr.src.transducer_task",
    "espnet2.asr_transducer.espnet_transducer_model",
)

_reported = set()


def autoload():
    """Install the finder, unless ``ESPNET_MEGA_BIAS_AUTOLOAD=0`` forbids it."""
    if os.environ.get(SWITCH) == "0":
        return
    install_finder()
    for name in HOST_MODULES:
        if name in sys.modules:
            register_or_warn(sys.modules[name])


def install_finder():
    """Put the finder first on `sys.meta_path`, moving it there if it is installed."""
    sys.meta_path[:] = [
        HostFinder(),
        *(f for f in sys.meta_path if type(f).__module__ != __name__),
    ]


def register_or_warn(module):
    """Register with a host module; any failure is a warning, once per reason.

    Args:
        module: One of `HOST_MODULES`, after it ran.
    """
    try:
        from espnet_mega_bias.registration import register_module

        register_module(module)
    except Exception as exc:
        reason = f"{type(exc).__name__}: {exc}"
        if reason in _reported:
            return
        _reported.add(reason)
        message = (
            f"espnet_mega_bias is not registered with {module.__name__}, and ESPnet "
            f"goes on without it. {reason}"
        )
        import warnings

        try:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:
            # `python -W error` turns the warning into an exception, which would
            # take ESPnet's own decoders away.
            print(message, file=sys.stderr)


class HostFinder:
    """Meta-path finder that lets the others find a host module and wraps its loader."""

    def find_spec(self, fullname, path=None, target=None):
        """Return the spec of a host module with a wrapped loader, else None.

        Args:
            fullname: Dotted module name.
            path: Search path of the parent package.
            target: Module to be reloaded, if any.
        """
        if fullname not in HOST_MODULES:
            return None
        finders = list(sys.meta_path)
        if self in finders:
            # Only those behind: each hook in front has asked already.
            finders = finders[finders.index(self) + 1 :]
        for finder in finders:
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(fullname, path, target) if find_spec else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = RegisteringLoader(spec.loader)
                return spec
        return None


class RegisteringLoader:
    """Loader that registers with the module after the real loader executed it.

    Args:
        loader: The module's real loader; every other request goes to it.
    """

    def __init__(self, loader):
        """Remember the real loader."""
        self._loader = loader

    def __getattr__(self, name):
        """Delegate, so that `runpy`, `inspect` and resource readers see no change."""
        # Pickling asks for private names, also before there is a `_loader`.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module):
        """Execute the module as its own loader would, then register.

        Args:
            module: The new (or reloaded) module. ESPnet's errors pass through.
        """
        module.__loader__ = self._loader
        module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        register_or_warn(module)
