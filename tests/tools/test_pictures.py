import builtins
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from PIL import Image

from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.learnt import Attention, Learnt
from espnet_mega_bias.tools.pictures import (
    check_picture,
    draw_attention,
    draw_blocks,
    save,
    to_pixels,
)


def draw_learnt(num_blocks, reach=9, lags=9, seed=0):
    draw = np.random.default_rng(seed).normal

    return Learnt(
        [draw(size=reach) for _ in range(num_blocks)],
        [draw(size=(5, lags)) for _ in range(num_blocks)],
    )


def some_attention(num_blocks, tokens):
    weights = np.tri(len(tokens)) / np.arange(1, len(tokens) + 1)[:, None]

    return Attention(tokens, [weights**n for n in range(1, num_blocks + 1)])


def grid(figure, columns):
    """Axes row by row, without colour bars."""
    axes = [a for a in figure.axes if a.get_label() != "<colorbar>"]

    return [axes[i : i + columns] for i in range(0, len(axes), columns)]


@pytest.mark.parametrize("num_blocks", [1, 3, 12])
def test_a_row_has_curve_matrix_and_kernel_of_its_block(num_blocks):
    learnt = draw_learnt(num_blocks)
    rows = grid(draw_blocks({"a": learnt}), 3)

    assert len(rows) == num_blocks

    for number, (curve, matrix, kernel) in enumerate(rows):
        bias = learnt.bias[number]

        np.testing.assert_array_equal(curve.lines[0].get_xdata(), range(-8, 1))
        np.testing.assert_array_equal(curve.lines[0].get_ydata(), bias)

        image = matrix.images[0].get_array()

        for i in range(9):
            for j in range(9):
                assert np.ma.is_masked(image[i, j]) == (j > i)
                assert j > i or image[i, j] == bias[8 + j - i]

        size = np.abs(learnt.kernel[number])
        np.testing.assert_array_equal(kernel.lines[0].get_xdata(), range(9))
        np.testing.assert_array_equal(
            kernel.lines[0].get_ydata(), np.median(size, axis=0)
        )
        band = kernel.collections[0].get_paths()[0].vertices
        np.testing.assert_allclose(band[:, 1].max(), np.quantile(size, 0.9, 0).max())
        np.testing.assert_allclose(band[:, 1].min(), np.quantile(size, 0.1, 0).min())
        assert curve.get_ylabel() == f"block {number + 1}\nbias"

    assert len({panel.get_ylim() for panel, _, _ in rows}) == 1
    assert len({panel.images[0].get_clim() for _, panel, _ in rows}) == 1


def test_models_of_other_depth_and_reach_share_the_axes():
    models = {"_one": draw_learnt(3), "t$w$o": draw_learnt(2, reach=4, lags=20, seed=1)}
    figure = draw_blocks(models)
    rows = grid(figure, 4)

    assert [len(row[0].lines) - 1 for row in rows] == [2, 2, 1]  # beside that at zero
    assert [len(row[3].lines) for row in rows] == [2, 2, 1]
    assert [len(row[1].images) for row in rows] == [1, 1, 1]
    assert [len(row[2].images) for row in rows] == [1, 1, 0]
    assert rows[0][2].images[0].get_array().shape == (4, 4)

    for number, row in enumerate(rows[:2]):
        for learnt, line in zip(models.values(), row[0].lines[:2], strict=True):
            np.testing.assert_array_equal(line.get_ydata(), learnt.bias[number])

    first, second = rows[0][0].lines[:2]
    assert first.get_color() != second.get_color()
    assert first.get_linestyle() != second.get_linestyle()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*models]
    to_pixels(figure)  # a name is no formula


def test_a_bias_of_zeros_and_one_of_one_value_are_drawn():
    zeros = Learnt([np.zeros(4)], [np.ones((2, 4))])
    single = Learnt([np.ones(1)], [np.ones((2, 1))])

    for learnt in (zeros, single):
        assert to_pixels(draw_blocks({"": learnt})).std() > 0.0


@pytest.mark.parametrize("num_blocks", [1, 5])
def test_attention_has_a_panel_for_each_block_with_its_tokens(num_blocks):
    attention = some_attention(num_blocks, ["<blank>", "$A$", "\u2581B"])
    panels = [p for p in draw_attention({"a": attention}).axes if p.images]

    assert len(panels) == num_blocks

    for panel, weights in zip(panels, attention.weights, strict=True):
        image = panel.images[0].get_array()

        np.testing.assert_array_equal(image.filled(0.0), weights)
        assert (image.mask == ~np.tri(3, dtype=bool)).all()

        for labels in (panel.get_xticklabels(), panel.get_yticklabels()):
            assert [label.get_text() for label in labels] == attention.tokens


def test_attention_of_two_models_keeps_their_own_tokens():
    models = {"x": some_attention(2, ["<blank>", "A"]), "y": some_attention(1, ["<s>"])}
    panels = [p for p in draw_attention(models).axes if p.images]

    assert [p.get_title() for p in panels] == ["x, block 1", "x, block 2", "y, block 1"]
    assert [len(p.get_xticks()) for p in panels] == [2, 2, 1]


def test_files_are_what_their_ending_says(tmp_path):
    figure = draw_attention({"a": some_attention(1, ["<blank>", "ABC"])})
    save(figure, tmp_path / "a.png")
    save(figure, tmp_path / "a.svg")

    with Image.open(tmp_path / "a.png") as image:
        assert image.format == "PNG"
        assert min(image.size) > 300

    svg = (tmp_path / "a.svg").read_text()
    assert "<svg" in svg
    assert "<!-- ABC -->" in svg


def test_an_existing_picture_stays(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"mine")

    with pytest.raises(ToolError, match="exists"):
        check_picture(path)

    with pytest.raises(ToolError, match="exists"):
        save(draw_blocks({"": draw_learnt(1)}), path)

    assert path.read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["a.pdf", "a", "a.png.txt"])
def test_another_ending_is_told_both_that_there_are(tmp_path, name):
    with pytest.raises(ToolError, match=r"ends in \.png or \.svg"):
        check_picture(tmp_path / name)


def test_a_missing_matplotlib_is_told_how_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)

    with pytest.raises(ToolError, match=r"pip install 'espnet-mega-bias\[plot\]'"):
        check_picture(tmp_path / "a.png")


def test_the_global_state_of_matplotlib_stays():
    before = dict(matplotlib.rcParams)
    to_pixels(draw_blocks({"": draw_learnt(1)}))
    to_pixels(draw_attention({"": some_attention(1, ["A"])}))

    assert dict(matplotlib.rcParams) == before


def test_pyplot_is_not_imported():
    program = (
        "import sys, numpy as np\n"
        "from espnet_mega_bias.tools import pictures\n"
        "from espnet_mega_bias.tools.learnt import Learnt\n"
        "learnt = Learnt([np.ones(3)], [np.ones((2, 3))])\n"
        "pictures.to_pixels(pictures.draw_blocks({'': learnt}))\n"
        "assert 'matplotlib.figure' in sys.modules\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_pixels_are_red_green_blue():
    figure = draw_blocks({"": draw_learnt(1)})
    width, height = figure.get_size_inches() * 100
    pixels = to_pixels(figure)

    assert pixels.dtype == np.uint8
    assert pixels.shape == (round(height), round(width), 3)
    assert (pixels[0, 0] == 255).all()
    red, _, blue = pixels.reshape(-1, 3).T.astype(int)
    assert (red - blue).max() > 50  # of the matrix
    assert (blue - red).max() > 50
