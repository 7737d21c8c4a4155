"""The decoder on onnxruntime finds what ESPnet's search finds."""

import subprocess
import sys
import wave
import weakref

import numpy as np
import pytest
import soundfile
import torch
from espnet2.asr_transducer.beam_search_transducer import BeamSearchTransducer
from espnet2.bin.asr_transducer_inference import Speech2Text
from espnet2.text.build_tokenizer import build_tokenizer

from espnet_mega_bias.tools import onnx_decoder
from espnet_mega_bias.tools.experiment import load
from espnet_mega_bias.tools.onnx_decoder import Recognizer, main, read_speech, to_text
from espnet_mega_bias.tools.onnx_export import export
from tools.conftest import DECODER_CONF

_MADE = {}


@pytest.fixture
def exported(make_experiment, tmp_path_factory):
    """Experiment folder and directory of a model that goes beyond its window."""
    if not _MADE:
        folder = make_experiment(
            token_type="char", decoder_conf={**DECODER_CONF, "max_positions": 4}
        )
        (checkpoint,) = folder.glob("*.pth")
        state = torch.load(checkpoint, weights_only=True)
        # The search leaves a frame only once blanks win: a random network that says
        # labels without end would keep it there.
        state["joint_network.lin_out.bias"][0] += 4.0
        torch.save(state, checkpoint)

        directory = tmp_path_factory.mktemp("onnx") / "exported"
        export(load(folder), directory)
        _MADE.update(folder=folder, directory=directory)

    return _MADE["folder"], _MADE["directory"]


@pytest.fixture
def utterances():
    return [
        torch.randn(frames, 10).numpy() for frames in (7, 60, 41, 90, 33, 72, 55, 80)
    ]


@pytest.fixture
def encoded():
    """Encoder outputs that differ from frame to frame, for many labels."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(1, 1.0), (12, 1.0), (20, 2.0)]

    return [std * torch.randn(frames, 8, generator=generator) for frames, std in sizes]


def by_espnet(folder, beam_size, **search):
    speech2text = Speech2Text(
        folder / "config.yaml",
        folder / "valid.loss.ave.pth",
        beam_size=beam_size,
        beam_search_config=search,
    )

    def recognize(speech):
        (result,) = speech2text.hypotheses_to_results(speech2text(speech))

        return result

    return recognize


# --- search ------------------------------------------------------------------------


@pytest.mark.parametrize("beam_size", [1, 2, 5])
def test_tokens_text_and_score_are_those_of_espnets_search(
    beam_size, exported, utterances, assert_close_espnet
):
    folder, directory = exported
    espnet, ours = by_espnet(folder, beam_size), Recognizer(directory, beam_size)
    scores = set()

    for speech in utterances:
        text, tokens, _, hyp = espnet(speech)
        result = ours(speech)

        assert result.tokens == tokens
        assert result.text == text
        assert_close_espnet(torch.tensor(result.score), torch.tensor(hyp.score))
        assert tokens
        scores.add(result.score)

    assert len(scores) == len(utterances)


@pytest.mark.parametrize("beam_size", [1, 2])
@torch.no_grad()
def test_long_label_sequences_are_those_of_espnets_search(
    beam_size, exported, encoded, assert_close_espnet
):
    folder, directory = exported
    model = load(folder).build_model()
    espnet = BeamSearchTransducer(model.decoder, model.joint_network, beam_size)
    ours = Recognizer(directory, beam_size)
    longest = 0

    for sequence in encoded:
        (hyp,) = espnet(sequence)
        labels, score = ours.search(sequence.numpy())

        assert labels == hyp.yseq[1:]
        assert_close_espnet(torch.tensor(score), torch.tensor(hyp.score))
        longest = max(longest, len(labels))

    # Beyond the window.
    assert longest > 4


def test_scores_per_label_choose_as_espnets_do(exported, utterances):
    folder, directory = exported
    espnet = by_espnet(folder, 5, score_norm=True)
    ours = Recognizer(directory, 5, score_norm=True)
    plain = Recognizer(directory, 5)

    found = [ours(speech).tokens for speech in utterances]

    assert found == [espnet(speech)[1] for speech in utterances]
    assert found != [plain(speech).tokens for speech in utterances]


@pytest.fixture
def watched(exported, monkeypatch):
    """Recognizer, and the label sequences that its decoder was fed."""
    ours = Recognizer(exported[1], 2)
    step, fed = ours._step, []

    def watch(prefix):
        fed.append(tuple(prefix.labels()))
        step(prefix)

    monkeypatch.setattr(ours, "_step", watch)
    # All of them.
    monkeypatch.setattr(onnx_decoder, "_REMEMBERED", 1000)

    return ours, fed


def test_a_label_sequence_is_fed_once(watched, encoded):
    ours, fed = watched
    ours.search(encoded[2].numpy())

    assert len(fed) == len(set(fed)) > 20


def test_what_no_hypothesis_holds_is_forgotten(watched, encoded, monkeypatch):
    ours, fed = watched
    expected = ours.search(encoded[2].numpy())
    at_once = len(fed)
    step, alive, most = ours._step, weakref.WeakSet(), []

    def watch(prefix):
        alive.add(prefix)
        most.append(len(alive))
        step(prefix)

    monkeypatch.setattr(onnx_decoder, "_REMEMBERED", 2)
    monkeypatch.setattr(ours, "_step", watch)

    assert ours.search(encoded[2].numpy()) == expected
    # What is forgotten is fed again, and little is held at a time.
    assert len(fed) > at_once + 2
    assert max(most) < at_once


# --- alone -------------------------------------------------------------------------


def test_decode_py_runs_without_torch_and_without_this_package(
    exported, utterances, tmp_path
):
    folder, directory = exported
    paths = []

    for n, speech in enumerate(utterances[:3]):
        paths.append(tmp_path / f"utt{n}.npy")
        np.save(paths[-1], speech)

    code = (
        f"import sys; sys.path.insert(0, {str(directory)!r}); import decode; "
        "status = decode.main(sys.argv[1:]); "
        "print(sorted({'torch', 'espnet2', 'espnet_mega_bias'} & set(sys.modules)), "
        "file=sys.stderr); sys.exit(status)"
    )
    output = tmp_path / "hyp.txt"
    done = subprocess.run(
        [sys.executable, "-c", code, "--beam_size", "5", "--output", output, *paths],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "[]\n")

    espnet = by_espnet(folder, 5)
    expected = [
        f"utt{n} {espnet(speech)[0]}".rstrip()
        for n, speech in enumerate(utterances[:3])
    ]
    assert done.stdout.splitlines() == expected
    assert output.read_text().splitlines() == expected


def test_a_program_may_ask_for_the_parts(exported, utterances):
    _, directory = exported
    ours = Recognizer(str(directory), threads=2)
    encoded = ours.encode(utterances[1])

    assert encoded.shape == ((60 - 3) // 2 // 2, 8)
    assert ours.search(encoded)[1] == ours(utterances[1]).score


# --- what goes wrong ---------------------------------------------------------------


def save(path, array):
    np.save(path, array)

    return path


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((40, 9), r"features \(frames, 10\), got \(40, 9\)"),
        ((400,), r"features \(frames, 10\), got \(400,\)"),
        ((6, 10), "too short: 6 frames, but the model needs 7"),
    ],
)
def test_features_of_another_shape_are_refused(shape, said, exported):
    with pytest.raises(ValueError, match=said):
        Recognizer(exported[1])(np.zeros(shape))


def test_the_shortest_utterance_is_decoded(exported):
    assert Recognizer(exported[1])(np.zeros((7, 10))).score < 0.0


@pytest.mark.parametrize("beam_size", [0, 8])
def test_a_beam_out_of_range_is_refused(beam_size, exported):
    with pytest.raises(ValueError, match=f"between 1 and 7, .*, got {beam_size}"):
        Recognizer(exported[1], beam_size)


def test_each_error_is_one_line(exported, tmp_path, capsys):
    model = ["--model", str(exported[1])]
    good = str(save(tmp_path / "good.npy", np.zeros((30, 10))))
    short = str(save(tmp_path / "short.npy", np.zeros((3, 10))))
    bad, wav = tmp_path / "bad.npy", tmp_path / "speech.wav"
    bad.write_bytes(b"no array")
    wav.write_bytes(b"RIFF")
    taken = tmp_path / "taken.txt"
    taken.write_text("mine")
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in exported[1].iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / "joint.onnx").write_bytes(b"no graph")

    for arguments, said in [
        ([*model, str(tmp_path / "none.npy")], "none.npy"),
        ([*model, short], "short.npy: the utterance is too short: 3 frames"),
        ([*model, str(bad)], "bad.npy: "),
        ([*model, str(wav)], "the model takes features: .npy files"),
        ([*model, "--beam_size", "0", good], "beam_size must be between 1 and 7"),
        ([*model, "--output", str(taken), good], "taken.txt exists"),
        (["--model", str(tmp_path), good], "holds no exported model"),
        (["--model", str(broken), good], "joint.onnx cannot be loaded"),
    ]:
        assert main(arguments) == 1

        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("decode.py: error: ")
        assert said in err
        assert err.count("\n") == 1

    assert taken.read_text() == "mine"


def test_missing_onnxruntime_is_named(exported, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)

    assert main(["--model", str(exported[1]), "some.npy"]) == 1
    assert "pip install onnxruntime" in capsys.readouterr().err


# --- files of speech ---------------------------------------------------------------

AUDIO = {"kind": "audio", "sample_rate": 8000}


@pytest.fixture(params=["with soundfile", "without"])
def _readers(request, monkeypatch):
    if request.param == "without":
        monkeypatch.setitem(sys.modules, "soundfile", None)


@pytest.mark.usefixtures("_readers")
def test_a_wav_file_is_read_as_espnet_reads_it(tmp_path):
    path = tmp_path / "a.wav"
    written = np.array([0, 1, -1, 32767, -32768, 1234], dtype=np.int16)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", None))
        file.writeframes(written.tobytes())

    read = read_speech(path, AUDIO)

    assert read.dtype == np.float32
    assert np.array_equal(read, written / 32768.0)
    assert np.array_equal(read, soundfile.read(path, dtype="float32")[0])


@pytest.mark.usefixtures("_readers")
def test_audio_of_another_kind_is_refused(tmp_path):
    def wav(name, **options):
        soundfile.write(tmp_path / name, np.zeros((800, 1)), 8000, **options)

        return tmp_path / name

    with pytest.raises(ValueError, match=r"8000 samples a second, .* takes 16000"):
        read_speech(wav("a.wav"), {**AUDIO, "sample_rate": 16000})

    (tmp_path / "b.wav").write_bytes(b"RIFFnothing")

    with pytest.raises((ValueError, wave.Error, EOFError)):
        read_speech(tmp_path / "b.wav", AUDIO)


def test_24_bits_need_soundfile(tmp_path, monkeypatch):
    path = tmp_path / "a.wav"
    soundfile.write(path, np.full(80, 0.5), 8000, subtype="PCM_24")

    assert read_speech(path, AUDIO) == pytest.approx(0.5)

    monkeypatch.setitem(sys.modules, "soundfile", None)

    with pytest.raises(ValueError, match="24 bits a sample"):
        read_speech(path, AUDIO)


def test_volume_is_scaled_as_in_espnets_commands(tmp_path):
    path = save(tmp_path / "a.npy", np.array([0.1, -0.4, 0.2]))

    assert np.allclose(
        read_speech(path, {**AUDIO, "volume": 0.8}), np.array([0.2, -0.8, 0.4])
    )


# --- text --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["char", "word", "phn"])
def test_tokens_become_the_text_that_espnet_makes(kind):
    tokens = ["A", "<space>", "<unk>", "<space>", "B", "CD"]
    tokenizer = build_tokenizer(kind, g2p_type=None)

    assert to_text(tokens, kind) == tokenizer.tokens2text(tokens)
    assert to_text([], kind) == ""


def test_pieces_become_the_text_that_sentencepiece_makes(tmp_path):
    import sentencepiece

    words = ["ERASE", "RUBOUT", "ENTER", "SEVEN", "NINE", "FIVE", "GO", "YES", "STOP"]
    text = tmp_path / "text"
    text.write_text("".join(f"{a} {b} {a}\n" for a in words for b in words))
    sentencepiece.SentencePieceTrainer.Train(
        input=str(text),
        model_prefix=str(tmp_path / "bpe"),
        vocab_size=40,
        model_type="bpe",
        minloglevel=2,
    )
    tokenizer = build_tokenizer("bpe", str(tmp_path / "bpe.model"))
    processor = sentencepiece.SentencePieceProcessor(str(tmp_path / "bpe.model"))
    pieces = [processor.IdToPiece(n) for n in range(processor.GetPieceSize())]
    pieces = [piece for piece in pieces if piece not in ("<s>", "</s>")]

    chosen = [[pieces[n] for n in torch.randint(len(pieces), (8,))] for _ in range(200)]
    chosen += [[], ["<unk>"], ["<unk>", "<unk>"], ["\u2581"]]
    chosen += [["\u2581", *rest] for rest in chosen[:20]]
    chosen += [["\u2581", "\u2581", *rest] for rest in chosen[:20]]

    for tokens in chosen:
        assert to_text(tokens, "bpe") == tokenizer.tokens2text(tokens)
