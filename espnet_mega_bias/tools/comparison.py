"""ESPnet's `mega` beside `mega_bias` with the same weights: where the two differ."""

import copy
from dataclasses import dataclass

import torch

from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.experiment import Experiment

# Largest difference where the two are one function, as a share of the largest output.
TOLERANCE = 1e-5

# Positions of the label sequences, as far as `max_positions` lets them.
_LENGTHS = (1, 7, 33)


@dataclass(frozen=True)
class Comparison:
    """Largest differences between the two decoders, as shares of the largest output.

    Args:
        lengths: Positions of the label sequences that were compared.
        full: Full pass over labels other than the blank, where the two are one
            function; in float32.
        full_float64: The same with float64 weights. ESPnet's FFT and softmax stay in
            float32.
        blank: Full pass with the blank in front: at its position.
        after_blank: The same, at later positions (None where there are none).
        search: Label by label through `score`, the blank in front; or the error that
            ESPnet's search stops with.

    """

    lengths: list[int]
    full: float
    full_float64: float
    blank: float
    after_blank: float | None
    search: float | str

    def check(self) -> None:
        """Check that the two agree where they are one function.

        Raises:
            ToolError: If they differ by more than rounding, or in NaN.

        """
        for share, name in (
            (self.full, "float32"),
            (self.full_float64, "float64"),
        ):
            if not share <= TOLERANCE:
                raise ToolError(
                    f"mega and mega_bias differ by {share:.1e} of the largest output "
                    f"in {name}, in a full pass over labels other than the blank, "
                    f"where {TOLERANCE:.0e} is rounding; nothing is written"
                )


@torch.no_grad()
def compare(experiment: Experiment) -> Comparison:
    """Run both decoders with the weights of a model.

    Args:
        experiment: Model with either decoder.

    Returns:
        : Differences over label sequences drawn from a fixed seed.

    Raises:
        ToolError: If one of the two cannot be built from the configuration.

    """
    pair = [experiment.build_decoder(name) for name in ("mega", "mega_bias")]
    # Copied first: ESPnet's keeps kernels of the type that it was last called with.
    wide = [copy.deepcopy(decoder).double() for decoder in pair]

    sequences = _label_sequences(pair[1])
    with_blank = [labels.clone() for labels in sequences]
    for labels in with_blank:
        labels[0] = 0

    full = _differences(pair, sequences)
    full_float64 = _differences(wide, sequences)
    blank = _differences(pair, with_blank)
    after_blank = [shares[1:] for shares in blank if len(shares) > 1]

    return Comparison(
        lengths=[len(labels) for labels in sequences],
        full=torch.cat(full).max().item(),
        full_float64=torch.cat(full_float64).max().item(),
        blank=torch.cat([shares[:1] for shares in blank]).max().item(),
        after_blank=torch.cat(after_blank).max().item() if after_blank else None,
        search=_search_difference(pair, with_blank[-1].tolist()),
    )


def _label_sequences(decoder) -> list[torch.Tensor]:
    """Draw sequences of labels other than the blank and the padding.

    Args:
        decoder: MEGABiasDecoder.

    Returns:
        : Label sequences, the longest last. [(U,)], int64

    Raises:
        ToolError: If the vocabulary has no such label.

    """
    labels = [
        label for label in range(1, decoder.vocab_size) if label != decoder.pad_idx
    ]
    if not labels:
        raise ToolError("the vocabulary holds no label besides the blank")

    lengths = set(_LENGTHS)
    if decoder.chunk_size > 0:
        lengths.add(2 * decoder.chunk_size + 1)
    elif decoder.max_positions is not None:
        lengths = {min(length, decoder.max_positions) for length in lengths}

    generator = torch.Generator().manual_seed(0)

    return [
        torch.tensor(labels)[torch.randint(len(labels), (n,), generator=generator)]
        for n in sorted(lengths)
    ]


def _differences(pair, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """Compare full passes.

    Args:
        pair: ESPnet's decoder and ours.
        sequences: Label sequences. [(U,)]

    Returns:
        : Largest difference at each position, as a share of ESPnet's largest output
            over all sequences. [(U,)]

    """
    theirs, ours = (
        [decoder(labels.unsqueeze(0))[0] for labels in sequences] for decoder in pair
    )
    largest = torch.cat(theirs).abs().max()

    return [(b - a).abs().amax(-1) / largest for a, b in zip(theirs, ours, strict=True)]


def _search_difference(pair, labels: list[int]) -> float | str:
    """Compare what the search computes, label by label.

    Args:
        pair: ESPnet's decoder and ours.
        labels: Label sequence from the blank on. [U]

    Returns:
        : Largest difference, as a share of ESPnet's largest output, or the error that
            ESPnet's decoder stops with.

    """
    outs = []

    for decoder in pair:
        decoder.score_cache = {}
        state = decoder.init_state()
        rows = []

        for end in range(1, len(labels) + 1):
            try:
                out, state = decoder.score(labels[:end], state)
            except Exception as exc:  # whatever ESPnet's decoder runs into
                return f"{type(exc).__name__} at position {end}: {exc}"
            rows.append(out.flatten())

        outs.append(torch.stack(rows))

    theirs, ours = outs

    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
