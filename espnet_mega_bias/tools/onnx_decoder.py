"""Speech recognition with an exported transducer: numpy and onnxruntime alone.

A copy of this file lies as decode.py beside the ONNX graphs that
`espnet-mega-bias export` wrote:

    python decode.py --beam_size 5 one.wav two.wav

or in a program:

    from decode import Recognizer

    recognize = Recognizer("exported", beam_size=5)
    text, tokens, score = recognize(waveform)
"""

import argparse
import json
import sys
import wave
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

BLANK = 0

# Frames that the joint network is asked about at once for a label sequence: most of
# them go by before the sequence grows.
_FRAMES_AHEAD = 8

# Label sequences that are remembered, beside those of the hypotheses.
_REMEMBERED = 256


class Result(NamedTuple):
    """What was recognised.

    Args:
        text: Text.
        tokens: Tokens that it is made of.
        score: Log-probability of the best path.

    """

    text: str
    tokens: list[str]
    score: float


class _Prefix:
    """A label sequence, and what the decoder has made of it.

    Args:
        parent: The sequence without its last label (None = this is the first label).
        label: Last label.

    """

    def __init__(self, parent: "_Prefix | None", label: int) -> None:
        self.parent = parent
        self.label = label
        self.length = 1 if parent is None else parent.length + 1

        # Weak: a sequence that no hypothesis has any more is to be forgotten.
        self._children = weakref.WeakValueDictionary()

        # The decoder's, once it was asked: output (1, D_dec), EMA state, and what the
        # last label adds to the history.
        self.output: np.ndarray | None = None
        self.ema: np.ndarray | None = None
        self.added: list[np.ndarray] = []

        # The joint network's, from one frame on. (F, vocab_size)
        self.log_probs = np.zeros((0, 0))
        self.first_frame = 0

    def child(self, label: int) -> "_Prefix":
        """Give the sequence with one more label, the same one each time."""
        child = self._children.get(label)

        if child is None:
            child = self._children[label] = _Prefix(self, label)

        return child

    def labels(self) -> list[int]:
        """Give the labels after the blank in front."""
        labels, prefix = [], self

        while prefix.parent is not None:
            labels.append(prefix.label)
            prefix = prefix.parent

        return labels[::-1]


class _Hypothesis(NamedTuple):
    score: float
    prefix: _Prefix


class Recognizer:
    """Recognises utterances with an exported model.

    The search is ESPnet's `default` one (`default_beam_search` in
    espnet2/asr_transducer/beam_search_transducer.py) without a language model, which
    with `beam_size` 1 is what ESPnet's users call greedy.

    Args:
        directory: Directory that `espnet-mega-bias export` made.
        beam_size: Number of hypotheses that are kept for a frame.
        threads: Number of threads that onnxruntime may use.
        score_norm: Choose the final hypothesis by score per label, the blank in front
            counted.

    Raises:
        ValueError: If the directory holds no such model, or `beam_size` is below 1 or
            above the number of labels.
        ImportError: If onnxruntime is missing.

    """

    def __init__(
        self,
        directory: Path | str,
        beam_size: int = 1,
        threads: int = 1,
        score_norm: bool = False,
    ) -> None:
        """Construct a Recognizer object."""
        directory = Path(directory)

        try:
            self.model = json.loads((directory / "model.json").read_text())
            tokens = (directory / "tokens.txt").read_text(encoding="utf-8")
        except (OSError, ValueError) as exc:
            raise ValueError(f"{directory} holds no exported model: {exc}") from exc

        # Not splitlines(), which splits at some characters that can be tokens.
        self.tokens = tokens.removesuffix("\n").split("\n")

        if not 1 <= beam_size <= len(self.tokens):
            raise ValueError(
                f"beam_size must be between 1 and {len(self.tokens)}, the number of "
                f"labels, got {beam_size}"
            )

        self.beam_size = beam_size
        self.score_norm = score_norm
        self.encoder, self.decoder_step, self.joint = (
            _session(directory / f"{name}.onnx", threads)
            for name in ("encoder", "decoder_step", "joint")
        )

    def __call__(self, speech: np.ndarray) -> Result:
        """Recognise one utterance.

        Args:
            speech: Waveform, from -1 to 1, (S,), or features, (T, F), whichever the
                model was trained on.

        Returns:
            : Text, tokens and score.

        Raises:
            ValueError: If the shape is wrong, or the utterance is too short.

        """
        labels, score = self.search(self.encode(speech))
        tokens = [self.tokens[label] for label in labels if label != BLANK]

        return Result(to_text(tokens, self.model["tokens"]["type"]), tokens, score)

    def encode(self, speech: np.ndarray) -> np.ndarray:
        """Encode one utterance.

        Args:
            speech: Waveform (S,), or features (T, F).

        Returns:
            : Encoder output sequence. (T', D_enc)

        Raises:
            ValueError: If the shape is wrong, or the utterance is too short.

        """
        wanted = self.model["speech"]
        speech = np.asarray(speech, dtype=np.float32)

        if wanted["kind"] == "audio":
            if speech.ndim != 1:
                raise ValueError(
                    f"the model takes a waveform of one channel, got {speech.shape}"
                )
        elif speech.ndim != 2 or speech.shape[1] != wanted["size"]:
            raise ValueError(
                f"the model takes features (frames, {wanted['size']}), got "
                f"{speech.shape}"
            )

        if len(speech) < wanted["shortest"]:
            raise ValueError(
                f"the utterance is too short: {len(speech)} "
                f"{'samples' if wanted['kind'] == 'audio' else 'frames'}, but the "
                f"model needs {wanted['shortest']}"
            )

        return self.encoder.run(None, {"speech": speech[np.newaxis]})[0][0]

    def search(self, encoded: np.ndarray) -> tuple[list[int], float]:
        """Find a likely label sequence.

        Args:
            encoded: Encoder output sequence. (T, D_enc)

        Returns:
            : Labels after the blank in front.
            : Log-probability of the best path.

        """
        beam = min(self.beam_size, len(self.tokens) - 1)
        kept = [_Hypothesis(0.0, _Prefix(None, BLANK))]
        recent = deque(maxlen=_REMEMBERED)

        for frame in range(len(encoded)):
            hyps, kept = kept, []

            while True:
                best = max(hyps, key=_score)
                hyps.remove(best)

                if best.prefix.output is None:
                    self._step(best.prefix)
                    recent.append(best.prefix)

                log_probs = self._log_probs(best.prefix, encoded, frame)
                kept.append(
                    _Hypothesis(best.score + float(log_probs[BLANK]), best.prefix)
                )
                hyps += [
                    _Hypothesis(
                        best.score + float(log_probs[label]), best.prefix.child(label)
                    )
                    for label in _likeliest(log_probs, beam)
                ]

                highest = max(hyp.score for hyp in hyps)
                likelier = [hyp for hyp in kept if hyp.score > highest]

                if len(likelier) >= self.beam_size:
                    kept = sorted(likelier, key=_score)
                    break

        final = max(kept, key=_score_per_label if self.score_norm else _score)

        return final.prefix.labels(), final.score

    def _step(self, prefix: _Prefix) -> None:
        """Feed the last label of a sequence to the decoder."""
        state = self.model["state"]
        ema, rows = np.zeros(state["ema"], np.float32), []

        if prefix.parent is not None:
            ema = prefix.parent.ema
            before = prefix.parent

            while before is not None and len(rows) != state["history"]:
                rows.append(before.added)
                before = before.parent

        # A window of one position has no history.
        none = [
            np.zeros(state["keys"], np.float32),
            np.zeros(state["values"], np.float32),
            np.zeros((1, 0), np.int64),
        ]
        keys, values, positions = (
            np.concatenate(parts, axis)
            for parts, axis in zip(
                zip(none, *rows[::-1], strict=True), (2, 2, 1), strict=True
            )
        )

        prefix.output, prefix.ema, *prefix.added = self.decoder_step.run(
            None,
            {
                "labels": np.array([prefix.label]),
                "length": np.array([prefix.length - 1]),
                "ema": ema,
                "keys": keys,
                "values": values,
                "positions": positions,
            },
        )

    def _log_probs(
        self, prefix: _Prefix, encoded: np.ndarray, frame: int
    ) -> np.ndarray:
        """Give the log-probabilities of the labels that may follow. (vocab_size,)."""
        place = frame - prefix.first_frame

        if not 0 <= place < len(prefix.log_probs):
            frames = encoded[frame : frame + _FRAMES_AHEAD]
            (log_probs,) = self.joint.run(
                None, {"encoder": frames, "decoder": prefix.output}
            )
            prefix.log_probs, prefix.first_frame, place = log_probs[:, 0], frame, 0

        return prefix.log_probs[place]


def to_text(tokens: Sequence[str], kind: str) -> str:
    """Join tokens as ESPnet's tokenizers do.

    Args:
        tokens: Tokens.
        kind: "bpe" (sentencepiece without byte fallback), "char", "phn" or "word".

    Returns:
        : Text.

    """
    if kind == "word":
        return " ".join(tokens)

    if kind == "bpe":
        # Sentencepiece drops spaces in front, but not those around its mark for <unk>.
        text = "".join(tokens).lstrip("\u2581").replace("\u2581", " ")

        return text.replace("<unk>", " \u2047 ")

    if kind == "char":
        return "".join(" " if token == "<space>" else token for token in tokens)

    return "".join(tokens)


def read_speech(path: Path | str, speech: dict[str, Any]) -> np.ndarray:
    """Read one utterance.

    Args:
        path: Audio file (without the package soundfile, .wav alone), or a waveform or
            features saved by numpy (.npy).
        speech: What the model takes, from model.json.

    Returns:
        : Waveform (S,) or features (T, F).

    Raises:
        ValueError: If the file holds something else, or at another sampling rate.

    """
    path = Path(path)

    if path.suffix == ".npy":
        array = np.load(path, allow_pickle=False)
    elif speech["kind"] == "audio":
        array, rate = _read_audio(path)

        if rate != speech["sample_rate"]:
            raise ValueError(
                f"{rate} samples a second, but the model takes {speech['sample_rate']}"
            )
    else:
        raise ValueError("the model takes features: .npy files (frames, features)")

    if speech.get("volume") and np.any(array):
        array = array * (speech["volume"] / np.max(np.abs(array)))

    return array


def main(argv: Sequence[str] | None = None) -> int:
    """Recognise files.

    Args:
        argv: Arguments, else those of the process.

    Returns:
        : Exit status: 0, or 1 after an error, which is printed in one line.

    """
    args = _parser().parse_args(argv)

    try:
        if args.output and args.output.exists():
            raise ValueError(f"{args.output} exists, and is not overwritten")

        recognize = Recognizer(args.model, args.beam_size, args.threads)
        lines = []

        for path in args.speech:
            try:
                result = recognize(read_speech(path, recognize.model["speech"]))
            except (EOFError, ValueError, wave.Error) as exc:
                raise ValueError(f"{path}: {exc}") from exc

            lines.append(f"{path.stem} {result.text}".rstrip())
            print(lines[-1], flush=True)

        if args.output:
            with args.output.open("x", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
    except (ImportError, OSError, ValueError) as exc:
        print(f"decode.py: error: {' '.join(str(exc).split())}", file=sys.stderr)
        return 1

    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Recognise speech with an exported model; prints the name of each "
        "file and its text. Needs numpy and onnxruntime.",
        epilog="example: python decode.py --beam_size 5 --output hyp.txt *.wav",
    )
    parser.add_argument(
        "speech",
        nargs="+",
        type=Path,
        metavar="AUDIO_OR_NPY",
        help="audio file of one channel, or .npy with a waveform (samples,) or "
        "features (frames, size), whichever the model takes",
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=Path(__file__).resolve().parent,
        help="directory of the model (default: where this file lies)",
    )
    parser.add_argument(
        "--beam_size",
        type=int,
        default=1,
        help="hypotheses that are kept for a frame (default: 1, the greedy search)",
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of onnxruntime (default: 1)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="new file for the same lines, in Kaldi's text format",
    )

    return parser


def _session(path: Path, threads: int):
    try:
        import onnxruntime
    except ImportError as exc:
        raise ImportError("onnxruntime is missing: pip install onnxruntime") from exc

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1

    try:
        return onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
    except Exception as exc:  # onnxruntime's have nothing in common
        raise ValueError(f"{path} cannot be loaded: {exc}") from exc


def _score(hyp: _Hypothesis) -> float:
    return hyp.score


def _score_per_label(hyp: _Hypothesis) -> float:
    return hyp.score / hyp.prefix.length


def _likeliest(log_probs: np.ndarray, count: int) -> list[int]:
    """Give the most likely labels other than the blank, the likeliest first."""
    others = log_probs[BLANK + 1 :]

    if count == 1:
        return [int(others.argmax()) + BLANK + 1]

    found = np.argpartition(-others, count - 1)[:count]

    return (found[np.argsort(-others[found])] + BLANK + 1).tolist()


def _read_audio(path: Path) -> tuple[np.ndarray, int]:
    """Read a waveform from -1 to 1, and its sampling rate."""
    try:
        import soundfile
    except (ImportError, OSError):  # the package, or the library that it loads
        return _read_wav(path)

    try:
        return soundfile.read(path, dtype="float32")
    except soundfile.LibsndfileError as exc:
        raise ValueError(exc) from exc


def _read_wav(path: Path) -> tuple[np.ndarray, int]:
    with wave.open(str(path), "rb") as file:
        rate, width, channels = (
            file.getframerate(),
            file.getsampwidth(),
            file.getnchannels(),
        )
        data = file.readframes(file.getnframes())

    if width != 2:
        raise ValueError(
            f"{8 * width} bits a sample; without the package soundfile, 16 alone"
        )

    array = np.frombuffer(data, "<i2").astype(np.float32) / 32768.0

    return array if channels == 1 else array.reshape(-1, channels), rate


if __name__ == "__main__":
    sys.exit(main())
