"""MEGA decoder with a rotary relative position bias for ESPnet's transducer.

Importing this package imports nothing else: a public name is fetched from its module
when it is first used. What runs at each start of Python is `espnet_mega_bias_autoload`.
"""

__version__ = "0.1.0"

_MODULE_OF = {
    "MEGA": "block",
    "MEGABiasDecoder": "decoder",
    "MultiHeadDampedEMA": "ema",
    "RNNTLoss": "rnnt_loss",
    "RelativePositionBias": "position_bias",
    "RotaryRelativePositionBias": "position_bias",
    # Not `register`: importing a submodule of that name would replace the function.
    "register": "registration",
}

__all__ = [
    "MEGA",
    "MEGABiasDecoder",
    "MultiHeadDampedEMA",
    "RNNTLoss",
    "RelativePositionBias",
    "RotaryRelativePositionBias",
    "register",
]


def __getattr__(name):
    """Import the module behind a public name and keep the name for the next use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__})
