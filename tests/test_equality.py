import collections
import math
import statistics

import equality
import pytest
import torch
from equality import COMPARISONS, naive_errors, paths_through

from espnet_mega_bias import MEGABiasDecoder, decoder
from espnet_mega_bias.decoder import ACTIVATION_TYPES, NORMALIZATION_TYPES

pytestmark = pytest.mark.slow


def cases_with(normalization, activation):
    """The part of the grid with one normalisation and one activation."""
    return [
        case
        for case in equality.grid()
        if case.normalization_type == normalization
        and case.activation_type == activation
    ]


@pytest.fixture
def cases(request):
    """What is tested of that part."""

    def choose(normalization, activation):
        n = len(ACTIVATION_TYPES) * NORMALIZATION_TYPES.index(normalization)
        n += ACTIVATION_TYPES.index(activation)
        cases = cases_with(normalization, activation)

        # Three steps on the way through the others, from another start each time.
        return cases if request.config.getoption("exhaustive") else cases[n % 11 :: 11]

    return choose


@pytest.mark.parametrize("normalization", NORMALIZATION_TYPES)
@pytest.mark.parametrize("activation", ACTIVATION_TYPES)
def test_every_path_gives_one_answer(cases, normalization, activation):
    """A1, A4, C2: and the answer is that of the plain loops, values and gradients."""
    for case in cases(normalization, activation):
        paths = paths_through(MEGABiasDecoder, case, torch.float64)

        for name, comparison in COMPARISONS.items():
            limit = 0.0 if "later labels" in name else 1e-9
            difference = comparison(paths)
            assert difference <= limit, f"{name}: {difference:.1e} with {case}"


@pytest.mark.parametrize("normalization", NORMALIZATION_TYPES)
@pytest.mark.parametrize("initial", [True, False])
def test_float32_is_no_worse_than_the_plain_loop(normalization, initial):
    ratios = collections.defaultdict(list)

    for case in cases_with(normalization, "swish")[::3]:
        exact = paths_through(MEGABiasDecoder, case, torch.float64, initial)
        ours = paths_through(MEGABiasDecoder, case, torch.float32, initial)
        ours.expected = exact.expected

        for name, error in naive_errors(exact).items():
            ratios[name].append(COMPARISONS[name](ours) / error)

    # The largest rounding error of one decoder is a draw, up to ten times the loop's
    # or a tenth of it, another one on each kind of processor: their mean is not. Above
    # a hundred times it is none any more: with the bias in bfloat16 it is hundreds.
    for name, of_cases in ratios.items():
        assert statistics.geometric_mean(of_cases) <= 2.0, f"{name}: {of_cases}"
        assert max(of_cases) <= 100.0, f"{name}: {of_cases}"


def test_the_comparisons_see_what_is_wrong_with_a_decoder(monkeypatch):
    case = equality.grid()[0]
    paths = paths_through(MEGABiasDecoder, case, torch.float64)
    distances = decoder._distances

    def off_in_batches(histories, *rest):
        back = distances(histories, *rest)

        # What is within reach seems one label nearer than it is.
        return back - (back < rest[-1]).long() * (back > 0) * (len(histories) > 1)

    class Wrong(type(paths.decoder)):
        def forward(self, labels):
            # The last label leaks into every position, and position 1 is off.
            out = super().forward(labels) * (1.0 + 1e-6 * labels[:, -1:, None])
            return out * (1.0 + 1e-6 * (torch.arange(labels.size(1)) == 1)[:, None])

    paths.decoder.__class__ = Wrong

    monkeypatch.setattr(decoder, "_distances", off_in_batches)

    for name, comparison in COMPARISONS.items():
        assert comparison(paths) > 1e-8, name

    assert equality.share(torch.tensor([math.nan]), torch.tensor([1.0])) == math.inf


def test_the_grid_holds_every_combination():
    grid = equality.grid()

    assert len(set(grid)) == 2 * 4 * 4 * 4 * 10
    assert {case.num_blocks for case in grid} == {1, 2, 3}
    assert {1, 2, 3, 4, 5, 8, 33} == set(
        equality.Case("simple", 4, *[None] * 4).lengths()
    )
