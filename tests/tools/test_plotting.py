import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from espnet_mega_bias.tools import pictures, plotting
from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.experiment import load
from espnet_mega_bias.tools.plotting import distinct_names, plot


@pytest.fixture
def drawn(monkeypatch):
    """What is handed over to be drawn; the pictures stay empty, and cost no time."""
    handed = []

    def keep(models):
        handed.append(models)
        return Figure()

    monkeypatch.setattr(pictures, "draw_blocks", keep)
    monkeypatch.setattr(pictures, "draw_attention", keep)

    return handed


def draw_conf(**keys):
    return {
        "rel_pos_bias_type": "rotary",
        "block_size": 8,
        "linear_size": 8,
        "qk_size": 4,
        "v_size": 4,
        "num_heads": 2,
        "max_positions": 20,
        "num_blocks": 1,
        **keys,
    }


@pytest.mark.parametrize("bias_type", ["rotary", "simple"])
def test_both_decoders_with_the_same_weights_are_drawn_alike(
    make_experiment, drawn, assert_close_espnet, tmp_path, bias_type
):
    conf = draw_conf(rel_pos_bias_type=bias_type, num_blocks=2)
    keys = {"decoder_conf": conf, "token_type": "char"}
    ours = make_experiment("ours", **keys)
    stock = make_experiment("stock", decoder="mega", **keys)
    torch.save(load(ours).state, stock / "valid.loss.ave.pth")

    plot([ours, stock], tmp_path / "a.png")
    plot([ours, stock], tmp_path / "b.svg", text="AB CA")
    learnt, attention = drawn

    assert list(learnt) == list(attention) == ["ours", "stock"]

    for models, keys in ((learnt, ("bias", "kernel")), (attention, ("weights",))):
        for key in keys:
            first, second = (getattr(model, key) for model in models.values())
            np.testing.assert_equal(first, second)

    # ESPnet's own class computes this very bias.
    mega = load(stock).build_decoder("mega").mega_blocks[0][0]
    assert_close_espnet(
        torch.from_numpy(learnt["stock"].bias[0]), mega.rel_pos_bias(20)[-1].detach()
    )
    assert attention["ours"].tokens == ["<blank>", "A", "B", "<space>", "C", "A"]
    assert [w.shape for w in attention["ours"].weights] == [(6, 6)] * 2
    assert (tmp_path / "a.png").is_file()
    assert (tmp_path / "b.svg").is_file()


def test_other_depth_reach_and_bias_type_are_compared(make_experiment, drawn, tmp_path):
    folders = [
        make_experiment("deep", decoder_conf=draw_conf(num_blocks=3)),
        make_experiment("chunk", decoder_conf=draw_conf(chunk_size=5)),
        make_experiment("simple", decoder_conf=draw_conf(rel_pos_bias_type="simple")),
    ]
    plot(folders, tmp_path / "a.png", length=12)
    (models,) = drawn

    assert {name: [len(b) for b in m.bias] for name, m in models.items()} == {
        "deep": [12, 12, 12],
        "chunk": [5],
        "simple": [12],
    }


def test_the_configuration_may_lie_elsewhere(make_experiment, drawn, tmp_path):
    folder = make_experiment()
    (folder / "config.yaml").rename(tmp_path / "train.yaml")
    other = make_experiment("other")

    with pytest.raises(ToolError, match="--config"):
        plot([folder], tmp_path / "a.png")

    plot([folder, other], tmp_path / "a.png", config=tmp_path / "train.yaml")
    assert list(drawn[0]) == ["exp", "other"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "at least 1, got 0"),
        ({"text": "X"}, "no token 'X'"),
        (
            {"text": "A" * 20},
            r"valid\.loss\.ave\.pth: .*21 positions.*max_positions 20",
        ),
    ],
)
def test_what_cannot_be_drawn_is_an_error_and_no_file(
    make_experiment, tmp_path, options, message
):
    with pytest.raises(ToolError, match=message):
        plot([make_experiment(token_type="char")], tmp_path / "a.png", **options)

    assert not (tmp_path / "a.png").exists()


def test_another_decoder_is_refused(make_experiment, tmp_path):
    folder = make_experiment(decoder="rnn", decoder_conf={})

    with pytest.raises(ToolError, match="'rnn', not mega or mega_bias"):
        plot([folder], tmp_path / "a.png")


def test_the_output_is_checked_before_any_model_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(plotting, "load", lambda *_: pytest.fail("read"))

    with pytest.raises(ToolError, match=r"\.png or \.svg"):
        plot(["nothing"], tmp_path / "a.pdf")


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/x/exp/a"], ["a"]),
        (["/x/exp/a", "/x/exp/b"], ["a", "b"]),
        (["/x/a/train/9epoch.pth", "/x/b/train/9epoch.pth"], ["a", "b"]),
        (["/x/a/9epoch.pth", "/x/a/8epoch.pth"], ["9epoch.pth", "8epoch.pth"]),
        (["/x/a", "/x/a/9epoch.pth"], ["a", "9epoch.pth"]),
        (["/x/a/b", "/x/a/c", "/y/a/c"], ["x/a/b", "x/a/c", "y/a/c"]),
    ],
)
def test_names_are_the_last_parts_that_differ(paths, names):
    assert distinct_names(paths) == names


def test_a_model_given_twice_is_refused(tmp_path):
    with pytest.raises(ToolError, match="twice"):
        distinct_names([tmp_path, f"{tmp_path}/"])
