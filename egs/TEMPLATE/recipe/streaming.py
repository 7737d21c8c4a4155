"""Decode a long stream chunk by chunk, and report its latency, memory and errors.

python -m recipe.streaming --config DECODE.yaml --asr_train_config config.yaml
    --asr_model_file MODEL.pth --test_set DIR --seconds 3600 --output_dir DIR

Gives stream.md, stream.json and stream.png in --output_dir.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from recipe.check import CheckError, parse
from recipe.chunks import Chunks, chunks_of
from recipe.files import RecipeError, replacing
from recipe.footprint import footprint, resident_bytes
from recipe.score import count_errors, software_line, versions
from recipe.stream import Stream, read_set, regroup

MEMORY = {
    "resident": "process (resident)",
    "encoder": "front-end and encoder",
    "decoder": "decoder's states of the hypotheses",
    "score_cache": "decoder's score cache",
    "labels": "labels of the hypotheses",
}
# options of ESPnet's command that are Speech2Text's too
SEARCH_OPTIONS = (
    "beam_search_config",
    "lm_train_config",
    "lm_file",
    "token_type",
    "bpemodel",
    "beam_size",
    "dtype",
    "lm_weight",
    "quantize_asr_model",
    "quantize_modules",
    "quantize_dtype",
    "streaming",
    "decoding_window",
    "left_context",
)
WARM_UP = 1 / 3  # of the stream; memory that is taken there once is no trend
BLOCKS = 20  # neighbouring samples are alike, so a trend is that of means of blocks
GROWS, STEADY = 0.01, 0.05  # of the mean, in all of the time
PROGRESS_SECONDS = 60.0


@dataclass(frozen=True)
class Trend:
    """A straight line through a quantity over the time of the stream.

    Args:
        slope: Change in an hour.
        error: Standard error of it.
        verdict: "grows": by more than two standard errors, and more than 1 % of the
            mean in the time looked at, else "grows, below 1 %"; "steady": less than
            that, and two standard errors more are below 5 %; else "undecided".
    """

    slope: float
    error: float
    verdict: str


def trend(seconds: list[float], values: list[float]) -> Trend | None:
    """Fit a line to means of blocks.

    Args:
        seconds: Times. (N,)
        values: The quantity at these times. (N,)

    Returns:
        The trend; None for fewer than three times.
    """
    count = min(BLOCKS, len(values))
    if count < 3:
        return None
    hours, means = (
        np.array([block.mean() for block in np.array_split(numbers, count)])
        for numbers in (np.asarray(seconds) / 3600, np.asarray(values, dtype=float))
    )
    centred = hours - hours.mean()
    slope = (centred @ means) / (centred @ centred)
    rest = means - means.mean() - slope * centred
    error = np.sqrt((rest @ rest) / (count - 2) / (centred @ centred))
    share = (hours[-1] - hours[0]) / means.mean() if means.mean() else 0.0
    if slope > 2 * error:
        verdict = "grows" if slope * share > GROWS else "grows, below 1 %"
    elif (abs(slope) + 2 * error) * share < STEADY:
        verdict = "steady"
    else:
        verdict = "undecided"
    return Trend(float(slope), float(error), verdict)


@dataclass
class Measurement:
    """What came out of a stream.

    Args:
        rate: Samples in a second.
        size: Samples in a chunk.
        samples: Length of the stream.
        computing: Seconds that each chunk was computed for.
        delay: Seconds from the end of each chunk to its result, with the time that it
            waited for earlier chunks.
        texts: What was recognised, a text for each time that the search was ended.
        memory: At times of the stream: seconds, and bytes by the names in MEMORY.
    """

    rate: int
    size: int
    samples: int = 0
    computing: array = field(default_factory=lambda: array("d"))
    delay: array = field(default_factory=lambda: array("d"))
    texts: list[str] = field(default_factory=list)
    memory: list[dict[str, float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Length of the stream."""
        return self.samples / self.rate

    @property
    def real_time_factor(self) -> float:
        """Seconds of computing for each second of the stream."""
        return sum(self.computing) / self.seconds

    def trends(self) -> dict[str, Trend | None]:
        """Fit lines to memory and to the time of computing, the warm-up aside."""
        warm_up = WARM_UP * self.seconds
        late = [sample for sample in self.memory if sample["seconds"] >= warm_up]
        times = [sample["seconds"] for sample in late]
        found = {
            name: trend(times, [sample[name] for sample in late]) for name in MEMORY
        }
        # the last chunk can be of another length
        ends = np.arange(1, len(self.computing)) * self.size / self.rate
        kept = ends >= warm_up
        found["computing"] = trend(ends[kept], np.array(self.computing[:-1])[kept])
        return found


def memory_now(speech2text) -> dict[str, int]:
    """Return the bytes that the process and the parts of a recogniser hold."""
    model, audio = speech2text.asr_model, speech2text.audio_processor
    # ExtendedHypothesis, of maes, keeps outputs beside the states
    hypotheses = [dict(vars(hyp)) for hyp in speech2text.beam_search.search_cache or ()]
    labels = [hypothesis.pop("yseq") for hypothesis in hypotheses]
    caches = [block.cache for block in model.encoder.encoders.blocks]
    return {
        "resident": resident_bytes(),
        "encoder": footprint(caches, audio.samples, audio.feats, without=model),
        "decoder": footprint(hypotheses, without=model),
        "score_cache": footprint(model.decoder.score_cache, without=model),
        "labels": footprint(labels),
    }


def measure(
    speech2text,
    chunks: Iterator[np.ndarray],
    rate: int,
    endpoint: float | None = None,
    sample_seconds: float = 10.0,
) -> Iterator[Measurement]:
    """Decode a stream, and look at time and memory meanwhile.

    Args:
        speech2text: ESPnet's ``Speech2Text``, streaming.
        chunks: The audio: chunks of ``decoding_samples``, and a last one that is
            shorter, even empty.
        rate: Samples in a second.
        endpoint: Seconds without a new label after which the search is ended, and
            begun anew; None for never.
        sample_seconds: Seconds of the stream between two looks at the memory.

    Yields:
        The measurement so far, the same object after every chunk.
    """
    size = speech2text.audio_processor.decoding_samples
    found = Measurement(rate, size)
    score_norm = speech2text.beam_search.score_norm
    last, quiet, ready, next_look = None, 0, 0.0, 0.0
    for chunk in chunks:
        final = len(chunk) < size
        started = time.perf_counter()
        hypotheses = speech2text.streaming_decode(chunk, is_final=final)
        # before its end a search gives its hypotheses in no order
        best = max(
            hypotheses,
            key=lambda hyp: hyp.score / (len(hyp.yseq) if score_norm else 1),
        )
        quiet = quiet + len(chunk) if best.yseq == last else 0
        last = best.yseq
        ended = final
        if endpoint is not None and not final and len(last) > 1:
            ended = quiet >= endpoint * rate
            if ended:  # ESPnet fills up with silence
                (best,) = speech2text.streaming_decode(chunk[:0], is_final=True)[:1]
        computing = time.perf_counter() - started
        found.samples += len(chunk)
        found.computing.append(computing)
        ready = max(ready, found.seconds) + computing
        found.delay.append(ready - found.seconds)
        # the end of a search leaves nothing to look at
        if found.seconds >= next_look and (not ended or not found.memory):
            found.memory.append({"seconds": found.seconds, **memory_now(speech2text)})
            next_look = found.seconds + sample_seconds
        if ended:
            ((text, *_),) = speech2text.hypotheses_to_results([best])
            found.texts.append(text)
            last, quiet = None, 0
        yield found


def summary(found: Measurement, said: list[str], chunks: Chunks) -> dict:
    """Return the figures of a report.

    Args:
        found: The measurement.
        said: The texts of the utterances in the stream.
        chunks: The chunks that it was decoded in.
    """
    errors = count_errors(
        {"stream": " ".join(said)}, {"stream": " ".join(filter(None, found.texts))}
    )
    shares = (50, 95, 100)
    trends = found.trends()
    memory = {
        name: {
            "start": found.memory[0][name],
            "end": found.memory[-1][name],
            "most": max(sample[name] for sample in found.memory),
            "trend": trends[name] and vars(trends[name]),
        }
        for name in MEMORY
    }
    return {
        "stream_seconds": found.seconds,
        "utterances": len(said),
        "searches": len(found.texts),
        "words": errors.words,
        "word_errors": errors.word_errors,
        "wer": errors.wer,
        "cer": errors.cer,
        "real_time_factor": found.real_time_factor,
        "chunk_seconds": chunks.samples / found.rate,
        "look_ahead_seconds": chunks.look_ahead / found.rate,
        "encoder_frame_seconds": chunks.frame / found.rate,
        "encoder_frames_lost": chunks.lost,
        "computing_seconds": np.percentile(found.computing, shares).tolist(),
        "delay_seconds": np.percentile(found.delay, shares).tolist(),
        "computing_trend": trends["computing"] and vars(trends["computing"]),
        "memory": memory,
    }


def _change(values: dict | None, scale: float, digits: int) -> str:
    if values is None:
        return "too short to say"
    slope, error = values["slope"] / scale, values["error"] / scale
    return f"{slope:+,.{digits}f} ± {error:,.{digits}f} ({values['verdict']})"


def report(title: str, about: list[str], figures: dict) -> str:
    """Return a report in Markdown.

    Args:
        title: What was decoded.
        about: Sentences on how.
        figures: See `summary`.
    """
    chunk, ahead = figures["chunk_seconds"], figures["look_ahead_seconds"]

    def milliseconds(name: str) -> str:
        return " | ".join(f"{1000 * value:.0f}" for value in figures[name])

    lines = [f"# {title}\n\n{software_line(versions())}.\n"]
    lines += [f"{sentence}.\n" for sentence in about]
    lines += [
        f"\nA chunk is {1000 * chunk:.0f} ms; what its last {1000 * ahead:.0f} ms say "
        "is decided with the next one. So a sound waits for "
        f"{1000 * ahead:.0f} to {1000 * (chunk + ahead):.0f} ms before it is computed "
        "on, and then for the delay below.\n\n",
        "| words | word errors | WER % | CER % | real-time factor |\n"
        "|---:|---:|---:|---:|---:|\n"
        f"| {figures['words']} | {figures['word_errors']} | {figures['wer']:.1f} "
        f"| {figures['cer']:.1f} | {figures['real_time_factor']:.3f} |\n\n",
        "| ms for each chunk | median | 95 % | most | change in an hour |\n"
        "|---|---:|---:|---:|---:|\n"
        f"| computing | {milliseconds('computing_seconds')} "
        f"| {_change(figures['computing_trend'], 0.001, 2)} |\n"
        "| delay after its end, with waiting for earlier ones "
        f"| {milliseconds('delay_seconds')} | |\n\n",
        "| memory, kB | at first | at the end | most | change in an hour |\n"
        "|---|---:|---:|---:|---:|\n",
    ]
    for name, label in MEMORY.items():
        values = figures["memory"][name]
        cells = [f"{values[key] / 1000:,.1f}" for key in ("start", "end", "most")]
        cells.append(_change(values["trend"], 1000, 1))
        lines.append(f"| {label} | {' | '.join(cells)} |\n")
    lines.append(
        "\nThe states and the score cache share some of their memory. Changes are "
        "slopes, with their standard errors, over the last two thirds of the stream.\n"
    )
    return "".join(lines)


def draw(found: Measurement, path: Path) -> None:
    """Draw computing time and memory against the time of the stream, as a .png."""
    from matplotlib.figure import Figure

    figure = Figure((7, 7), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    ends = np.arange(1, len(found.computing) + 1) * found.size / found.rate / 60
    top.plot(ends, 1000 * np.array(found.computing), ".", markersize=2)
    top.set(ylabel="computing, ms a chunk", ylim=(0, None))
    minutes = [sample["seconds"] / 60 for sample in found.memory]
    for name, label in MEMORY.items():
        values = np.array([sample[name] for sample in found.memory])
        if name == "resident":
            middle.plot(minutes, values / 1e6)
            middle.set(ylabel=f"{label}, MB")
        else:
            bottom.plot(minutes, values / 1e3, label=label)
    bottom.set(yscale="log", ylabel="state, kB", xlabel="minutes of the stream")
    bottom.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=150)


def load(
    config: Path, train_config: Path, model_file: Path, decoder_conf: dict
) -> tuple[object, Chunks, argparse.Namespace, int]:
    """Build a streaming recogniser.

    Args:
        config: Configuration of ESPnet's decoding, with ``streaming: true``.
        train_config: ESPnet's config.yaml.
        model_file: The model.
        decoder_conf: What to change in the model's ``decoder_conf``.

    Returns:
        The recogniser, its chunks, the options of the configuration, and the sampling
        rate.

    Raises:
        CheckError: If the configuration cannot be read.
        RecipeError: If it is none for streaming, or the model cannot be streamed so.
    """
    import humanfriendly
    import yaml
    from espnet2.bin.asr_transducer_inference import Speech2Text, get_parser

    data = ("--data_path_and_name_and_type", "wav.scp,speech,sound")
    args = parse(get_parser(), config, "--output_dir", os.devnull, *data)
    if not args.streaming:
        raise RecipeError(f"{config} has no `streaming: true`")
    if args.beam_search_config.get("search_type") == "alsd":
        raise RecipeError(f"{config}: alsd needs whole utterances, it cannot stream")
    with contextlib.ExitStack() as stack:
        if decoder_conf:
            content = yaml.safe_load(train_config.read_text(encoding="utf-8"))
            content["decoder_conf"].update(decoder_conf)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            train_config = folder / "config.yaml"
            train_config.write_text(yaml.safe_dump(content), encoding="utf-8")
        options = {name: getattr(args, name) for name in SEARCH_OPTIONS}
        speech2text = Speech2Text(train_config, model_file, **options)
    trained, model = speech2text.asr_train_args, speech2text.asr_model
    main_conf = trained.encoder_conf.get("main_conf", {})
    dynamic = main_conf.get("dynamic_chunk_training", False)
    try:
        chunks = chunks_of(model, args.decoding_window, args.left_context, dynamic)
    except RecipeError as exc:
        raise RecipeError(f"{config} with {model_file}: {exc}") from exc
    rate = trained.frontend_conf.get("fs", 16000)
    if isinstance(rate, str):
        rate = humanfriendly.parse_size(rate)
    return speech2text, chunks, args, rate


def key_value(text: str) -> tuple[str, object]:
    """Read ``key=value``, the value as in YAML."""
    import yaml

    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"key=value expected, not {text!r}")
    return key, yaml.safe_load(value)


def positive(text: str) -> float:
    """Read a number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"a number above 0 expected, not {text}")
    return number


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="of the decoding")
    parser.add_argument("--asr_train_config", type=Path, required=True)
    parser.add_argument("--asr_model_file", type=Path, required=True)
    parser.add_argument(
        "--test_set", type=Path, required=True, help="folder with wav.scp and text"
    )
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=positive, default=3600.0, help="length (default: %(default)s)"
    )
    parser.add_argument(
        "--pause",
        type=positive,
        nargs=2,
        default=(0.5, 2.0),
        metavar=("SHORTEST", "LONGEST"),
        help="between utterances, in seconds (default: 0.5 2.0)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of order and pauses")
    parser.add_argument(
        "--endpoint",
        type=positive,
        metavar="SECONDS",
        help="end the search, and begin a new one, after so long without a new label",
    )
    parser.add_argument(
        "--decoder_conf",
        type=key_value,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change this in the model's decoder_conf, e.g. max_positions=64",
    )
    parser.add_argument(
        "--sample_seconds",
        type=positive,
        default=10.0,
        help="of the stream, between looks at the memory (default: %(default)s)",
    )
    return parser


def run(args: argparse.Namespace) -> str:
    """Measure, and write the files.

    Returns:
        The report.

    Raises:
        CheckError: If the configuration cannot be read.
        RecipeError: If the stream cannot be made or decoded.
    """
    import torch

    changes = dict(args.decoder_conf)
    speech2text, chunks, options, rate = load(
        args.config, args.asr_train_config, args.asr_model_file, changes
    )
    stream = Stream(
        read_set(args.test_set, rate), rate, args.seconds, args.pause, args.seed
    )
    conf = speech2text.asr_train_args.decoder_conf
    about = [
        f"{args.test_set.name}: utterances in random order (seed {args.seed}), over "
        f"and over, with pauses of {args.pause[0]:g} to {args.pause[1]:g} s",
        f"Decoder {speech2text.asr_train_args.decoder}: {conf}",
        f"Search {options.beam_search_config.get('search_type', 'default')}, beam "
        f"{options.beam_size}, decoding_window {options.decoding_window}, left_context "
        f"{options.left_context}, {torch.get_num_threads()} threads",
        "The search goes on from the first to the last second"
        if args.endpoint is None
        else f"The search ends, and begins anew, after {args.endpoint:g} s without a "
        "new label",
    ]
    if remark := chunks.remark():
        about.append(remark)
        print(f"  {remark}", file=sys.stderr)
    shown = 0.0
    pieces = regroup(stream, chunks.samples)
    for found in measure(speech2text, pieces, rate, args.endpoint, args.sample_seconds):
        if found.seconds >= shown + PROGRESS_SECONDS:
            shown = found.seconds
            print(
                f"  {shown / 60:.0f} of {args.seconds / 60:.0f} minutes, real-time "
                f"factor {found.real_time_factor:.3f}, resident "
                f"{found.memory[-1]['resident'] / 1e6:.0f} MB",
                flush=True,
            )
    figures = summary(found, stream.texts, chunks)
    title = f"A stream of {found.seconds / 60:.0f} minutes, {args.config.stem}"
    text = report(title, about, figures)
    details = {
        "title": title,
        "about": about,
        **figures,
        "versions": versions(),
        "memory_samples": found.memory,
        "computing": [round(value, 6) for value in found.computing],
        "said": stream.texts,
        "recognised": found.texts,
    }
    with replacing(args.output_dir / "stream.json") as partial:
        partial.write_text(json.dumps(details, indent=1) + "\n", encoding="utf-8")
    with replacing(args.output_dir / "stream.png") as partial:
        draw(found, partial)
    with replacing(args.output_dir / "stream.md") as partial:
        partial.write_text(text, encoding="utf-8")
    return f"{text}\nThis report: {args.output_dir / 'stream.md'}"


def main() -> int:
    args = get_parser().parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # ESPnet's, on its extras
            import espnet2.tasks.asr_transducer  # noqa: F401
        text = run(args)
    except (CheckError, RecipeError, OSError) as exc:
        print(f"streaming.py: error: {' '.join(str(exc).split())}", file=sys.stderr)
        return 1
    print(f"\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
