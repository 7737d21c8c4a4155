"""What a training configuration costs, and what in it hurts, in words and tables."""

from collections.abc import Iterator, Sequence

from espnet_mega_bias.tools import decoder_cost, step_time
from espnet_mega_bias.tools.label_lengths import LabelLengths
from espnet_mega_bias.tools.setting_warnings import warn
from espnet_mega_bias.tools.training_config import TrainingConfig

# Positions that costs are shown for, as far as attention reaches.
LENGTHS = (10, 100, 1000, 5000)

# Memory that a measurement may take for weights, tables and made-up labels.
_MOST_BYTES = 4_000_000_000


def explain(
    config: TrainingConfig, lengths: LabelLengths | None, measure: bool
) -> Iterator[str]:
    """Describe the cost of a decoder, and warn of settings that hurt.

    Args:
        config: Configuration.
        lengths: Lengths of training texts, where they are known.
        measure: Time the search's step too.

    Yields:
        : Lines.

    """
    yield from _head(config)
    yield ""
    yield from _parameters(config)
    yield ""
    yield from _state(config)
    yield ""
    yield from _labels(config, lengths, measure)

    warnings = warn(config, lengths)

    for warning in warnings:
        yield ""
        yield f"warning: {warning.text}"
        yield f"  write: {warning.instead}"

    if not warnings:
        yield ""
        yield "No setting was found that hurts."


def shown_lengths(config: TrainingConfig) -> Sequence[int]:
    """Choose the numbers of positions that costs are shown for.

    Args:
        config: Configuration.

    """
    reach = decoder_cost.limit(config.settings)

    if reach is None or reach >= LENGTHS[-1]:
        return LENGTHS

    return [*(length for length in LENGTHS if length < reach), reach]


def _head(config: TrainingConfig) -> Iterator[str]:
    settings = config.settings
    blocks = settings["num_blocks"]
    reach = decoder_cost.limit(settings)
    context = (
        f"attention inside chunks of {reach} labels"
        if settings["chunk_size"] > 0
        else "attention to all labels so far"
        if reach is None
        else f"attention to up to {reach} positions"
    )
    whose = " (ESPnet's own)" if config.decoder == "mega" else ""

    yield f"{config.config_file}: decoder {config.decoder}{whose}"
    yield (
        f"{blocks} {'block' if blocks == 1 else 'blocks'}, "
        f"{settings['rel_pos_bias_type']} bias, {context}"
    )


def _parameters(config: TrainingConfig) -> Iterator[str]:
    counts = decoder_cost.parameters(config.outline())
    blocks, width = config.settings["num_blocks"], config.settings["block_size"]
    vocab = config.vocab_size
    embedding, final, total = (
        counts.pop(part) for part in ("embedding", "final normalisation", "total")
    )
    each = sum(counts.values())

    yield "Parameters"

    if vocab is None:
        # Those of the stand-in for the token list do not count.
        total -= embedding
        yield _row("embedding", f"{width:,}", "for each token (see --token_list)")
    else:
        yield _row("embedding", f"{embedding:,}", f"{vocab} tokens")

    for part, count in counts.items():
        yield _row(f"block: {part}", f"{count:,}")

    yield _row("block", f"{each:,}")
    yield _row(f"{blocks} blocks", f"{blocks * each:,}")
    yield _row("final normalisation", f"{final:,}")
    yield _row("total", f"{total:,}", "without the embedding" if vocab is None else "")


def _row(name: str, figure: str, remark: str = "") -> str:
    return f"  {name:34} {figure:>14}  {remark}".rstrip()


def _state(config: TrainingConfig) -> Iterator[str]:
    settings = config.settings
    blocks = settings["num_blocks"]
    label = decoder_cost.label_bytes(settings)
    ema = decoder_cost.ema_bytes(config.decoder, settings)

    yield "State of the search, in bytes (float32)"
    yield _row(
        "key and value, per label and block",
        f"{label:,}",
        f"{blocks * label:,} per label"
        + (", shared by hypotheses" if config.decoder == "mega_bias" else ""),
    )
    yield _row(
        "EMA, per block",
        f"{ema:,}",
        f"{blocks * ema:,} once per hypothesis",
    )


def _labels(
    config: TrainingConfig, lengths: LabelLengths | None, measure: bool
) -> Iterator[str]:
    settings = config.settings
    shown = shown_lengths(config)
    reach = decoder_cost.limit(settings)

    yield "One label of one hypothesis in the search, and one utterance in training"
    yield "  U: positions, the blank in front included; multiply-adds in millions"
    yield (
        f"  {'U':>6} {'linear':>10} {'attention':>10} {'EMA':>10} {'total':>10} "
        f"{'state':>10} {'ms':>8} {'training':>10}"
    )

    timed = _times(config, shown) if measure else iter([])
    remarks = []

    for length in shown:
        cost = decoder_cost.step(config.decoder, settings, length)
        state = decoder_cost.state_bytes(config.decoder, settings, length)
        time, remark = next(timed, ("", None))
        remarks += [remark] if remark else []
        figures = (cost.linear, cost.attention, cost.ema, cost.total)
        columns = " ".join(f"{figure / 1e6:10.3f}" for figure in figures)
        training = decoder_cost.training_bytes(config.decoder, settings, length)
        yield f"  {length:6} {columns} {size(state):>10} {time:>8} {size(training):>10}"

    if reach == shown[-1]:
        yield f"  {_later(config)}"

    chunk = "; each further chunk takes as much" if settings["chunk_size"] > 0 else ""

    yield "  state: keys, values and EMA after U positions"
    yield f"  training: attention weights kept for the gradient, of all blocks{chunk}"

    if lengths is not None:
        needed = lengths.longest + 1
        held = decoder_cost.training_bytes(config.decoder, settings, needed)
        yield (f"    {size(held)} for the {needed} positions of {lengths.where}")

    if measure:
        yield f"  ms: median, measured on this machine, now: {step_time.machine()}"

    yield from remarks[-1:]


def _later(config: TrainingConfig) -> str:
    """Say what labels cost that come after the reach of attention."""
    settings = config.settings

    if config.decoder == "mega_bias" or settings["chunk_size"] > 0:
        return "Later labels cost no more than in the last row."

    if settings["rel_pos_bias_type"] == "rotary":
        return "Later labels cost more: the search of mega goes on growing its tables."

    return "The last row and later labels stop the search of mega with an error."


def _times(
    config: TrainingConfig, lengths: Sequence[int]
) -> Iterator[tuple[str, str | None]]:
    """Time the step for each length; where that fails, say why."""
    settings = config.settings
    needed = (
        decoder_cost.FLOAT * decoder_cost.parameters(config.outline())["total"]
        + settings["num_blocks"] * decoder_cost.table_bytes(settings)
        + 3 * settings["num_blocks"] * lengths[-1] * decoder_cost.label_bytes(settings)
    )

    if needed > _MOST_BYTES:
        why = f"  not measured: it would take {size(needed)} of memory"
        yield from [("", why)] * len(lengths)
        return

    decoder = config.build()

    for length in lengths:
        try:
            yield f"{step_time.milliseconds(decoder, length):.2f}", None
        except Exception as exc:  # ESPnet's search stops with some settings
            yield "", f"  not measured: the search of {config.decoder} stops: {exc}"


def size(count: int) -> str:
    """Write a number of bytes.

    Args:
        count: Number of bytes.

    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000

    return f"{count:.3g} {unit}" if count < 1000 else f"{count:,.0f} {unit}"
