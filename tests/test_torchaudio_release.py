"""The torchaudio for a torch."""

import pytest

from espnet_mega_bias.torchaudio_release import torchaudio_pip_line


@pytest.mark.parametrize(
    ("torch_version", "pip_line"),
    [
        ("2.11.0", "pip install 'torchaudio==2.11.0'"),
        ("2.11.1+cpu", "pip install 'torchaudio==2.11.0'"),
        ("2.13.0", "pip install 'torchaudio==2.11.1'"),
        ("2.14.1+cu130", "pip install 'torchaudio==2.11.1'"),
        ("2.12.0", "pip install 'torch==2.11.0' 'torchaudio==2.11.0'"),
        ("2.9.1+cpu", "pip install 'torchaudio==2.9.1'"),
    ],
)
def test_knows_the_torchaudio_for_a_torch(torch_version, pip_line):
    assert torchaudio_pip_line(torch_version) == pip_line
