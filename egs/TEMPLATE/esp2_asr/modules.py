"""Import of a recipe's own tools."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load(path: Path) -> ModuleType:
    """Import ``egs/<corpus>/local/<tool>.py``, which both forms of a recipe share.

    It is loaded from its path, because ESPnet3 gives a recipe's ``dataset`` a made-up
    name, under which no relative import reaches beyond the recipe, and under a name
    with the corpus in it, because the tools of all recipes have the same names.
    """
    name = f"{path.parents[1].name}_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # a dataclass looks itself up there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
