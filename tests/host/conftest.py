"""Fixtures: the plugin as a wheel, as an sdist and as an editable install."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from environments import make_environment_in


@pytest.fixture(scope="session")
def make_environment(tmp_path_factory):
    """Return a function that makes an environment: "wheel", "sdist" or "editable"."""

    return lambda kind: make_environment_in(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="session")
def environments(make_environment):
    """The plugin as a wheel and as an editable install; tests do not change them."""
    return {kind: make_environment(kind) for kind in ("wheel", "editable")}


@pytest.fixture(scope="session")
def in_each(environments):
    """Return a function that calls another one with each environment, at once."""

    def call(function):
        with ThreadPoolExecutor() as pool:
            calls = {
                kind: pool.submit(function, kind, environment)
                for kind, environment in environments.items()
            }
            return {kind: call.result() for kind, call in calls.items()}

    return call
