"""Fonts that have the characters of a model's tokens."""

from collections.abc import Iterable

from espnet_mega_bias.tools.error import ToolError


def families_for(characters: Iterable[str]) -> list[str]:
    """Choose fonts that together have all characters.

    Args:
        characters: Characters to be drawn.

    Returns:
        : Names of installed fonts, Matplotlib's usual one first.

    Raises:
        ToolError: If no installed font has one of the characters.

    """
    from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font

    usual = get_font(findfont(FontProperties()))
    families, missing = [usual.family_name], set(characters)
    missing = {c for c in missing if ord(c) not in usual.get_charmap()}

    for entry in fontManager.ttflist:
        # Matplotlib's last resort has a box with a code for every character.
        if not missing or "Last Resort" in entry.name:
            continue

        known = get_font(entry.fname).get_charmap()

        if found := {c for c in missing if ord(c) in known}:
            families.append(entry.name)
            missing -= found

    if missing:
        raise ToolError(
            f"no installed font has {' '.join(sorted(missing))}: install one, for "
            "instance Noto Sans CJK for Chinese, Japanese and Korean"
        )

    return families
