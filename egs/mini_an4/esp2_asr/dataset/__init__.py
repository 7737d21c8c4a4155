"""mini_an4 for ESPnet3: the two names that it looks for in a recipe."""

from .builder import MiniAn4Builder as DatasetBuilder
from .dataset import MiniAn4Dataset as Dataset

__all__ = ["Dataset", "DatasetBuilder"]
