"""The commands are tried on the models that the tools are tested with."""

from tools.conftest import make_experiment

__all__ = ["make_experiment"]
