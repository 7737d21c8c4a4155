"""facebookresearch/mega: a converted block computes what it computed there."""

import argparse

import pytest
import torch
import yaml
from espnet2.torch_utils.load_pretrained_model import load_pretrained_model
from reference.fairseq_mega import layer_output

from espnet_mega_bias import MEGABiasDecoder
from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.fairseq_mega import (
    convert_blocks,
    convert_file,
    init_param,
)

SIZE, KEY_SIZE, VALUE_SIZE, HEADS, HIDDEN = 6, 4, 5, 3, 7
POSITIONS = 12
OPTIONS = {
    "activation_fn": "silu",
    "attention_activation_fn": "softmax",
    "normalize_before": False,
    "decoder_chunk_size": -1,
    "truncation_length": None,
    "max_target_positions": POSITIONS,
}


def make_layer(bias="rotary", p_name="delta", positions=POSITIONS):
    """Draw the weights of a layer, in the order of its parameters there."""
    other = {"delta": "alpha", "alpha": "delta"}[p_name]
    shapes = {
        "mega_layer.gamma": (2, KEY_SIZE),
        "mega_layer.beta": (2, KEY_SIZE),
        "mega_layer.norm.norm.weight": (SIZE,),
        "mega_layer.norm.norm.bias": (SIZE,),
        f"mega_layer.move.{p_name}": (SIZE, HEADS, 1),
        f"mega_layer.move.{other}": (SIZE, HEADS, 1),
        "mega_layer.move.beta": (SIZE, HEADS, 1),
        "mega_layer.move.gamma": (SIZE, HEADS),
        "mega_layer.move.omega": (SIZE,),
        "mega_layer.v_proj.weight": (VALUE_SIZE, SIZE),
        "mega_layer.v_proj.bias": (VALUE_SIZE,),
        "mega_layer.mx_proj.weight": (KEY_SIZE + VALUE_SIZE + 2 * SIZE, SIZE),
        "mega_layer.mx_proj.bias": (KEY_SIZE + VALUE_SIZE + 2 * SIZE,),
        "mega_layer.h_proj.weight": (SIZE, VALUE_SIZE),
        "mega_layer.h_proj.bias": (SIZE,),
        **(
            {"mega_layer.rel_pos_bias.rel_pos_bias": (2 * positions - 1,)}
            if bias == "simple"
            else {
                "mega_layer.rel_pos_bias.alpha": (1, KEY_SIZE),
                "mega_layer.rel_pos_bias.beta": (1, KEY_SIZE),
                "mega_layer.rel_pos_bias._float_tensor": (1,),
            }
        ),
        "nffn.norm.norm.weight": (SIZE,),
        "nffn.norm.norm.bias": (SIZE,),
        "nffn.fc1.weight": (HIDDEN, SIZE),
        "nffn.fc1.bias": (HIDDEN,),
        "nffn.fc2.weight": (SIZE, HIDDEN),
        "nffn.fc2.bias": (SIZE,),
    }

    return {name: torch.randn(s, dtype=torch.float64) for name, s in shapes.items()}


def as_model(layers):
    return {
        "decoder.version": torch.tensor([3.0]),
        "decoder.embed_tokens.weight": torch.randn(9, SIZE),
        **{
            f"decoder.layers.{number}.{name}": value
            for number, layer in enumerate(layers)
            for name, value in layer.items()
        },
        "decoder.output_projection.weight": torch.randn(9, SIZE),
    }


@pytest.fixture
def save(tmp_path):
    """Return a function that saves a model as fairseq does."""

    def write(weights, args=OPTIONS):
        path = tmp_path / "checkpoint_best.pt"
        extra = {"extra_state": {"val_loss": 1.5}, "optimizer_history": [{"n": 1}]}
        torch.save({"args": argparse.Namespace(**args), "model": weights} | extra, path)

        return path

    return write


# --- the same function -------------------------------------------------------------


@pytest.mark.parametrize("bias", ["simple", "rotary"])
@pytest.mark.parametrize("p_name", ["delta", "alpha"])
@pytest.mark.parametrize(
    ("chunk", "truncation"), [(None, None), (4, None), (None, 3), (4, 3)]
)
def test_the_blocks_compute_what_they_computed_there(
    bias, p_name, chunk, truncation, save, tmp_path, assert_close64
):
    layers = [make_layer(bias, p_name, chunk or POSITIONS) for _ in range(2)]
    args = {
        **OPTIONS,
        "decoder_chunk_size": chunk or -1,
        "truncation_length": truncation,
    }
    x = torch.randn(11, SIZE, dtype=torch.float64)

    expected = x
    for layer in layers:
        expected = layer_output(expected, layer, p_name, chunk, truncation)

    # As a training starts: ESPnet's own function, into the decoder of the snippet.
    out = tmp_path / "out"
    convert_file(save(as_model(layers), args), out)
    conf = yaml.safe_load((out / "decoder.yaml").read_text())
    decoder = MEGABiasDecoder(9, **conf["decoder_conf"]).double().eval()
    embedding = decoder.embed.weight.clone()
    load_pretrained_model(
        conf["init_param"][0],
        torch.nn.ModuleDict({"decoder": decoder}),
        ignore_init_mismatch=False,
    )

    y = x.unsqueeze(0)
    for mega, feed_forward in decoder.mega_blocks:
        y = feed_forward(mega(y))

    assert_close64(y.squeeze(0), expected)
    assert torch.equal(decoder.embed.weight, embedding)


def test_the_reference_tells_the_two_versions_apart():
    layer = make_layer()
    x = torch.randn(5, SIZE, dtype=torch.float64)

    difference = layer_output(x, layer, "delta") - layer_output(x, layer, "alpha")

    assert difference.abs().max() > 1e-2


def test_the_snippet_says_the_sizes(save, tmp_path):
    args = {**OPTIONS, "truncation_length": 1024}
    convert_file(save(as_model([make_layer()] * 3), args), tmp_path / "out")

    assert yaml.safe_load((tmp_path / "out" / "decoder.yaml").read_text()) == {
        "decoder": "mega_bias",
        "decoder_conf": {
            "block_size": SIZE,
            "linear_size": HIDDEN,
            "qk_size": KEY_SIZE,
            "v_size": VALUE_SIZE,
            "num_heads": HEADS,
            "rel_pos_bias_type": "rotary",
            "max_positions": POSITIONS,
            "truncation_length": 1024,
            "normalization_type": "layer_norm",
            "normalization_args": {"eps": 1e-5},
            "activation_type": "swish",
            "chunk_size": -1,
            "num_blocks": 3,
        },
        "init_param": [f"{tmp_path}/out/mega_blocks.pth::decoder"],
    }


def test_a_decoder_alone_is_taken_too():
    model = as_model([make_layer("simple")])
    alone = {name.removeprefix("decoder."): value for name, value in model.items()}

    blocks = convert_blocks(alone, OPTIONS)

    assert torch.equal(
        blocks.weights["mega_blocks.0.0.rel_pos_bias.relative_position_bias"],
        model["decoder.layers.0.mega_layer.rel_pos_bias.rel_pos_bias"],
    )
    assert blocks.decoder_conf["max_positions"] == POSITIONS


def test_a_rotary_bias_without_limit_stays_without(save):
    options = {name: OPTIONS[name] for name in OPTIONS if name[:3] != "max"}

    blocks = convert_blocks(as_model([make_layer()]), options)

    assert blocks.decoder_conf["max_positions"] is None


def test_options_may_come_from_a_file(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(as_model([make_layer()]), path)
    options = tmp_path / "options.yaml"
    options.write_text(yaml.safe_dump(OPTIONS))

    convert_file(path, tmp_path / "out", options)

    assert (tmp_path / "out" / "mega_blocks.pth").is_file()


def test_the_weights_are_saved_without_what_they_were_cut_from(tmp_path, save):
    layer = make_layer()
    layer["mega_layer.move.omega"] = torch.randn(1_000_000, dtype=torch.float64)[:SIZE]
    convert_file(save(as_model([layer])), tmp_path / "out")

    assert (tmp_path / "out" / "mega_blocks.pth").stat().st_size < 100_000


# --- what cannot be converted ------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"activation_fn": "relu"}, "activation_fn is 'relu'"),
        (
            {"attention_activation_fn": "laplace"},
            "attention_activation_fn is 'laplace'",
        ),
        ({"normalize_before": True}, "normalize_before is True"),
        ({"truncation_length": "all"}, "truncation_length is 'all'"),
    ],
)
def test_another_formula_is_named(change, said):
    with pytest.raises(ToolError, match=said):
        convert_blocks(as_model([make_layer()]), {**OPTIONS, **change})


def bidirectional(layer):
    for name in ("alpha", "delta", "beta", "gamma"):
        value = layer[f"mega_layer.move.{name}"]
        layer[f"mega_layer.move.{name}"] = torch.cat([value, value])


def norm(kind):
    def change(layer):
        size = layer.pop("nffn.norm.norm.bias").clone()
        if kind == "scalar":
            del layer["nffn.norm.norm.weight"]
        if kind != "weight":
            layer[f"nffn.norm.norm.{kind}"] = size

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (bidirectional, "layer 1 has an EMA in both directions"),
        (norm("scalar"), r"layer 1 has a scalenorm \(nffn\)"),
        (norm("weight"), r"layer 1 has an rmsnorm \(nffn\)"),
        (norm("running_mean"), r"layer 1 has a batchnorm \(nffn\)"),
        (
            lambda layer: layer.update({"cross_attn.q_proj.weight": torch.ones(1)}),
            "layer 1 has cross-attention",
        ),
        (
            lambda layer: [layer.pop(n) for n in list(layer) if n.startswith("nffn")],
            "layer 1 has no feed-forward network",
        ),
        (
            lambda layer: layer.update({"mega_layer.layer_scale": torch.ones(1)}),
            "layer 1 has an unknown mega_layer.layer_scale",
        ),
        (
            lambda layer: layer.pop("mega_layer.h_proj.bias"),
            "layer 1 has no mega_layer.h_proj.bias",
        ),
        (
            lambda layer: layer.update({"nffn.fc1.bias": torch.ones(2)}),
            "do not go together: size mismatch for 1.1.linear1.bias",
        ),
    ],
    ids=[
        "both directions",
        "scalenorm",
        "rmsnorm",
        "batchnorm",
        "cross-attention",
        "no ffn",
        "unknown",
        "missing",
        "sizes",
    ],
)
def test_another_layer_is_named(change, said):
    layers = [make_layer(), make_layer()]
    change(layers[1])

    with pytest.raises(ToolError, match=said):
        convert_blocks(as_model(layers), OPTIONS)


def test_names_in_another_order_do_not_tell_the_version():
    weights = as_model([make_layer()])

    with pytest.raises(ToolError, match="the order of the EMA's weights is lost"):
        convert_blocks(dict(sorted(weights.items())), OPTIONS)


def test_a_final_norm_shows_normalisation_before_the_blocks():
    weights = as_model([make_layer()])
    weights["decoder.final_norm.norm.weight"] = torch.ones(SIZE)

    with pytest.raises(ToolError, match="a final_norm follows the layers"):
        convert_blocks(weights, OPTIONS)


def test_an_encoder_is_named():
    weights = {
        name.replace("decoder.", "encoder."): value
        for name, value in as_model([make_layer()]).items()
    }

    with pytest.raises(ToolError, match="only an encoder"):
        convert_blocks(weights, OPTIONS)


def test_a_missing_layer_is_named():
    weights = {
        name: value
        for name, value in as_model([make_layer() for _ in range(3)]).items()
        if ".1." not in name
    }

    with pytest.raises(ToolError, match=r"layers \[0, 2\]"):
        convert_blocks(weights, OPTIONS)


def test_another_model_is_named():
    with pytest.raises(ToolError, match="no decoder layers of facebookresearch/mega"):
        convert_blocks({"decoder.layers.0.self_attn.weight": torch.ones(1)}, OPTIONS)


def test_missing_options_are_named_with_what_to_do(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(as_model([make_layer()]), path)

    with pytest.raises(
        ToolError, match=r"model.pt: it does not say activation_fn, .*--config"
    ):
        convert_file(path, tmp_path / "out")

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("saved", [[1], {"model": [1]}, {"model": {"a": 1}}])
def test_a_file_without_weights_is_named(saved, tmp_path):
    torch.save(saved, tmp_path / "model.pt")

    with pytest.raises(ToolError, match=r"model\.pt holds no weights"):
        convert_file(tmp_path / "model.pt", tmp_path / "out")


def test_nothing_is_overwritten(save, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()

    with pytest.raises(ToolError, match="out exists, and is not empty"):
        convert_file(save(as_model([make_layer()])), tmp_path / "out")


def test_a_full_device_leaves_nothing(save, tmp_path, monkeypatch):
    path = save(as_model([make_layer()]))

    def full(obj, file):
        with open("/dev/full", "wb") as device:
            device.write(b"1")

    monkeypatch.setattr(torch, "save", full)

    with pytest.raises(ToolError, match=r"no space left on the device to write .*out"):
        convert_file(path, tmp_path / "out")

    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint_best.pt"]


def test_a_path_that_init_param_would_cut_is_refused(save, tmp_path):
    with pytest.raises(ToolError, match="takes no path with a colon"):
        convert_file(save(as_model([make_layer()])), tmp_path / "a:b")


def test_init_param_loads_into_the_decoder(tmp_path):
    assert init_param(tmp_path) == f"{tmp_path}/mega_blocks.pth::decoder"
