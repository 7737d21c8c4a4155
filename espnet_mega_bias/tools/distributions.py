"""What pip installed, by its metadata: nothing is imported to find out."""

import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from espnet_mega_bias.tools.error import ToolError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PLUGIN = "espnet-mega-bias"

# What every start of Python runs (`espnet_mega_bias_autoload`), in site-packages.
STARTUP_FILE = (
    "espnet_mega_bias.start" if sys.version_info >= (3, 15) else "espnet_mega_bias.pth"
)


def installed(distribution: str) -> str | None:
    """Give the version of a distribution, or None where pip knows none.

    Args:
        distribution: Name, as pip is told.

    """
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def plugin() -> metadata.Distribution | None:
    """Give this package's own distribution, or None where pip did not install it.

    A source tree can hold metadata too, which setuptools leaves there, and comes first
    where Python is started in it; what pip installed has a RECORD.

    """
    return next(
        (
            distribution
            for distribution in metadata.distributions(name=PLUGIN)
            if distribution.read_text("RECORD") is not None
        ),
        None,
    )


def startup_path(distribution: metadata.Distribution) -> Path:
    """Say where the start-up file belongs.

    Args:
        distribution: This package's.

    """
    return Path(distribution.locate_file(STARTUP_FILE))


def reinstall_line() -> str:
    """Give the pip line that installs this package again from where it came from."""
    source, editable = PLUGIN, False
    distribution = plugin()

    if distribution is None:
        root = Path(__file__).absolute().parents[2]
        return f"pip install '{root if (root / 'setup.py').is_file() else PLUGIN}'"

    # PEP 610; absent where it came from an index.
    if origin := distribution.read_text("direct_url.json"):
        origin = json.loads(origin)
        editable = origin.get("dir_info", {}).get("editable", False)
        source = origin["url"]

        if source.startswith("file:"):
            source = url2pathname(urlsplit(source).path)

    return (
        f"pip install --force-reinstall --no-deps {'-e ' if editable else ''}'{source}'"
    )


def requirements(distribution: str, extra: str = "") -> "list[Requirement]":
    """List what a distribution asks for, with this Python.

    Args:
        distribution: Name.
        extra: Extra, for what it asks for beyond the rest.

    Returns:
        : Requirements; none for what is not installed.

    Raises:
        ToolError: If `packaging` is missing.

    """
    try:
        listed = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []

    return [
        requirement
        for requirement in map(_parsed, listed)
        if _applies(requirement, extra) and not (extra and _applies(requirement, ""))
    ]


def python_required(distribution: str) -> str | None:
    """Say which Python a distribution asks for, where this one is another.

    Args:
        distribution: Name.

    Returns:
        : Versions, or None where this one will do.

    Raises:
        ToolError: If `packaging` is missing.

    """
    try:
        wanted = metadata.metadata(distribution).get("Requires-Python")
    except metadata.PackageNotFoundError:
        return None

    this = platform.python_version()

    if wanted is None or _parsed(f"python{wanted}").specifier.contains(
        this, prereleases=True
    ):
        return None

    return wanted


def unmet(requirement: "Requirement") -> list[str]:
    """Say what of a requirement is not there, the extras that it names included.

    Args:
        requirement: Requirement.

    Returns:
        : Names, with the version where it is another than required.

    """
    version = installed(requirement.name)

    if version is None:
        return [requirement.name]

    if not requirement.specifier.contains(version, prereleases=True):
        return [f"{requirement.name} {version} (not {requirement.specifier})"]

    return [
        name
        for extra in sorted(requirement.extras)
        for further in requirements(requirement.name, extra)
        for name in unmet(further)
    ]


def _parsed(requirement: str) -> "Requirement":
    try:
        from packaging.requirements import Requirement
    except ImportError as exc:
        raise ToolError(
            "packaging is missing, which compares versions: pip install packaging"
        ) from exc

    return Requirement(requirement)


def _applies(requirement: "Requirement", extra: str) -> bool:
    marker = requirement.marker

    return marker is None or marker.evaluate({"extra": extra})
