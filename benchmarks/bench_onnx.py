"""Compare an exported model with ESPnet's own search: tokens, WER and time.

    python benchmarks/bench_onnx.py --train EXP --scp FILE --text FILE
                                    [--beam_size N] [--beam_utterances N]
                                    [--repeat N] [--smoke] [--json FILE]

EXP is an experiment folder or a checkpoint; FILE has one utterance a line, its name and
a .wav or .npy file (features), as in Kaldi's .scp files; the text file has its words.
The model is exported twice, in float32 and in int8. All utterances are decoded greedily
(beam 1), the first ones with the beam too, by ESPnet's Speech2Text with PyTorch and by
onnxruntime, with the same number of threads, in turn. Start it where the training ran:
ESPnet looks there for the files that config.yaml names.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import jiwer
import torch
from common import arguments, machine, start

from espnet_mega_bias.tools.experiment import load
from espnet_mega_bias.tools.onnx_decoder import Recognizer, read_speech
from espnet_mega_bias.tools.onnx_export import export
from espnet_mega_bias.tools.quiet import quiet_imports

with quiet_imports():
    from espnet2.bin.asr_transducer_inference import Speech2Text

Texts = dict[str, str]


def read_lines(path: Path) -> Texts:
    """Read a file of Kaldi's: by name, the rest of the line."""
    pairs = (line.split(maxsplit=1) for line in path.read_text().splitlines())

    return {name: rest[0] if rest else "" for name, *rest in pairs}


class Recognizers:
    """The same model three times, with one beam size.

    Args:
        train: Experiment folder or checkpoint.
        exported: Directories of the exported models, by type of the weights.
        beam_size: Number of hypotheses.
        threads: Number of threads.

    """

    def __init__(
        self, train: Path, exported: dict[str, Path], beam_size: int, threads: int
    ) -> None:
        experiment = load(train)
        speech2text = Speech2Text(
            experiment.config_file,
            experiment.checkpoint,
            beam_size=beam_size,
        )

        def by_espnet(speech):
            # A copy: ESPnet normalises features in place.
            hyps = speech2text(torch.tensor(speech))

            return speech2text.hypotheses_to_results(hyps)[0]

        self.calls = {"PyTorch": by_espnet} | {
            f"onnxruntime, {weights}": Recognizer(directory, beam_size, threads)
            for weights, directory in exported.items()
        }

    def decode(self, utterances: dict, repeat: int) -> tuple[dict, dict]:
        """Decode utterances, round by round.

        Args:
            utterances: Waveforms or features, by name.
            repeat: Number of rounds that are timed, after one that is not.

        Returns:
            : By recognizer and utterance, text and tokens.
            : By recognizer, median time of a round, in seconds.

        """
        found = {name: {} for name in self.calls}
        times = {name: [] for name in self.calls}

        for n in range(repeat + 1):
            for name, call in self.calls.items():
                begin = time.perf_counter()

                for key, speech in utterances.items():
                    found[name][key] = call(speech)[:2]

                # The first round warms up.
                if n > 0:
                    times[name].append(time.perf_counter() - begin)

        return found, {name: statistics.median(x) for name, x in times.items()}


def bench(recognizers: Recognizers, utterances: dict, texts: Texts, repeat: int):
    """Compare texts, tokens and times.

    Args:
        recognizers: What to compare.
        utterances: Waveforms or features, by name.
        texts: What was said.
        repeat: Number of rounds.

    Returns:
        : By recognizer: utterances with the tokens that ESPnet's search finds, word
            error rate in percent, and seconds for all utterances.

    """
    found, seconds = recognizers.decode(utterances, repeat)
    rows = {}

    for name, results in found.items():
        said = [texts[key] for key in utterances]
        read = [results[key][0] for key in utterances]
        rows[name] = {
            "utterances": len(utterances),
            "same_tokens": sum(
                results[key][1] == found["PyTorch"][key][1] for key in utterances
            ),
            "wer": 100.0 * jiwer.wer(said, read),
            "seconds": seconds[name],
        }

    return rows


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--train", type=Path, required=True, help="trained model")
    parser.add_argument("--scp", type=Path, required=True, help="names and files")
    parser.add_argument("--text", type=Path, required=True, help="names and words")
    parser.add_argument("--beam_size", type=int, default=5)
    parser.add_argument("--beam_utterances", type=int, default=30)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    start(args)

    if args.smoke:
        args.beam_size, args.beam_utterances, args.repeat = 2, 1, 1

    files = list(read_lines(args.scp).items())[: 1 if args.smoke else None]
    texts = read_lines(args.text)
    done = {}

    with tempfile.TemporaryDirectory() as folder:
        exported = {weights: Path(folder) / weights for weights in ("float32", "int8")}

        for weights, directory in exported.items():
            export(load(args.train), directory, int8=weights == "int8")

        takes = Recognizer(exported["float32"]).model["speech"]
        utterances = {
            name: read_speech(file, takes).astype("float32") for name, file in files
        }

        print("| search | recognizer | same tokens | WER, % | time, s | speed |")
        print("|---|---|---|---|---|---|")

        for beam, count in ((1, len(files)), (args.beam_size, args.beam_utterances)):
            some = dict(list(utterances.items())[:count])
            recognizers = Recognizers(args.train, exported, beam, args.threads)
            rows = bench(recognizers, some, texts, args.repeat)
            done[f"beam {beam}"] = rows
            report(beam, rows)

    if args.json:
        args.json.write_text(
            json.dumps({"machine": machine(args.device), "rows": done}, indent=1)
        )


def report(beam: int, rows: dict[str, dict[str, float]]) -> None:
    """Print the rows of one beam size."""
    for name, row in rows.items():
        print(
            f"| beam {beam} | {name} | {row['same_tokens']} of {row['utterances']} | "
            f"{row['wer']:.1f} | {row['seconds']:.2f} | "
            f"{rows['PyTorch']['seconds'] / row['seconds']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
