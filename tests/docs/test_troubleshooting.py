"""docs/troubleshooting.md against the messages in the sources."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from docs.pages import ROOT, read

PAGE = read("troubleshooting.md")
MODULES = [
    ROOT / "espnet_mega_bias_autoload.py",
    *sorted((ROOT / "espnet_mega_bias").glob("*.py")),
    *sorted((ROOT / "espnet_mega_bias" / "position_bias").glob("*.py")),
]
QUOTED = re.findall(r"`([^`]+)`", PAGE)

# Messages on the page that are not this package's, and the file that has each.
FOREIGN = {
    " must be one of ": "espnet2/train/class_choices.py",
    "beam_size (%d) should be smaller than or equal to vocabulary size (%d)": (
        "espnet2/asr_transducer/beam_search_transducer.py"
    ),
    "ALSD is not available in streaming mode.": (
        "espnet2/asr_transducer/beam_search_transducer.py"
    ),
    " is too long for the maximum number of ": (
        "espnet2/asr_transducer/decoder/modules/mega/positional_bias.py"
    ),
    "warp-transducer was not installed.": (
        "espnet2/asr_transducer/espnet_transducer_model.py"
    ),
    "Please consult the installation documentation.": (
        "espnet2/asr_transducer/espnet_transducer_model.py"
    ),
    " frames and is too short for subsampling": (
        "espnet2/asr_transducer/encoder/encoder.py"
    ),
    " frames), return empty results": "espnet2/asr_transducer/encoder/encoder.py",
    "Skipping updating the model.": "espnet2/train/trainer.py",
    "The gradients at all steps are invalid in this epoch.": "espnet2/train/trainer.py",
    "Something seems wrong. This training was stopped at ": "espnet2/train/trainer.py",
    "The batch-size must be equal or more than world_size": "espnet2/tasks/abs_task.py",
}
# ESPnet 202611 has these, and no older one.
NEWER = {
    "torch.load with weights_only=True failed for": (
        "espnet2/torch_utils/safe_torch_load.py"
    ),
    "ESPNET_ALLOW_UNSAFE_TORCH_LOAD": "espnet2/torch_utils/safe_torch_load.py",
}


def pattern(node):
    """Turn an expression that makes a message into a pattern of what it makes."""
    if isinstance(node, ast.Constant):
        return re.escape(str(node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(map(pattern, node.values))
    if isinstance(node, ast.BinOp):
        return pattern(node.left) + pattern(node.right)
    return ".+"


def messages():
    """Every message that is raised or warned with, as a pattern, and where."""
    found = []

    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                call = node.exc
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "warning"
            ):
                call = node
            else:
                continue

            # A module's missing name is Python's business, not a user's.
            if call.args and getattr(call.func, "id", "") != "AttributeError":
                text = re.sub("%s$", ".+", pattern(call.args[0]).replace("%s", ".+"))
                found.append((f"{path.name}:{node.lineno}", text))

    return found


def shortened(text):
    """The page may leave out what follows a sentence or is in brackets."""
    return re.split(r"(?<=\\\.)\\ |\\ \\\(|\.\+$", text)[0]


@pytest.mark.parametrize(
    ("where", "text"), messages(), ids=lambda value: value if ":" in value else ""
)
def test_every_message_of_the_package_is_on_the_page(where, text):
    # What is all variable is another's message, passed on.
    if not re.search(r"[a-z]{4,}", text):
        return

    assert any(re.search(shortened(text), quoted) for quoted in QUOTED), text


def test_every_quoted_message_is_somebodys():
    """Rows of the tables begin with one: ours, ESPnet's, or one of the others named."""
    ours = [shortened(text) for _, text in messages() if re.search("[a-z]{4,}", text)]
    foreign = [re.escape(text) for text in (*FOREIGN, *NEWER)]
    foreign = [text.replace("%d", r"\d+") for text in foreign]
    # torch, torchaudio, pip, argparse, Python and typeguard.
    others = [
        "undefined symbol",
        "libtorchaudio",
        "direct URL dependencies",
        "No module named",
        "invalid choice",
        "unexpected keyword",
        "is not an instance of",
        "CUDA out of memory",
        "Weights only load failed",
        "loading state_dict",
        "size mismatch",
        "No such file",
        "Flash Attention",
        "is not registered with",  # ours, put together before the warning
    ]
    rows = re.findall(r"^\| (`.*?) \|", PAGE, re.M)
    assert len(rows) > 50

    for row in rows:
        (first, *_) = re.findall(r"`([^`]+)`", row)
        known = [*ours, *foreign, *others]
        assert any(re.search(text, first) for text in known), first


@pytest.mark.parametrize(("text", "file"), FOREIGN.items())
def test_espnet_has_the_messages_that_are_quoted_as_its_own(text, file):
    assert text in source_of_espnet(file)


@pytest.mark.parametrize(("text", "file"), NEWER.items())
def test_espnet_202611_has_the_messages_that_older_ones_lack(text, file):
    if not (folder_of_espnet() / file).is_file():
        pytest.skip("this ESPnet is older")

    assert text in source_of_espnet(file)


def folder_of_espnet():
    (folder,) = importlib.util.find_spec("espnet2").submodule_search_locations

    return Path(folder).parent


def source_of_espnet(file):
    return (folder_of_espnet() / file).read_text()
