"""recipe.streaming: a stream through ESPnet's streaming_decode, and its report."""

import itertools
import json
import re
import types

import numpy as np
import pytest
import soundfile
import torch
from espnet2.utils.yaml_no_alias_safe_dump import yaml_no_alias_safe_dump
from streaming_model import build

RATE = 16000
WINDOW = 128  # the shortest
MEMORY = ("resident", "encoder", "decoder", "score_cache", "labels")


@pytest.fixture
def streaming(local):
    return local("streaming")


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a model and a configuration of its decoding."""

    def files(decode="", **parts):
        args, model = build(**parts)
        (tmp_path / "config.yaml").write_text(yaml_no_alias_safe_dump(vars(args)))
        torch.save(model.state_dict(), tmp_path / "model.pth")
        (tmp_path / "decode.yaml").write_text(
            decode
            or f"beam_size: 2\nstreaming: true\ndecoding_window: {WINDOW}\n"
            "left_context: 4\nbeam_search_config: {search_type: maes, nstep: 2}\n"
        )
        return [tmp_path / name for name in ("decode.yaml", "config.yaml", "model.pth")]

    return files


@pytest.fixture
def load(streaming, write):
    """Return a function that builds a recogniser."""
    return lambda **parts: streaming.load(*write(**parts), {})[0]


def noise(seconds):
    """Noise that is louder and softer from one tenth of a second to the next."""
    rng = np.random.default_rng(0)
    samples = rng.uniform(-0.5, 0.5, round(seconds * RATE))
    loudness = rng.uniform(0.0, 1.0, round(10 * seconds)) ** 4
    return (samples * loudness.repeat(RATE // 10)).astype(np.float32)


def last(iterator):
    *_, value = iterator
    return value


@pytest.mark.parametrize("samples", [2 * RATE, 15 * WINDOW * 16, 100])
def test_a_stream_in_pieces_gives_what_an_utterance_gives(streaming, load, samples):
    speech2text, speech = load(), noise(2)[:samples]
    size = speech2text.audio_processor.decoding_samples
    for start in range(0, len(speech) + 1, size):  # as ESPnet's command
        final = start + size > len(speech)
        nbest = speech2text.streaming_decode(speech[start : start + size], final)
    ((expected, *_),) = speech2text.hypotheses_to_results(nbest)
    assert len(set(expected)) > 1 or samples == 100

    pieces = iter(np.array_split(speech, 7))
    regroup = streaming.regroup(pieces, size)
    found = last(streaming.measure(speech2text, regroup, RATE))

    assert found.texts == [expected]
    assert found.samples == samples
    assert len(found.computing) == len(found.delay) == samples // size + 1
    assert found.memory[0].keys() == {"seconds", *MEMORY}


def grown(streaming, load, **decoder_conf):
    """Memory from second 8 to 10, by that from second 4 to 6."""
    pieces = streaming.regroup([noise(10)], WINDOW * 16)
    speech2text = load(decoder_conf=decoder_conf)
    found = last(streaming.measure(speech2text, pieces, RATE, sample_seconds=0.5))
    assert len(found.texts[0]) > 300

    def mean(name, first, end):
        return np.mean(
            [look[name] for look in found.memory if first <= look["seconds"] <= end]
        )

    return {name: mean(name, 8, 10) / mean(name, 4, 6) for name in MEMORY}


@pytest.mark.parametrize("conf", [{"chunk_size": 8}, {"max_positions": 8}], ids=str)
def test_a_decoder_with_a_bound_has_a_state_of_constant_size(streaming, load, conf):
    ratios = grown(streaming, load, **conf)

    assert 0.8 < ratios["decoder"] < 1.2
    assert 0.8 < ratios["score_cache"] < 1.2
    assert ratios["encoder"] == 1.0
    assert ratios["labels"] > 1.3  # ESPnet's lists


def test_a_decoder_without_a_bound_is_told_from_it(streaming, load):
    ratios = grown(streaming, load)

    assert ratios["decoder"] > 1.3
    assert ratios["score_cache"] > 1.3
    assert ratios["encoder"] == 1.0


class Stub:
    """Stands for a recogniser with chunks of a second, that hears one label."""

    audio_processor = types.SimpleNamespace(decoding_samples=RATE)
    beam_search = types.SimpleNamespace(score_norm=False)

    def __init__(self):
        self.calls = []

    def streaming_decode(self, chunk, is_final):
        self.calls.append((len(chunk), is_final))
        return [types.SimpleNamespace(score=0.0, yseq=[0, 2])]

    def hypotheses_to_results(self, best):
        return [("a", [], [], best)]


@pytest.fixture
def stub(streaming, monkeypatch):
    memory = dict.fromkeys(streaming.MEMORY, 1)
    monkeypatch.setattr(streaming, "memory_now", lambda _: memory)
    return Stub()


def test_the_search_is_ended_where_no_label_has_come_for_long(streaming, stub):
    pieces = streaming.regroup([noise(6)], RATE)

    found = last(streaming.measure(stub, pieces, RATE, endpoint=2.0))

    # nothing new in chunks 2 and 3, and in 5 and 6; the last one is empty anyway
    goes_on, ends = (RATE, False), (0, True)
    assert stub.calls == [*[goes_on] * 3, ends, *[goes_on] * 3, ends, ends]
    assert found.texts == ["a", "a", "a"]
    assert found.samples == 6 * RATE
    assert len(found.computing) == 7


def test_the_delay_counts_the_wait_for_earlier_chunks(streaming, stub, monkeypatch):
    clock = itertools.accumulate([0, 0.5, 0, 2.0, 0, 0.5, 0, 0.5])
    monkeypatch.setattr(streaming.time, "perf_counter", lambda: next(clock))

    pieces = streaming.regroup([noise(3)], RATE)
    found = last(streaming.measure(stub, pieces, RATE))

    assert list(found.computing) == [0.5, 2.0, 0.5, 0.5]
    # the last chunk is empty: the third second is over when it comes
    assert list(found.delay) == [0.5, 2.0, 1.5, 2.0]
    assert found.real_time_factor == pytest.approx(3.5 / 3)


def test_a_trend_is_told_from_chance(streaming):
    seconds = np.arange(0, 3600, 10)
    rng = np.random.default_rng(0)
    spread = rng.standard_normal(len(seconds))

    found = streaming.trend(seconds, 1000 + 100 * seconds / 3600 + spread)
    assert found.slope == pytest.approx(100, abs=3 * found.error)
    assert 0 < found.error < 2
    assert found.verdict == "grows"

    slow = streaming.trend(seconds, 1000 + 5 * seconds / 3600 + spread)
    assert slow.verdict == "grows, below 1 %"
    assert streaming.trend(seconds, 1000 + spread).verdict == "steady"
    assert streaming.trend(seconds, 1000 + 900 * spread).verdict == "undecided"
    assert streaming.trend(seconds, np.full(len(seconds), 7)).verdict == "steady"
    assert streaming.trend(seconds, 1000 - 100 * seconds / 3600).verdict == "undecided"
    assert streaming.trend(seconds[:2], spread[:2]) is None


@pytest.fixture
def test_set(tmp_path):
    folder = tmp_path / "test"
    folder.mkdir()
    soundfile.write(folder / "a.wav", noise(1), RATE)
    (folder / "wav.scp").write_text(f"a {folder}/a.wav\n")
    (folder / "text").write_text("a ab cd\n")
    return folder


@pytest.fixture
def run(streaming, test_set, tmp_path, monkeypatch):
    """Return a function that runs the command here."""

    def command(files, *more):
        names = ("--config", "--asr_train_config", "--asr_model_file")
        options = [value for pair in zip(names, files, strict=True) for value in pair]
        options += ["--test_set", test_set, "--output_dir", tmp_path / "out", *more]
        monkeypatch.setattr("sys.argv", ["streaming.py", *map(str, options)])
        # it would be for all tests after this one
        monkeypatch.setattr("logging.disable", lambda level: None)
        return streaming.main()

    return command


def test_the_command_reports(run, write, tmp_path, capsys):
    pytest.importorskip("jiwer")
    files = write()

    assert run(files, "--seconds", 6, "--decoder_conf", "chunk_size=4") == 0

    text = (tmp_path / "out" / "stream.md").read_text()
    facts = json.loads((tmp_path / "out" / "stream.json").read_text())
    assert text in capsys.readouterr().out
    assert (tmp_path / "out" / "stream.png").read_bytes().startswith(b"\x89PNG")
    assert "'chunk_size': 4" in text
    assert "A chunk is 128 ms; what its last 64 ms say" in text
    assert facts["words"] == 2 * facts["utterances"] == 2 * len(facts["said"]) >= 4
    assert facts["word_errors"] > 0
    assert f"| {facts['words']} | {facts['word_errors']} |" in text
    assert len(facts["computing"]) == int(facts["stream_seconds"] // 0.128) + 1
    assert facts["stream_seconds"] >= 6.0
    total = sum(facts["computing"])
    assert facts["real_time_factor"] == pytest.approx(
        total / facts["stream_seconds"], rel=1e-3
    )
    median, high, most = facts["computing_seconds"]
    assert 0 < median <= high <= most == pytest.approx(max(facts["computing"]), 1e-3)
    assert facts["memory"].keys() == set(MEMORY)
    assert facts["memory"]["resident"]["most"] > 1e8
    assert len(re.findall(r"^\| .* \|$", text, re.MULTILINE)) >= 11


@pytest.mark.parametrize(
    ("decode", "parts", "message"),
    [
        ("beam_size: 2\n", {}, "decode.yaml has no `streaming: true`"),
        (
            "streaming: true\nbeam_search_config: {search_type: alsd}\n",
            {},
            "alsd needs whole utterances",
        ),
        ("streaming: true\ndecoding_window: 64\n", {}, "the least is 128"),
        ("streaming: true\n", {"frontend_conf": {"fs": "8k"}}, "not 8000 Hz"),
        (
            "streaming: true\n",
            {"main_conf": {"dynamic_chunk_training": False}},
            "was not trained for streaming",
        ),
        ("streeming: true\n", {}, "unrecognized arguments"),
    ],
)
def test_says_in_one_line_why_there_is_no_stream(
    run, write, tmp_path, capsys, decode, parts, message
):
    status = run(write(decode, **parts), "--seconds", 1)

    error = capsys.readouterr().err
    assert status == 1
    assert error.startswith("streaming.py: error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "out").exists()
