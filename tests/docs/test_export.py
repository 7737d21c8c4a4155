"""The commands and the snippet of docs/export.md."""

import json
import subprocess
import sys

import numpy as np
import pytest
import soundfile
import torch
from tools.conftest import make_experiment

from docs.pages import blocks, read, rows, run_shell

__all__ = ["make_experiment"]

pytestmark = pytest.mark.slow

PAGE = read("export.md")


@pytest.fixture
def folder(make_experiment, tmp_path):
    """What the commands of the page expect beside them."""
    exp = make_experiment("exp", frontend="default", input_size=None, token_type="char")
    (checkpoint,) = exp.glob("*.pth")
    state = torch.load(checkpoint, weights_only=True)
    # The search leaves a frame only once blanks win.
    state["joint_network.lin_out.bias"][0] += 4.0
    torch.save(state, checkpoint)
    soundfile.write(tmp_path / "speech.wav", 0.1 * np.random.randn(16000), 16000)

    return tmp_path


def test_the_page_runs_from_top_to_bottom(folder):
    install, export, decode = blocks(PAGE, "sh")[0].splitlines()
    # The tests run where it is installed.
    assert install == "pip install 'espnet-mega-bias[export]'"

    printed = run_shell(export, folder)

    assert "largest difference from PyTorch" in printed
    assert sorted(path.name for path in (folder / "exported").iterdir()) == sorted(
        cells[0] for cells in rows(PAGE, "file")
    )

    run_shell(decode, folder)

    assert (folder / "hyp.txt").read_text().startswith("speech")

    (snippet,) = blocks(PAGE, "python")
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path += ['exported']\n{snippet}"],
        cwd=folder,
        check=True,
    )

    run_shell(blocks(PAGE, "sh")[1], folder)
    model = json.loads((folder / "exported_int8" / "model.json").read_text())

    assert model["weights"] == "int8"
    assert "history" in model["state"]
