"""Time whole decodings of mini_an4 against ESPnet's `mega` with the same weights.

    make demo                         # trains the model that is decoded with
    python benchmarks/bench_search.py [--train DIR --wav_scp FILE] [--smoke]
                                      [--json FILE]

Both decode the seven utterances with ESPnet's Speech2Text, default search and mAES,
beam 5. The floor is everything but the decoder: encoder, joint network and search. The
rows of the decoder alone compare the time spent in `score` and `batch_score`, and their
floor is the linear layers for the label sequences that were new, call by call.

Searches with ESPnet's class can take other paths, because its search does not compute
what was trained: calls, label sequences and texts are printed for both.
"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import soundfile
import torch
import yaml
from common import LinearLayers, Row, arguments, report, start
from espnet2.asr_transducer.decoder.mega_decoder import MEGADecoder
from espnet2.bin.asr_transducer_inference import Speech2Text

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "egs/mini_an4/asr_transducer1"
SEARCHES = {
    "default": {"search_type": "default"},
    "maes": {"search_type": "maes", "nstep": 2, "expansion_beta": 2},
}


class Timed:
    """Times the steps of a decoder, and counts the new label sequences of each.

    Args:
        decoder: Decoder; its `score` and `batch_score` are replaced.

    """

    def __init__(self, decoder: torch.nn.Module) -> None:
        self.begin()

        for name in ("score", "batch_score"):
            setattr(decoder, name, self._timed(getattr(decoder, name)))

    def begin(self) -> None:
        """Forget what was timed and counted."""
        self.seconds = 0.0
        self.batches: list[int] = []
        self.next_utterance()

    def next_utterance(self) -> None:
        """Take every label sequence for new again."""
        self._seen: set[tuple[int, ...]] = set()

    def _timed(self, method):
        def timed(first, *rest):
            begin = time.perf_counter()
            result = method(first, *rest)
            self.seconds += time.perf_counter() - begin

            sequences = {tuple(first)} if rest else {tuple(hyp.yseq) for hyp in first}
            self.batches.append(len(sequences - self._seen))
            self._seen |= sequences

            return result

        return timed


def recognizer(train: Path, search: str, espnet: bool) -> tuple[Speech2Text, Timed]:
    """Load a trained model.

    Args:
        train: Folder with config.yaml and latest.pth.
        search: Which search.
        espnet: Put ESPnet's `mega` with the same weights in place of the decoder.

    """
    config = train / "config.yaml"
    speech2text = Speech2Text(
        config,
        train / "latest.pth",
        beam_size=5,
        beam_search_config=SEARCHES[search],
    )

    if espnet:
        ours = speech2text.beam_search.decoder
        conf = yaml.safe_load(config.read_text())["decoder_conf"]
        theirs = MEGADecoder(ours.vocab_size, **conf).eval()
        theirs.load_state_dict(ours.state_dict())
        speech2text.beam_search.decoder = theirs
        speech2text.asr_model.decoder = theirs

    return speech2text, Timed(speech2text.beam_search.decoder)


def bench(
    train: Path, utterances: list[torch.Tensor], search: str, repeat: int
) -> Iterator[tuple[str, Row]]:
    """Time one search.

    Args:
        train: Folder of the model.
        utterances: Waveforms.
        search: Which search.
        repeat: Number of rounds.

    """
    recognizers = {
        "espnet": recognizer(train, search, espnet=True),
        "ours": recognizer(train, search, espnet=False),
    }
    whole = {name: [] for name in recognizers}
    alone = {name: [] for name in recognizers}

    for n in range(repeat + 1):
        for name, (speech2text, timed) in recognizers.items():
            timed.begin()
            begin, texts = time.perf_counter(), []

            for speech in utterances:
                timed.next_utterance()
                hyps = speech2text(speech)
                texts.append(speech2text.hypotheses_to_results(hyps)[0][0])

            # The first round warms up.
            if n > 0:
                whole[name].append(1e3 * (time.perf_counter() - begin))
                alone[name].append(1e3 * timed.seconds)
            else:
                print(
                    f"{search}, {name}: {sum(timed.batches)} label sequences, "
                    f"{len(timed.batches)} calls, {texts}",
                    flush=True,
                )

    total = {name: statistics.median(times) for name, times in whole.items()}
    decoder = {name: statistics.median(times) for name, times in alone.items()}

    speech2text, timed = recognizers["ours"]
    floor = LinearLayers(speech2text.beam_search.decoder)
    size = speech2text.beam_search.decoder.output_size
    begin = time.perf_counter()

    with torch.no_grad():
        for batch in filter(None, timed.batches):
            floor(torch.zeros(batch, size))

    linear = 1e3 * (time.perf_counter() - begin)

    yield f"{search}, whole, ms", total | {"floor": total["ours"] - decoder["ours"]}
    yield f"{search}, decoder alone, ms", decoder | {"floor": linear}


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--train", type=Path, help="config.yaml and latest.pth")
    parser.add_argument("--wav_scp", type=Path, help="default: what the demo decoded")
    args = parser.parse_args()
    start(args)

    found = sorted(path.parent for path in RECIPE.glob("exp/*/train/latest.pth"))

    if not args.train and not found:
        parser.error(f"no trained model under {RECIPE}/exp: run `make demo`")

    train = args.train or found[-1]
    wav_scp = args.wav_scp or train.parent / "decode_default/wav.scp"
    utterances = [
        torch.from_numpy(soundfile.read(line.split(maxsplit=1)[1], dtype="float32")[0])
        for line in wav_scp.read_text().splitlines()[: 1 if args.smoke else None]
    ]

    def rows() -> Iterator[tuple[str, Row]]:
        for search in SEARCHES:
            yield from bench(train, utterances, search, 1 if args.smoke else 3)

    report(args, rows())


if __name__ == "__main__":
    main()
