"""Tolerances, by what is compared with what, and fixtures that every test may use."""

import os
import sys

import pytest
import torch

# Against a reference, or one path against another, in float64.
RTOL_FLOAT64, ATOL_FLOAT64 = 1e-9, 1e-10

# Against ESPnet's own classes in float32, as a share of the largest value.
SHARE_OF_MAX_ESPNET = 1e-5


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="all configurations of the equality grid, not a part of them",
    )


_EXIT_STATUS = pytest.StashKey[int]()


def pytest_sessionfinish(session, exitstatus):
    session.config.stash[_EXIT_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    # sentencepiece's SWIG types warn, and can crash, where Python 3.12 or newer takes
    # itself down (seen with sentencepiece 0.2.1): the result stands, so leave at once.
    if _EXIT_STATUS in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_EXIT_STATUS])


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned_memory():
    # Memory that is read before it is written shows up as NaN.
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture
def assert_close64():
    """Compare float64 results that rounding alone may tell apart."""

    def check(actual, expected):
        assert expected.abs().max() > 0.0
        torch.testing.assert_close(
            actual, expected, rtol=RTOL_FLOAT64, atol=ATOL_FLOAT64
        )

    return check


@pytest.fixture
def assert_gradients64():
    """Compare the gradients of a random projection of two float64 results."""

    def check(actual, expected, inputs):
        inputs = list(inputs)
        cotangent = torch.randn_like(expected)
        ours, theirs = (
            torch.autograd.grad(out, inputs, cotangent, materialize_grads=True)
            for out in (actual, expected)
        )

        assert any(gradient.any() for gradient in theirs)

        for gradient, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(
                gradient, wanted, rtol=RTOL_FLOAT64, atol=ATOL_FLOAT64
            )

    return check


@pytest.fixture
def assert_close_espnet():
    """Compare float32 results with those of ESPnet's class."""

    def check(actual, expected):
        largest = expected.abs().max().item()

        assert largest > 0.0
        torch.testing.assert_close(
            actual, expected, rtol=0.0, atol=SHARE_OF_MAX_ESPNET * largest
        )

    return check


@pytest.fixture
def assert_no_worse():
    """Compare errors: ours at most twice the naive form's, both against float64."""

    def check(actual, naive, exact):
        assert actual.dtype == naive.dtype

        rounding = torch.finfo(actual.dtype).eps * exact.abs().max()
        error = (actual.double() - exact).abs().max()
        allowed = 2.0 * (naive.double() - exact).abs().max() + rounding

        assert error <= allowed

    return check


@pytest.fixture
def redraw():
    """Redraw parameters at std 1, where no term is too small to be seen.

    Rows that an embedding keeps at zero stay zero.
    """

    def draw(module):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_()

            for part in module.modules():
                if isinstance(part, torch.nn.Embedding):
                    part.weight[part.padding_idx] = 0.0

        return module

    return draw
