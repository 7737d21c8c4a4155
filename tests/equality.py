"""How far apart the paths through a decoder are, for ESPnet's `mega` and `mega_bias`.

    python tests/equality.py [--every 11]

prints one row per comparison: the largest difference over the grid of configurations,
as a share of the largest value, in float32 where nothing else is said. "naive" is the
plain loop against the same in float64, so what rounding alone amounts to; "crash"
counts the configurations that ESPnet's class stops at.
"""

import argparse
import itertools
import math
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
from espnet2.asr_transducer.activation import get_activation
from espnet2.asr_transducer.beam_search_transducer import (
    BeamSearchTransducer,
    Hypothesis,
)
from espnet2.asr_transducer.decoder.abs_decoder import AbsDecoder
from espnet2.asr_transducer.decoder.mega_decoder import MEGADecoder
from espnet2.asr_transducer.joint_network import JointNetwork
from reference.decoder import mega_decoder

from espnet_mega_bias import MEGABiasDecoder
from espnet_mega_bias.decoder import ACTIVATION_TYPES, NORMALIZATION_TYPES

VOCAB = 7
LONGEST = 33
SIZES = {
    "block_size": 6,
    "linear_size": 8,
    "qk_size": 4,
    "v_size": 5,
    "num_heads": 2,
    "max_positions": 64,
}


SEARCHES = {
    "default": {},
    "tsd": {"max_sym_exp": 3},
    "alsd": {"u_max": 10},
    "maes": {"nstep": 2, "expansion_beta": 1},
}

COLUMNS = ("naive", "mega", "mega_bias", "mega_bias, float64")


@dataclass(frozen=True)
class Case:
    """One point of the grid."""

    rel_pos_bias_type: str
    chunk_size: int
    truncation_length: int | None
    normalization_type: str
    activation_type: str
    num_blocks: int

    def lengths(self) -> list[int]:
        """Lengths around those that are special to the chunk."""
        chunk = max(self.chunk_size, 1)
        lengths = {1, 2, chunk - 1, chunk, chunk + 1, 2 * chunk, LONGEST}

        return sorted(lengths - {0})


def grid() -> list[Case]:
    """Every configuration, with one to three blocks in turn."""
    points = itertools.product(
        ("rotary", "simple"),
        (-1, 1, 4, 16),
        (None, 1, 3, 100),
        NORMALIZATION_TYPES,
        ACTIVATION_TYPES,
    )

    return [Case(*point, 1 + n % 3) for n, point in enumerate(points)]


class Paths:
    """The paths through one decoder.

    Args:
        decoder: Decoder, in the type to compute in.
        case: Its configuration.
        labels: Label sequence, the blank in front. (U,)

    """

    def __init__(self, decoder: AbsDecoder, case: Case, labels: list[int]) -> None:
        self.decoder = decoder
        self.case = case
        self.labels = labels

    @cached_property
    def expected(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What the plain loop gives in float64: values (U, D), and gradients."""
        return self.naive(torch.float64)

    def naive(self, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The plain loop: values (U, D), and gradients.

        Args:
            dtype: Type to compute in.

        """
        weights = {
            name: weight.detach().to(dtype).requires_grad_()
            for name, weight in self.decoder.named_parameters()
        }
        case = self.case
        out = mega_decoder(
            self.labels,
            weights,
            case.num_blocks,
            case.rel_pos_bias_type,
            case.chunk_size if case.chunk_size > 0 else None,
            case.truncation_length,
            phi=get_activation(case.activation_type),
            normalization=case.normalization_type,
        )

        return out.detach(), project(out, list(weights.values()))

    def full(self, labels: list[int]) -> torch.Tensor:
        """The full pass over one sequence."""
        with torch.no_grad():
            return self.decoder(torch.tensor([labels]))[0]

    @torch.no_grad()
    def steps(self) -> torch.Tensor:
        """Label by label through `score`."""
        self.decoder.score_cache = {}
        state, outs = self.decoder.init_state(1), []

        for t in range(1, len(self.labels) + 1):
            out, state = self.decoder.score(self.labels[:t], state)
            outs.append(out[0])

        return torch.stack(outs)

    @torch.no_grad()
    def batched(self, lengths: list[int]) -> torch.Tensor:
        """`batch_score` beside hypotheses of other lengths, twice.

        The states of the second time are those of the first in another order, through
        `select_state`, `create_batch_states` and `select_state`.
        """
        decoder, labels = self.decoder, self.labels
        states = {1: decoder.init_state(1)}

        for t in range(1, max(lengths) - 1):
            _, after = decoder.batch_score([Hypothesis(0.0, labels[:t], states[t])])
            states[t + 1] = decoder.select_state(after, 0)

        # Or it would remember what each of them has led to.
        decoder.score_cache = {}
        _, after = decoder.batch_score(
            [Hypothesis(0.0, labels[: n - 1], states[n - 1]) for n in lengths]
        )
        order = sorted(range(len(lengths)), key=lambda row: (row % 2, -row))
        again = decoder.create_batch_states(
            [decoder.select_state(after, row) for row in order]
        )
        out, _ = decoder.batch_score(
            [
                Hypothesis(
                    0.0, labels[: lengths[row]], decoder.select_state(again, place)
                )
                for place, row in enumerate(order)
            ]
        )

        return out[torch.tensor(order).argsort()]

    @torch.no_grad()
    def padded(self, lengths: list[int]) -> list[torch.Tensor]:
        """The full pass over prefixes of several lengths in one batch."""
        batch = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)

        for row, n in enumerate(lengths):
            batch[row, :n] = torch.tensor(self.labels[:n])

        return [out[:n] for out, n in zip(self.decoder(batch), lengths, strict=True)]


def project(out: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of a fixed projection of the output; the embedding comes first."""
    cotangent = torch.sin(torch.arange(1.0, out.numel() + 1.0)).view_as(out)
    gradients = torch.autograd.grad(out, weights, cotangent.to(out.dtype))

    # The padding row of an embedding gets none, by definition.
    gradients[0][0] = 0.0

    return list(gradients)


def share(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a share of the largest value; NaN counts as infinite."""
    difference = (actual.double() - expected.double()).abs().max()
    result = (difference / expected.double().abs().max()).item()

    return float("inf") if math.isnan(result) else result


def full_pass(paths: Paths) -> float:
    values, _ = paths.expected

    return max(
        share(paths.full(paths.labels[:n]), values[:n]) for n in paths.case.lengths()
    )


def gradients(paths: Paths) -> float:
    _, expected = paths.expected
    out = paths.decoder(torch.tensor([paths.labels]))[0]

    return max(
        share(ours, theirs)
        for ours, theirs in zip(
            project(out, list(paths.decoder.parameters())), expected, strict=True
        )
        # A bias that moves all scores of a query alike has no gradient.
        if theirs.abs().max() > 1e-6
    )


def steps(paths: Paths) -> float:
    return share(paths.steps(), paths.full(paths.labels))


def steps_with_padding(paths: Paths) -> float:
    labels = [0 if t % 5 == 3 else label for t, label in enumerate(paths.labels)]
    padded = Paths(paths.decoder, paths.case, labels)

    return share(padded.steps(), padded.full(labels))


def batches(paths: Paths) -> float:
    lengths = [n for n in paths.case.lengths() if n > 1]

    return share(paths.batched(lengths), paths.steps()[torch.tensor(lengths) - 1])


def padded_batches(paths: Paths) -> float:
    lengths = paths.case.lengths()

    return max(
        share(out, paths.full(paths.labels[:n]))
        for n, out in zip(lengths, paths.padded(lengths), strict=True)
    )


def causality(paths: Paths) -> float:
    labels, differences = paths.labels, []
    full = paths.full(labels)

    for position in (1, 7, 16, 32):
        changed = [1 + label % (VOCAB - 1) for label in labels[position:]]
        out = paths.full(labels[:position] + changed)
        differences.append(share(out[:position], full[:position]))

    return max(differences)


@torch.no_grad()
def searches(paths: Paths) -> float:
    joint = JointNetwork(VOCAB, 3, SIZES["block_size"], joint_space_size=8)
    fill(joint)
    # So that a frame ends soon: the default search goes on until blanks win.
    joint.lin_out.weight.mul_(0.3)
    joint.lin_out.bias.zero_()
    joint.lin_out.bias[0] = 2.0

    dtype = next(paths.decoder.parameters()).dtype
    frame = torch.sin(torch.arange(3.0)).to(dtype).unsqueeze(0)
    joint = joint.to(dtype).eval()
    differences = []

    for search, options in SEARCHES.items():
        # In one frame a sequence has one alignment, so its score is a sum of steps.
        for hyp in BeamSearchTransducer(
            paths.decoder, joint, 4, search_type=search, nbest=4, **options
        )(frame):
            logp = joint(frame, paths.full(hyp.yseq)).log_softmax(-1)
            following = torch.tensor([*hyp.yseq[1:], 0])
            expected = logp.gather(1, following.unsqueeze(1)).sum()
            score = torch.tensor(float(hyp.score), dtype=torch.float64)
            differences.append(share(score, expected))

    return max(differences)


@torch.no_grad()
def change_of_weights(paths: Paths) -> float:
    paths.steps()

    for weight in paths.decoder.parameters():
        weight.mul_(0.5)

    difference = steps(paths)

    for weight in paths.decoder.parameters():
        weight.mul_(2.0)

    return difference


COMPARISONS = {
    "full pass against the plain loop": full_pass,
    "its gradients": gradients,
    "`score`, label by label, against the full pass": steps,
    "the same with labels equal to `embed_pad` inside": steps_with_padding,
    "`batch_score` beside other lengths, states reordered, against `score`": batches,
    "padded batch against each sequence alone": padded_batches,
    "earlier outputs, later labels changed": causality,
    "scores of the four searches against the full pass": searches,
    "`score` against the full pass, weights changed meanwhile": change_of_weights,
}


@torch.no_grad()
def fill(module: torch.nn.Module) -> None:
    """Draw parameters at std 1; rows that an embedding keeps at zero stay zero."""
    for parameter in module.parameters():
        parameter.normal_()

    for part in module.modules():
        if isinstance(part, torch.nn.Embedding):
            part.weight[part.padding_idx] = 0.0


def paths_through(
    decoder_class: type[AbsDecoder],
    case: Case,
    dtype: torch.dtype,
    initial: bool = False,
) -> Paths:
    """Build a decoder and draw labels: the same ones for each class and type.

    Args:
        decoder_class: Decoder.
        case: Configuration.
        dtype: Type to compute in.
        initial: Leave the parameters as the class initialises them.

    """
    torch.manual_seed(0)
    decoder = decoder_class(VOCAB, **SIZES, **asdict(case))
    torch.manual_seed(1)
    labels = [0, *torch.randint(1, VOCAB, (LONGEST - 1,)).tolist()]

    if not initial:
        fill(decoder)

    return Paths(decoder.to(dtype).eval(), case, labels)


def naive_errors(paths: Paths) -> dict[str, float]:
    """What rounding to float32 alone does to the plain loop."""
    values, gradients = paths.naive(torch.float32)
    exact, exact_gradients = paths.expected

    return {
        "full pass against the plain loop": share(values, exact),
        "its gradients": max(
            share(ours, theirs)
            for ours, theirs in zip(gradients, exact_gradients, strict=True)
            if theirs.abs().max() > 1e-6
        ),
    }


def table(cases: list[Case], initial: bool) -> dict[str, list[str]]:
    """Compare over a grid.

    Args:
        cases: Configurations.
        initial: Leave the parameters as each class initialises them.

    Returns:
        : By comparison, the cells of its row.

    """
    largest = {name: dict.fromkeys(COLUMNS, 0.0) for name in COMPARISONS}
    failed = dict.fromkeys(COMPARISONS, 0)

    for case in cases:
        theirs = paths_through(MEGADecoder, case, torch.float32, initial)
        ours = paths_through(MEGABiasDecoder, case, torch.float32, initial)
        exact = paths_through(MEGABiasDecoder, case, torch.float64, initial)
        naive = naive_errors(exact)

        for name, comparison in COMPARISONS.items():
            found = {
                "naive": naive.get(name, 0.0),
                "mega_bias": comparison(ours),
                "mega_bias, float64": comparison(exact),
            }

            try:
                found["mega"] = comparison(theirs)
            except RuntimeError:
                failed[name] += 1

            for column, difference in found.items():
                largest[name][column] = max(largest[name][column], difference)

    rows = {}

    for name, row in largest.items():
        rows[name] = [f"{difference:.1e}" for difference in row.values()]
        rows[name][0] = rows[name][0] if row["naive"] else ""
        rows[name][1] += f", {failed[name]} crash" if failed[name] else ""

    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=11, help="take each Nth case")
    args = parser.parse_args()
    cases = grid()[:: args.every]

    for initial in (False, True):
        state = "as initialised" if initial else "at std 1"
        print(f"{len(cases)} of {len(grid())} configurations, parameters {state}\n")
        print(f"| comparison | {' | '.join(COLUMNS)} |")
        print(f"|---|{'---|' * len(COLUMNS)}")

        for name, cells in table(cases, initial).items():
            print(f"| {name} | {' | '.join(cells)} |", flush=True)

        print()


if __name__ == "__main__":
    main()
