"""espnet_mega_bias.plain_module: which modules may be computed in another form."""

import pytest
import torch

from espnet_mega_bias.plain_module import is_plain


class Own(torch.nn.SiLU):
    def forward(self, x):
        return 2 * super().forward(x)


def test_torchs_own_class_alone_is_plain():
    assert is_plain(torch.nn.SiLU(), torch.nn.SiLU)
    assert not is_plain(Own(), torch.nn.SiLU)
    assert not is_plain(torch.nn.ReLU(), torch.nn.SiLU)
    assert not is_plain(None, torch.nn.SiLU)


@pytest.mark.parametrize(
    "hook", ["forward_pre_hook", "forward_hook", "full_backward_hook"]
)
def test_a_module_with_a_hook_is_not(hook):
    module = torch.nn.SiLU()
    handle = getattr(module, f"register_{hook}")(lambda *_: None)

    assert not is_plain(module, torch.nn.SiLU)

    handle.remove()
    assert is_plain(module, torch.nn.SiLU)
