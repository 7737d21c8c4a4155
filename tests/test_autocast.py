import pytest
import torch

from espnet_mega_bias.autocast import autocast_dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_type_is_that_of_the_context(dtype):
    assert autocast_dtype("cpu") is None

    with torch.autocast("cpu", dtype=dtype):
        assert autocast_dtype("cpu") == dtype
        assert torch.mm(*torch.ones(2, 3, 3)).dtype == dtype

        with torch.autocast("cpu", enabled=False):
            assert autocast_dtype("cpu") is None


def test_the_meta_device_has_none():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert autocast_dtype("meta") is None
