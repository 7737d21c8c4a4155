"""The graphs compute by onnxruntime what PyTorch computes, at any length."""

import dataclasses
import inspect
import json
import sys
from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from espnet_mega_bias import MEGABiasDecoder
from espnet_mega_bias.tools import onnx_decoder, onnx_export
from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.experiment import load
from espnet_mega_bias.tools.onnx_export import export, write_decoder_step, write_joint
from espnet_mega_bias.tools.onnx_graphs import DecoderStep, Joint
from tools.conftest import DECODER_CONF, ENCODER_CONF, TOKENS

PAD = 2
FILES = [
    "decode.py",
    "decoder_step.onnx",
    "encoder.onnx",
    "joint.onnx",
    "model.json",
    "tokens.txt",
]
GRAPHS = {"encoder", "decoder_step", "joint"}


# --- decoder step ------------------------------------------------------------------

# Between them, every value of each key that changes the graph; what a block computes
# of its inputs is compared for more of them in test_onnx_graphs.py.
STEPS = {
    "rotary": {},
    "simple, chunks": {"rel_pos_bias_type": "simple", "chunk_size": 3},
    "no limit, truncated": {"max_positions": None, "truncation_length": 3},
    "window and truncation of one": {"max_positions": 1, "truncation_length": 1},
}


def step_by_step(session, state, labels):
    """Feed labels one by one; give the outputs. (U, D)."""
    fed = {name: tensor.numpy() for name, tensor in state.items()}
    outs = []

    for label in labels:
        out, fed["ema"], keys, values, positions = session.run(
            None, {"labels": np.array([label]), **fed}
        )
        fed["length"] = fed["length"] + 1
        fed["keys"] = np.concatenate([fed["keys"], keys], axis=2)
        fed["values"] = np.concatenate([fed["values"], values], axis=2)
        fed["positions"] = np.concatenate([fed["positions"], positions], axis=1)
        outs.append(torch.from_numpy(out))

    return torch.cat(outs)


def compared(decoder, path, labels):
    """Give the outputs of the graph, and those of the decoder."""
    step = DecoderStep(decoder)
    write_decoder_step(step, path)
    session = onnxruntime.InferenceSession(path)

    state, outs = decoder.init_state(), []
    for end in range(1, len(labels) + 1):
        out, state = decoder.score(labels[:end], state)
        outs.append(out)

    return step_by_step(session, step.init_state(), labels), torch.cat(outs)


def random_labels(length):
    labels = torch.randint(len(TOKENS), (length,)).tolist()
    labels[0] = 0
    labels[4] = labels[5] = labels[9] = PAD

    return labels


@pytest.mark.parametrize("name", STEPS)
@torch.no_grad()
def test_a_step_by_onnxruntime_is_that_of_the_decoder(
    name, redraw, tmp_path, assert_close_espnet
):
    conf = {**DECODER_CONF, "num_blocks": 1, "max_positions": 9, "embed_pad": PAD}
    decoder = redraw(MEGABiasDecoder(len(TOKENS), **{**conf, **STEPS[name]})).eval()

    # Beyond what was traced, and beyond the window.
    assert_close_espnet(*compared(decoder, tmp_path / "step.onnx", random_labels(22)))


@torch.no_grad()
def test_every_activation_and_normalisation_by_onnxruntime(
    redraw, tmp_path, assert_close_espnet
):
    # One decoder: each part of each block has another activation.
    activations = "ftswish hardtanh identity leaky_relu mish relu selu smish swish tanh"
    normalizations = ("basic_norm", "layer_norm", "rms_norm", "scale_norm")
    decoders = [
        MEGABiasDecoder(
            len(TOKENS),
            **{
                **DECODER_CONF,
                "num_blocks": 1,
                "activation_type": activation,
                "normalization_type": normalizations[n % 4],
                "embed_pad": PAD,
            },
        )
        for n, activation in enumerate(activations.split())
    ]
    decoder = decoders[0]
    decoder.mega_blocks = torch.nn.ModuleList(
        torch.nn.ModuleList([first.mega_blocks[0][0], second.mega_blocks[0][1]])
        for first, second in zip(decoders[:5], decoders[5:], strict=True)
    )

    assert_close_espnet(
        *compared(redraw(decoder).eval(), tmp_path / "step.onnx", random_labels(12))
    )


@torch.no_grad()
def test_a_batch_by_onnxruntime_is_each_hypothesis_alone(
    redraw, tmp_path, assert_close_espnet
):
    conf = {**DECODER_CONF, "num_blocks": 1}
    step = DecoderStep(redraw(MEGABiasDecoder(len(TOKENS), **conf)).eval())
    write_decoder_step(step, tmp_path / "step.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "step.onnx")

    batch, history = 5, 7
    fed = {
        "labels": torch.randint(len(TOKENS), (batch,)),
        "length": torch.tensor([7, 3, 1, 5, 7]),
        "ema": torch.randn(1, batch, *step.init_state()["ema"].shape[2:]),
        "keys": torch.randn(1, batch, history, 8),
        "values": torch.randn(1, batch, history, 10),
        "positions": torch.arange(history).repeat(batch, 1),
    }
    fed["positions"][fed["positions"] >= fed["length"].unsqueeze(1)] = -1
    outs = session.run(None, {name: x.numpy() for name, x in fed.items()})

    for n in range(batch):
        length = int(fed["length"][n])
        alone = [
            fed["labels"][n : n + 1],
            fed["length"][n : n + 1],
            fed["ema"][:, n : n + 1],
            fed["keys"][:, n : n + 1, :length],
            fed["values"][:, n : n + 1, :length],
            fed["positions"][n : n + 1, :length],
        ]
        out, ema, *_ = step(*alone)

        assert_close_espnet(torch.from_numpy(outs[0][n : n + 1]), out)
        assert_close_espnet(torch.from_numpy(outs[1][:, n : n + 1]), ema)


# --- whole models ------------------------------------------------------------------


def operators(path):
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def test_a_model_is_exported_whole(make_experiment, tmp_path):
    # Audio, every block, random chunks in training, ESPnet's decoder, int8.
    folder = make_experiment(
        decoder="mega",
        frontend="default",
        input_size=None,
        frontend_conf={"fs": "8k", "n_fft": 128, "hop_length": 80, "n_mels": 10},
        normalize="utterance_mvn",
        token_type="char",
        speech_volume_normalize=0.5,
        encoder_conf={
            "input_conf": {"vgg_like": True, "conv_size": [4, 4]},
            "body_conf": [
                {**ENCODER_CONF["body_conf"][0], "block_type": block_type}
                for block_type in ("conformer", "branchformer", "ebranchformer")
            ],
            "main_conf": {"dynamic_chunk_training": True},
        },
    )
    directory = tmp_path / "new" / "exported"

    report = export(load(folder), directory, int8=True)

    assert sorted(path.name for path in directory.iterdir()) == FILES
    assert report.sizes == {
        name: (directory / f"{name}.onnx").stat().st_size for name in GRAPHS
    }

    # Rounding, which is told from no difference at all, and 7 bits of each weight.
    assert set(report.differences) == set(report.int8_differences) == GRAPHS
    assert all(0.0 < x < 1e-3 for x in report.differences.values())
    assert all(1e-3 < x < 1.0 for x in report.int8_differences.values())

    ours, full_context = report.remarks
    assert "trained with ESPnet's mega" in ours
    assert "full context" in full_context

    model = json.loads((directory / "model.json").read_text())
    assert model["speech"] == {
        "kind": "audio",
        "sample_rate": 8000,
        # 7 frames for a subsampling of 4, the first at sample 0.
        "shortest": 6 * 80,
        "volume": 0.5,
    }
    assert model["labels"] == {"count": len(TOKENS), "blank": 0}
    assert model["tokens"] == {"type": "char"}
    assert model["weights"] == "int8"
    assert model["exported_from"]["decoder"] == "mega"
    assert model["state"] == {
        "ema": [2, 1, 2, 12],
        "keys": [2, 1, 0, 8],
        "values": [2, 1, 0, 10],
        "history": 19,
    }
    assert (directory / "tokens.txt").read_text().splitlines() == TOKENS
    assert (directory / "decode.py").read_text() == inspect.getsource(onnx_decoder)

    # Two in the decoder's feed-forward modules and three in the other ones.
    assert operators(directory / "decoder_step.onnx")["MatMulInteger"] == 2 * 5
    assert operators(directory / "joint.onnx")["MatMulInteger"] == 3
    # At least the linear layers of three attentions.
    assert operators(directory / "encoder.onnx")["MatMulInteger"] > 3 * 4

    # The mel filters stay as they are.
    weights = onnx.load(directory / "encoder.onnx").graph.initializer
    assert any(weight.name.endswith("melmat") for weight in weights)

    # Nothing of the machine that exported.
    for name in GRAPHS:
        assert b"site-packages" not in (directory / f"{name}.onnx").read_bytes()


# --- what goes wrong ---------------------------------------------------------------


@pytest.fixture
def no_tracing(monkeypatch):
    """Fail where an error should have come before the long work."""

    def refuse(*args):
        raise AssertionError("traced")

    monkeypatch.setattr(onnx_export, "_write", refuse)


@pytest.mark.usefixtures("no_tracing")
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"decoder": "rnn", "decoder_conf": {}}, "the decoder is 'rnn', not mega"),
        (
            {"decoder": "stateless", "decoder_conf": {}},
            "the decoder is 'stateless', not mega",
        ),
        ({"token_type": "hugging_face"}, "token_type must be one of bpe, char"),
    ],
)
def test_another_model_is_refused(keys, said, make_experiment, tmp_path):
    experiment = load(make_experiment())
    config = experiment.config | keys

    with pytest.raises(ToolError, match=said):
        export(dataclasses.replace(experiment, config=config), tmp_path / "exported")

    assert not (tmp_path / "exported").exists()


@pytest.mark.usefixtures("no_tracing")
@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_is_named(package, make_experiment, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(
        ToolError, match=rf"{package} is missing: pip install '.*\[export\]'"
    ):
        export(load(make_experiment()), tmp_path / "exported")

    assert not (tmp_path / "exported").exists()


@pytest.mark.usefixtures("no_tracing")
def test_a_directory_with_something_in_it_stays(make_experiment, tmp_path):
    directory = tmp_path / "exported"
    directory.mkdir()
    (directory / "notes").write_text("mine")

    with pytest.raises(ToolError, match="exists, and is not empty"):
        export(load(make_experiment()), directory)

    assert [path.name for path in directory.iterdir()] == ["notes"]


@pytest.fixture
def no_graphs(monkeypatch):
    """Write, instead of graphs, what is none."""
    monkeypatch.setattr(
        onnx_export, "_write", lambda *args: args[-1].write_bytes(b"no graph")
    )


@pytest.mark.usefixtures("no_graphs")
def test_a_graph_that_does_not_run_is_not_kept(make_experiment, tmp_path):
    with pytest.raises(ToolError, match="the encoder graph does not run"):
        export(load(make_experiment()), tmp_path / "exported")

    assert not (tmp_path / "exported").exists()


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize("difference", [2e-3, float("nan")])
def test_a_graph_that_differs_is_not_kept(
    difference, make_experiment, tmp_path, monkeypatch
):
    found = {"encoder": 1e-6, "decoder_step": 1e-6, "joint": difference}
    monkeypatch.setattr(
        onnx_export, "_largest_difference", lambda path, *rest: found[path.stem]
    )

    with pytest.raises(ToolError, match=r"the joint graph differs .* nothing is kept"):
        export(load(make_experiment()), tmp_path / "exported")

    assert not (tmp_path / "exported").exists()
    assert not list(tmp_path.glob(".partial*"))


def test_a_difference_is_seen(make_experiment, tmp_path):
    joint = Joint(load(make_experiment()).build_model().joint_network)
    path = tmp_path / "joint.onnx"
    write_joint(joint, path)
    compare = onnx_export._compare_joint

    assert onnx_export._largest_difference(path, compare, joint) < 1e-6

    with torch.no_grad():
        joint.joint_network.lin_out.bias[1] += 0.01

    assert onnx_export._largest_difference(path, compare, joint) > 1e-4


def test_a_value_that_is_no_number_is_a_difference(make_experiment, tmp_path):
    joint = Joint(load(make_experiment()).build_model().joint_network)
    path = tmp_path / "joint.onnx"
    write_joint(joint, path)

    def compare(session):
        for value in (1.0, float("nan"), 1.0):
            yield torch.tensor([value]), torch.ones(1)

    assert not onnx_export._largest_difference(path, compare) <= onnx_export.TOLERANCE


def test_what_cannot_be_traced_is_told(make_experiment, tmp_path, monkeypatch):
    joint = Joint(load(make_experiment()).build_model().joint_network)

    def forward(encoder, decoder):
        return encoder if encoder.sum() > 0.0 else decoder

    monkeypatch.setattr(joint, "forward", forward)

    with pytest.raises(ToolError, match=r"torch\.onnx cannot export the joint: "):
        write_joint(joint, tmp_path / "joint.onnx")

    assert not (tmp_path / "joint.onnx").exists()
