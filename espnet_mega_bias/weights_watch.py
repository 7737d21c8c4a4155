"""Noticing that the weights of a module have changed."""

import torch


class WeightsWatch:
    """Tells whether the weights of a module are still those that it saw at first.

    Noticed are changes in place, other memory (`.to`), and parameters or submodules
    that others have taken the place of. Cheap enough to ask at every step of a search.

    Args:
        module: Module to watch; buffers are not looked at.

    """

    def __init__(self, module: torch.nn.Module) -> None:
        """Construct a WeightsWatch object."""
        modules = list(module.modules())

        self._children = [
            (parent._modules, name, child)
            for parent in modules
            for name, child in parent._modules.items()
        ]
        self._parameters = [
            (parent._parameters, name, parameter)
            for parent in modules
            for name, parameter in parent._parameters.items()
            if parameter is not None
        ]
        # Tensors made in inference mode count no versions.
        self._counting = [
            parameter
            for _, _, parameter in self._parameters
            if not parameter.is_inference()
        ]
        self._seen = self._look()

    def unchanged(self) -> bool:
        """Say whether the weights are the same as at construction."""
        return (
            all(parent.get(name) is child for parent, name, child in self._children)
            and all(parent.get(name) is held for parent, name, held in self._parameters)
            and self._look() == self._seen
        )

    def _look(self) -> tuple[list[int], list[int]]:
        return (
            [parameter._version for parameter in self._counting],
            [parameter.data_ptr() for _, _, parameter in self._parameters],
        )
