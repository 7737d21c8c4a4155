import matplotlib.font_manager
import pytest

from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.fonts import families_for

USUAL = "DejaVu Sans"
BEYOND = "\N{MATHEMATICAL FRAKTUR CAPITAL A}"


def test_the_usual_font_is_enough_for_latin_and_sentencepiece():
    assert families_for("AZ<blank>\N{LOWER ONE EIGHTH BLOCK}é") == [USUAL]


def test_another_font_helps_with_what_the_usual_one_lacks():
    families = families_for({"A", BEYOND})

    assert families[0] == USUAL
    assert len(families) == 2

    path = matplotlib.font_manager.findfont(families[1])
    assert ord(BEYOND) in matplotlib.font_manager.get_font(path).get_charmap()


def test_what_no_font_has_is_named(monkeypatch):
    monkeypatch.setattr(
        matplotlib.font_manager.fontManager,
        "ttflist",
        [
            font
            for font in matplotlib.font_manager.fontManager.ttflist
            if font.name in (USUAL, "Last Resort High-Efficiency")
        ],
    )

    with pytest.raises(ToolError, match=f"no installed font has {BEYOND}: install"):
        families_for({"A", BEYOND})
