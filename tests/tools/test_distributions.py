"""tools/distributions.py: what metadata tells, on distributions made up for it."""

import json
import platform
import sys

import pytest
from packaging.requirements import Requirement

from espnet_mega_bias.tools import distributions
from espnet_mega_bias.tools.error import ToolError


def test_gives_the_version_or_none(distribution):
    distribution("made-up", "1.2.3")

    assert distributions.installed("made-up") == "1.2.3"
    assert distributions.installed("not-made-up") is None


def test_lists_the_requirements_that_apply_and_those_of_an_extra_alone(distribution):
    distribution(
        "made-up",
        "1.0",
        requires=[
            "torch>=2",
            'old; python_version < "3"',
            'more; extra == "plot"',
            'most; extra == "all"',
        ],
    )

    def names(extra=""):
        return [each.name for each in distributions.requirements("made-up", extra)]

    assert names() == ["torch"]
    assert names("plot") == ["more"]
    assert distributions.requirements("not-made-up") == []


@pytest.mark.parametrize(
    ("requirement", "missing"),
    [
        ("made-up>=1.2", []),
        ("made-up", []),
        ("made-up!=1.2.*", ["made-up 1.2.3 (not !=1.2.*)"]),
        ("not-made-up", ["not-made-up"]),
        ("made-up[plot]", ["absent", "needed 0.9 (not >=1)"]),
        ("made-up[train]", []),
    ],
)
def test_says_what_of_a_requirement_is_not_there(distribution, requirement, missing):
    distribution("needed", "0.9")
    distribution(
        "made-up",
        "1.2.3",
        requires=[
            'absent; extra == "plot"',
            'needed>=1; extra == "plot"',
            'needed; extra == "train"',
        ],
    )

    assert distributions.unmet(Requirement(requirement)) == missing


def test_a_local_or_nightly_version_counts_as_its_release(distribution):
    distribution("made-up", "2.11.0+cu128")
    distribution("nightly", "2.14.0.dev20260101")

    assert distributions.unmet(Requirement("made-up==2.11.0")) == []
    assert distributions.unmet(Requirement("nightly>=2.13")) == []


def test_says_which_python_is_asked_for_where_it_is_another(distribution):
    distribution("new", "1", python=">=99")
    distribution("fitting", "1", python=f"=={platform.python_version()}")
    distribution("any", "1")

    assert distributions.python_required("new") == ">=99"

    for name in ("fitting", "any", "not-made-up"):
        assert distributions.python_required(name) is None


def test_without_packaging_the_pip_line_is_in_the_error(distribution, monkeypatch):
    distribution("made-up", "1.0", requires=["torch"])
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)

    with pytest.raises(ToolError, match=r"packaging is missing.*pip install packaging"):
        distributions.requirements("made-up")


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        (None, "'espnet-mega-bias'"),
        (
            {"url": "file:///a%20b/src", "dir_info": {"editable": True}},
            "-e '/a b/src'",
        ),
        ({"url": "file:///src", "dir_info": {}}, "'/src'"),
        ({"url": "https://host/x.whl", "archive_info": {}}, "'https://host/x.whl'"),
    ],
)
def test_reinstalls_from_where_it_came_from(distribution, origin, line):
    files = {} if origin is None else {"direct_url.json": json.dumps(origin)}
    distribution("espnet-mega-bias", "0.1.0", files=files)

    assert (
        distributions.reinstall_line()
        == f"pip install --force-reinstall --no-deps {line}"
    )


def test_installs_what_pip_did_not(monkeypatch):
    monkeypatch.setattr(distributions, "plugin", lambda: None)
    root = distributions.__file__.partition("/espnet_mega_bias/tools/")[0]

    # From the source tree that this runs from, or else by name.
    assert distributions.reinstall_line() in (
        f"pip install '{root}'",
        "pip install 'espnet-mega-bias'",
    )


def test_metadata_that_a_build_left_in_the_source_tree_are_not_an_installation(
    distribution, tmp_path, monkeypatch
):
    folder = distribution("espnet-mega-bias", "0.1.0")
    left = tmp_path / "source" / "espnet_mega_bias.egg-info"
    left.mkdir(parents=True)
    (left / "PKG-INFO").write_text("Name: espnet-mega-bias\nVersion: 9\n")
    monkeypatch.syspath_prepend(left.parent)
    assert distributions.metadata.version("espnet-mega-bias") == "9"

    path = distributions.startup_path(distributions.plugin())

    assert path.parent == folder


def test_the_startup_file_is_expected_beside_the_metadata(distribution):
    folder = distribution("espnet-mega-bias", "0.1.0")

    path = distributions.startup_path(distributions.plugin())

    assert path.parent == folder
    assert path.name in ("espnet_mega_bias.pth", "espnet_mega_bias.start")
