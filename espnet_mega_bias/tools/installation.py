"""Whether all that a training needs is there and works together.

Neither torch nor ESPnet has to be there for this module to be imported: what has to be
imported to be judged is in `probes`, and its outcome is handed in here.
"""

import os
import platform
import site
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

from espnet_mega_bias import __version__
from espnet_mega_bias.registration import DECODER_NAME, OLDEST_ESPNET
from espnet_mega_bias.tools import probes
from espnet_mega_bias.tools.distributions import (
    PLUGIN,
    installed,
    plugin,
    python_required,
    reinstall_line,
    requirements,
    startup_path,
    unmet,
)
from espnet_mega_bias.tools.finding import PROBLEM, Finding, note, ok, problem
from espnet_mega_bias.tools.probes import Result
from espnet_mega_bias.torchaudio_release import torchaudio_pip_line
from espnet_mega_bias_autoload import SWITCH

# Extra: what it is only needed for.
EXTRAS = {
    "plot": "espnet-mega-bias plot",
    "export": "espnet-mega-bias export",
    "recipe": "the recipes in egs",
    "egs3": "ESPnet3",
}

_DECODER_CLASS = "espnet_mega_bias.decoder.MEGABiasDecoder"


def examine() -> Iterator[Finding]:
    """Check the whole installation, one finding after the other.

    Yields:
        : Findings; those that explain later ones come first.

    Raises:
        ToolError: If `packaging` is missing.

    """
    # ESPnet's import takes nearly all of the time, so it begins first.
    process = probes.start()

    try:
        yield python()
        yield plugin_version()
        yield (host := espnet())
        tried = probes.collect(process)
    finally:
        process.kill()  # No longer there, unless the reader of the findings left.

    yield (pytorch := torch(tried["load_torch"]))
    yield (audio := torchaudio(tried["load_torchaudio"], pytorch))
    yield cuda(tried["load_torch"])
    yield warprnnt(tried["compute_loss"])
    yield loss(tried["compute_loss"], [pytorch, audio])
    yield (hook := startup_hook(tried["hook"]))

    causes = [host, pytorch, audio]
    yield espnet2_decoders(tried["espnet2_decoders"], hook, causes)
    yield espnet3_decoders(tried["espnet3_decoders"], hook, causes)

    for extra, purpose in EXTRAS.items():
        if extra == "egs3" and tried["espnet3_decoders"].get("missing") == "espnet3":
            yield note(f"[{extra}]", f"of no use without {purpose}")
        else:
            yield optional(extra, purpose)


def python() -> Finding:
    """Check the version of Python."""
    found = f"{platform.python_version()} on {platform.platform()}, {sys.executable}"

    for name in (PLUGIN, "espnet"):
        if wanted := python_required(name):
            return problem(
                "Python",
                f"{found}: {name} asks for {wanted}",
                "python3.12 -m venv .venv && . .venv/bin/activate && "
                f"pip install {PLUGIN}",
            )

    return ok("Python", found)


def plugin_version() -> Finding:
    """Check that pip knows this package."""
    found = f"{__version__} from {Path(probes.__file__).parents[1]}"

    if plugin() is None:
        return problem(PLUGIN, f"{found}, which pip did not install", reinstall_line())

    return ok(PLUGIN, found)


def espnet() -> Finding:
    """Check that a supported ESPnet is installed, without importing it."""
    subject, version = "ESPnet", installed("espnet")
    there = find_spec("espnet2") is not None

    if version is None and there:
        # A source tree on the path.
        return ok(subject, "version unknown: not installed by pip")

    if version is None:
        return problem(
            subject,
            f"not installed in {sys.executable}",
            f"pip install 'espnet>={OLDEST_ESPNET}'",
        )

    release = version.split(".")[0]

    if not release.isdigit() or int(release) < OLDEST_ESPNET:
        return problem(
            subject,
            f"{version} is too old, {OLDEST_ESPNET} is the oldest that works",
            f"pip install --upgrade 'espnet>={OLDEST_ESPNET}'",
        )

    if not there:
        return problem(subject, f"{version} has lost its files", _espnet_line(version))

    return ok(subject, version)


def torch(tried: Result) -> Finding:
    """Check that a supported torch is installed, and loads.

    Args:
        tried: Outcome of `probes.load_torch`.

    """
    subject, version = "torch", installed("torch")
    outside = _outside("torch")

    if version is None or outside:
        return problem(subject, outside or "not installed", _both_line())

    if error := tried.get("error"):
        return problem(
            subject,
            f"{version} does not load ({error})",
            f"pip install --force-reinstall 'torch=={_public(version)}'",
        )

    return ok(subject, version)


def torchaudio(tried: Result, pytorch: Finding) -> Finding:
    """Check that a supported torchaudio is installed, and loads beside this torch.

    Args:
        tried: Outcome of `probes.load_torchaudio`.
        pytorch: Finding on torch.

    """
    subject = "torchaudio"
    version, beside = installed("torchaudio"), installed("torch")
    mend = pytorch.mend or torchaudio_pip_line(beside)

    if version is None:
        return problem(
            subject, f"not installed, beside torch {beside or '(not installed)'}", mend
        )

    if error := tried.get("error"):
        if mend == f"pip install 'torchaudio=={_public(version)}'":
            # Nothing happens where the version is there already.
            mend = mend.replace("install", "install --force-reinstall --no-deps", 1)

        return problem(
            subject,
            f"{version} does not load beside torch {beside or '(not installed)'} "
            f"({error})",
            mend,
        )

    if outside := _outside(subject):
        return problem(subject, outside, mend)

    return ok(subject, f"{version} loads beside torch")


def cuda(tried: Result) -> Finding:
    """Name the CUDA devices.

    Args:
        tried: Outcome of `probes.load_torch`.

    """
    subject = "CUDA"

    if "error" in tried:
        return note(subject, "unknown: torch does not load")

    if devices := tried["devices"]:
        return ok(subject, f"{tried['cuda']}: {', '.join(devices)}")

    if tried["cuda"] is None:
        return note(subject, "torch is built without it: all runs on the CPU")

    remark = f" ({tried['remark']})" if tried["remark"] else ""

    return note(
        subject,
        f"torch is built for {tried['cuda']}, but sees no device{remark}: all runs on "
        "the CPU",
    )


def warprnnt(tried: Result) -> Finding:
    """Say which transducer loss ESPnet is going to use.

    Args:
        tried: Outcome of `probes.compute_loss`.

    """
    subject = "warprnnt_pytorch"

    if "error" in tried:
        return note(subject, "not tried, as computing a loss fails")

    if tried["defect"] is None:
        return ok(subject, "usable: ESPnet's model trains with it")

    return note(
        subject, f"{tried['defect']}: ESPnet's model trains with torchaudio's loss"
    )


def loss(tried: Result, causes: Sequence[Finding]) -> Finding:
    """Check a transducer loss by a value that is known.

    Args:
        tried: Outcome of `probes.compute_loss`.
        causes: Findings on what the loss needs.

    """
    subject = "transducer loss"
    cause = _first_problem(causes)
    mend = cause.mend if cause else torchaudio_pip_line(installed("torch") or "2.11")

    if "error" in tried:
        because = f"{cause.subject} does not work" if cause else tried["error"]
        return problem(subject, f"cannot be computed: {because}", mend)

    source = "torchaudio" if tried["defect"] else "warprnnt_pytorch"
    found = f"{tried['value']:.6f} from {source} on {tried['device']}"
    wanted = f"{probes.KNOWN_LOSS:.6f} (2 ln 2)"

    if not abs(tried["value"] - probes.KNOWN_LOSS) < 1e-4:  # NaN is wrong too
        return problem(subject, f"{found}, where {wanted} is right", mend)

    return ok(subject, f"{found}, as is right for two equal symbols")


def startup_hook(tried: Result) -> Finding:
    """Check that each new Python process gets the hook that registers the decoder.

    Args:
        tried: Whether it ran in a fresh process; see `probes.collect`.

    """
    subject = "start-up hook"

    if os.environ.get(SWITCH) == "0":
        return problem(subject, f"{SWITCH}=0 switches it off", f"unset {SWITCH}")

    distribution = plugin()

    if distribution is None:
        if tried.get("ran"):
            return ok(subject, "runs in a new process")
        return problem(subject, "no start-up file: not installed", reinstall_line())

    file = startup_path(distribution)

    if not file.is_file():
        if tried.get("ran"):
            return note(subject, f"runs in a new process, but {file} is missing")
        return problem(subject, f"{file} is missing", reinstall_line())

    if not tried.get("ran"):
        return problem(subject, _why_not_run(file, tried), reinstall_line())

    if file.name not in map(str, distribution.files or ()):
        return note(
            subject,
            f"{file} runs in a new process, but is not in RECORD: pip uninstall would "
            "leave it there",
        )

    return ok(subject, f"{file} runs in a new process")


def _why_not_run(file: Path, tried: Result) -> str:
    if error := tried.get("error"):
        return error

    folders = [*site.getsitepackages(), site.getusersitepackages()]

    if file.parent.resolve() not in [Path(folder).resolve() for folder in folders]:
        return f"{file}: Python runs no start-up files in that folder"

    return f"{file} is there, but does nothing in a new process"


def espnet2_decoders(
    tried: Result, hook: Finding, causes: Sequence[Finding]
) -> Finding:
    """Check that `mega_bias` is among ESPnet2's decoders, in a spawned process.

    Args:
        tried: Outcome of `probes.espnet2_decoders`.
        hook: Finding on the start-up hook.
        causes: Findings on what ESPnet needs.

    """
    subject = "ESPnet2 decoders"

    if "error" not in tried:
        return _decoder(subject, tried, hook, causes)

    if cause := _first_problem(causes):
        return problem(
            subject,
            f"ESPnet cannot be imported ({tried['error']})",
            cause.mend,
        )

    version = installed("espnet") or OLDEST_ESPNET
    # pip brings what a distribution lacks even where the distribution itself is there.
    mend = (
        f"pip install 'espnet=={version}'"
        if tried["missing"]
        else _espnet_line(version)
    )

    return problem(subject, f"ESPnet cannot be imported ({tried['error']})", mend)


def espnet3_decoders(
    tried: Result, hook: Finding, causes: Sequence[Finding]
) -> Finding:
    """Check that `mega_bias` is among ESPnet3's decoders, where there is an ESPnet3.

    Args:
        tried: Outcome of `probes.espnet3_decoders`.
        hook: Finding on the start-up hook.
        causes: Findings on what ESPnet needs.

    """
    subject = "ESPnet3 decoders"

    if "error" not in tried:
        return _decoder(subject, tried, hook, causes)

    if tried["missing"] == "espnet3":
        return note(
            subject,
            "no ESPnet3: it is in ESPnet 202609 and newer, for Python 3.12 on",
        )

    if cause := _first_problem(causes):
        return note(subject, f"not tried, as {cause.subject} does not work")

    return note(
        subject,
        f"ESPnet3 cannot be imported ({tried['error']}), only needed for itself: "
        f"{_extra_line('egs3')}",
    )


def _decoder(
    subject: str, tried: Result, hook: Finding, causes: Sequence[Finding]
) -> Finding:
    if tried["class"] == _DECODER_CLASS:
        return ok(subject, f"{DECODER_NAME} is registered, in a spawned process")

    if tried["class"] is not None:
        return problem(
            subject,
            f"{DECODER_NAME} is another class, {tried['class']} in {tried['file']}",
            _line_against(tried["class"], tried["file"]),
        )

    missing = f"{DECODER_NAME} is not registered in a spawned process"

    if hook.state == PROBLEM:
        return problem(subject, f"{missing}: no start-up hook", hook.mend)

    cause = _first_problem(causes)

    return problem(
        subject,
        f"{missing}: {tried['remark'] or 'the start-up hook had no effect'}",
        cause.mend if cause else reinstall_line(),
    )


def _line_against(foreign: str, file: str | None) -> str:
    """Give the line that takes away a class under our decoder's name.

    Args:
        foreign: Full name of the class.
        file: File of its module, or None.

    """
    owners = packages_distributions().get(foreign.partition(".")[0])

    if owners == ["espnet"]:
        return _espnet_line(installed("espnet"))

    if owners:
        return f"pip uninstall {owners[0]}"

    return f"${{EDITOR:-vi}} '{file}'  # register {foreign} under another name"


def optional(extra: str, purpose: str) -> Finding:
    """Check what an extra of this package brings.

    Args:
        extra: Name of the extra.
        purpose: What it is only needed for.

    """
    wanted = requirements(PLUGIN, extra)
    subject = f"[{extra}]"

    if not wanted:
        return note(subject, f"unknown: {PLUGIN} is not installed by pip")

    missing = sorted({name for each in wanted for name in unmet(each)})

    if missing:
        return note(
            subject,
            f"missing: {', '.join(missing)}, only needed for {purpose}: "
            f"{_extra_line(extra)}",
        )

    return ok(subject, f"there, for {purpose}")


def modules(names: Sequence[str], extra: str) -> Finding:
    """Check that Python modules can be found.

    Args:
        names: Modules.
        extra: Extra of this package that brings them.

    """
    missing = [name for name in names if find_spec(name) is None]

    if missing:
        return problem("modules", f"missing: {', '.join(missing)}", _extra_line(extra))

    return ok("modules", ", ".join(names))


def _outside(distribution: str) -> str | None:
    """Say which version is asked for, where another one is installed."""
    version = installed(distribution)

    for name in (PLUGIN, "espnet"):
        for requirement in requirements(name):
            if (
                requirement.name == distribution
                and version is not None
                and unmet(requirement)
            ):
                return (
                    f"{version} does not go with {name} {installed(name)}, which asks "
                    f"for {requirement.specifier}"
                )

    return None


def _both_line() -> str:
    """Give the pip line that brings a torch and a torchaudio that go together."""
    wanted = [
        f"'{requirement.name}{requirement.specifier}'"
        for requirement in requirements(PLUGIN)
        if requirement.name in ("torch", "torchaudio")
    ]

    # The newest ones of both go together; of older ones not all do.
    return f"pip install --upgrade {' '.join(wanted or ['torch', 'torchaudio'])}"


def _espnet_line(version: str | int) -> str:
    return f"pip install --force-reinstall --no-deps 'espnet=={version}'"


def _extra_line(extra: str) -> str:
    return f"pip install '{PLUGIN}[{extra}]'"


def _first_problem(findings: Sequence[Finding]) -> Finding | None:
    return next((each for each in findings if each.state == PROBLEM), None)


def _public(version: str) -> str:
    return version.split("+")[0]
