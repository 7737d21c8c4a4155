"""What only an import can tell: each probe tries one thing.

`doctor` runs them in a process of its own, so that nothing they meet, not even a
crash of the interpreter, ends the report. That process is spawned as ESPnet's worker
processes are, from a fresh one, so what it finds registered is found in both.
"""

import gc
import importlib
import json
import multiprocessing
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable

from espnet_mega_bias.registration import DECODER_NAME
from espnet_mega_bias_autoload import HOST_MODULES, HostFinder

# Two equally probable symbols, one frame, one label: 1/2 for the label, 1/2 for the
# blank after it.
KNOWN_LOSS = 1.3862943611198906  # 2 ln 2

ESPNET2_TABLE, ESPNET3_TABLE = HOST_MODULES[:2]

# Name under which the end by a signal is reported.
_CRASHED = "crashed"

Result = dict[str, object]


def load_torch() -> Result:
    """Import torch, and look for CUDA devices.

    Returns:
        : `version`; `cuda` (or ROCm) version that it is built for, or None; names of
            the `devices` that it sees; `remark` of the driver, or None.

    """
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        devices = [
            torch.cuda.get_device_name(index)
            for index in range(torch.cuda.device_count())
        ]

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "devices": devices,
        "remark": _one_line(caught[0].message) if caught else None,
    }


def load_torchaudio() -> Result:
    """Import torchaudio with its compiled part."""
    import torch
    import torchaudio

    # Looked up here: torchaudio imports without it.
    torch.ops.torchaudio.rnnt_loss_forward  # noqa: B018 (the access is the test)

    return {"version": torchaudio.__version__}


def compute_loss() -> Result:
    """Compute a transducer loss as ESPnet's model will.

    Returns:
        : `device`; `defect` of `warprnnt_pytorch`, None where ESPnet uses it, else our
            own loss; `value` for the problem of `KNOWN_LOSS`.

    """
    import torch

    from espnet_mega_bias.registration import warprnnt_defect

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    defect = warprnnt_defect(device, 0.0)

    if defect is None:
        from warprnnt_pytorch import RNNTLoss
    else:
        from espnet_mega_bias.rnnt_loss import RNNTLoss

    one = torch.ones(1, dtype=torch.int32, device=device)
    value = RNNTLoss(reduction="mean", fastemit_lambda=0.0)(
        torch.zeros(1, 1, 2, 2, device=device), one.view(1, 1), one, one
    )

    return {"device": device, "defect": defect, "value": value.item()}


def espnet2_decoders() -> Result:
    """Look `mega_bias` up in ESPnet2's table; see `_decoder_in`."""
    return _decoder_in(ESPNET2_TABLE)


def espnet3_decoders() -> Result:
    """Look `mega_bias` up in ESPnet3's table; see `_decoder_in`."""
    return _decoder_in(ESPNET3_TABLE)


def _decoder_in(table: str) -> Result:
    """Look `mega_bias` up, without registering it.

    Args:
        table: ESPnet's module with the table.

    Returns:
        : `class`, its full name, or None where there is none; `file` of its module;
            `remark` of the start-up hook on why it did not register, or None.

    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decoder = importlib.import_module(table).decoder_choices.classes.get(
            DECODER_NAME
        )

    remarks = [str(warning.message) for warning in caught]
    module = None if decoder is None else sys.modules.get(decoder.__module__)

    return {
        "class": decoder and f"{decoder.__module__}.{decoder.__qualname__}",
        "file": getattr(module, "__file__", None),
        "remark": next(
            (_one_line(text) for text in remarks if "espnet_mega_bias" in text), None
        ),
    }


# In this order: what comes first helps to tell why a later one fails.
PROBES: tuple[Callable[[], Result], ...] = (
    load_torch,
    load_torchaudio,
    compute_loss,
    espnet2_decoders,
    espnet3_decoders,
)


def outcome(probe: Callable[[], Result]) -> Result:
    """Run a probe.

    Args:
        probe: Probe.

    Returns:
        : What it returns; else its `error`, in one line, and the top-level package
            that is `missing`, or None.

    """
    try:
        return probe()
    # ESPnet exits where a package is missing to it.
    except (Exception, SystemExit) as exc:
        missing = exc.name if isinstance(exc, ModuleNotFoundError) else None
        return {
            "error": describe(exc),
            "missing": missing and missing.partition(".")[0],
        }


def describe(exc: BaseException) -> str:
    """Say in one line what was raised, and from what."""
    text = f"{type(exc).__name__}: {_one_line(exc)}"
    cause = exc.__cause__

    return text if cause is None else f"{text} ({_one_line(cause)})"


def _one_line(message: object) -> str:
    lines = str(message).strip().splitlines()

    return lines[0].strip()[:300] if lines else ""


def start() -> subprocess.Popen:
    """Start the probes in a new process, and do not wait for them."""
    return subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import main; main()"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def collect(process: subprocess.Popen) -> dict[str, Result]:
    """Wait for the probes.

    Args:
        process: What `start` returned.

    Returns:
        : `hook`, with `ran`, whether the start-up hook is at work in a fresh process;
            and by the name of each probe its outcome. A probe that did not come to its
            end has the `error` instead.

    """
    out, err = process.communicate()
    results = {}

    for line in out.splitlines():
        # Among them may be what ESPnet's modules print.
        if line.startswith('{"probe": '):
            result = json.loads(line)
            results[result.pop("probe")] = result

    crashed = results.pop(_CRASHED, {}).get("error")
    last = (err.strip().splitlines() or ["no message"])[-1]
    reason = crashed or f"a new Python process ended early: {last}"

    for name in ("hook", *(probe.__name__ for probe in PROBES)):
        results.setdefault(name, {"error": reason, "missing": None})

    return results


def main() -> None:
    """Say whether the start-up hook ran in this process, and spawn one that probes."""
    ran = any(isinstance(finder, HostFinder) for finder in sys.meta_path)
    _print("hook", {"ran": ran})

    process = multiprocessing.get_context("spawn").Process(target=probe_all)
    process.start()
    process.join()

    if process.exitcode < 0:
        name = signal.Signals(-process.exitcode).name
        _print(_CRASHED, {"error": f"Python crashed in it or before it ({name})"})


def probe_all() -> None:
    """Print the outcome of each probe, as soon as it is known."""
    # Nearly all time goes into imports, and up to a quarter of that into looking for
    # garbage among what they make.
    gc.disable()

    for probe in PROBES:
        _print(probe.__name__, outcome(probe))


def _print(name: str, result: Result) -> None:
    print(json.dumps({"probe": name, **result}), flush=True)
