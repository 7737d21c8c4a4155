"""Noticing that the weights or hooks of a module have changed."""

import operator

import torch
from torch.utils.hooks import RemovableHandle

_VERSION = operator.attrgetter("_version")


class WeightsWatch:
    """Tells whether the weights of a module are still those that it saw at first.

    Noticed are changes in place, other memory (`.to`), parameters or submodules that
    others have taken the place of, and hooks that came by torch's functions or went.
    Cheap enough to ask at every step of a search.

    Args:
        module: Module to watch; buffers are not looked at.

    """

    def __init__(self, module: torch.nn.Module) -> None:
        """Construct a WeightsWatch object."""
        modules = list(module.modules())
        held = [
            (table, name, value)
            for table in (
                table for part in modules for table in (part._modules, part._parameters)
            )
            for name, value in table.items()
            if value is not None
        ]
        self._tables, self._names, self._held = zip(*held, strict=True)
        self._parameters = [
            value for value in self._held if isinstance(value, torch.nn.Parameter)
        ]
        # Tensors made in inference mode count no versions.
        self._counting = [
            parameter for parameter in self._parameters if not parameter.is_inference()
        ]
        self._hooks = [
            table
            for part in modules
            for table in (
                part._forward_pre_hooks,
                part._forward_hooks,
                part._backward_pre_hooks,
                part._backward_hooks,
            )
        ]
        self._hooks_given = RemovableHandle.next_id
        self._hooked = self._look_for_hooks()
        self._seen = self._look()

    def unchanged(self) -> bool:
        """Say whether weights and hooks are the same as at construction."""
        now = map(dict.get, self._tables, self._names)

        return (
            self._same_hooks()
            and all(map(operator.is_, now, self._held))
            and self._look() == self._seen
        )

    def _same_hooks(self) -> bool:
        # torch counts all the hooks that it ever took, of whatever module.
        given = RemovableHandle.next_id

        if self._hooked is None and given == self._hooks_given:
            return True

        same = self._look_for_hooks() == self._hooked

        if same:
            self._hooks_given = given

        return same

    def _look_for_hooks(self) -> list[tuple[int, ...]] | None:
        # Mostly there are none, which is quicker to see than which. Numbers of hooks
        # are never given again.
        return list(map(tuple, self._hooks)) if any(self._hooks) else None

    def _look(self) -> tuple[list[int], list[int]]:
        return (
            list(map(_VERSION, self._counting)),
            list(map(torch.Tensor.data_ptr, self._parameters)),
        )
