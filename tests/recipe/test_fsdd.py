"""egs/fsdd: the archive, the strings put together from it, and bad data."""

import errno
import io
import os
import subprocess
import sys
import tarfile
import wave
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "egs" / "fsdd" / "asr_transducer1"
# The whole corpus, in a folder beside the checkout.
REAL = ROOT.parent / "shared" / "data" / "fsdd.tar.gz"
SPEAKERS = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")
PITCH = dict(zip(SPEAKERS, range(150, 450, 50), strict=True))


@pytest.fixture(scope="module")
def fsdd(import_from):
    """The modules of egs/fsdd."""
    pytest.importorskip("scipy")
    pytest.importorskip("soundfile")
    return import_from(RECIPE / "local", "prepare")


def recording(values, rate=8000, channels=1):
    file = io.BytesIO()
    with wave.open(file, "wb") as sink:
        sink.setparams((channels, 2, rate, 0, "NONE", ""))
        sink.writeframes(np.asarray(values, dtype="<i2").tobytes())
    return file.getvalue()


def pack(path, members):
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def corpus_files():
    """The name and content of every recording: a hum with a little noise."""
    noise, files = np.random.default_rng(0), {}
    for speaker, pitch in PITCH.items():
        for number in range(500):
            digit, index = divmod(number, 50)
            time = np.arange(450 + 20 * digit + index) / 8000
            hum = 3000 * np.sin(2 * np.pi * pitch * time) * np.hanning(len(time))
            samples = hum + noise.normal(0, 30, len(time)) + 200
            files[f"{digit}_{speaker}_{index}.wav"] = recording(samples)
    return files


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    members = {f"recordings/{name}": data for name, data in corpus_files().items()}
    return pack(tmp_path_factory.mktemp("archive") / "fsdd.tar.gz", members)


@pytest.fixture(scope="module")
def prepared(fsdd, archive, tmp_path_factory):
    """The folder of a division, and what was listed."""
    datadir = tmp_path_factory.mktemp("data") / "division"
    return datadir, fsdd.prepare(
        datadir, "theo", "yweweler", archive, rounds=1, single_rounds=0
    )


@pytest.fixture
def changed(prepared):
    """Return a function that changes an unpacked recording for one test."""
    folder, before = prepared[0].parent / "corpus" / "recordings", []

    def change(name, content):
        path = folder / name
        before.append((path, path.read_bytes()))
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        return folder

    yield change
    for path, content in before:
        path.write_bytes(content)


def read(path):
    return dict(line.split(" ", 1) for line in path.read_text().splitlines())


def test_no_speaker_is_in_two_sets(prepared):
    datadir, items = prepared

    speakers = {
        name: {item.utt_id.split("-")[0] for item in listed}
        for name, listed in items.items()
    }
    assert speakers == {
        "train": {"george", "jackson", "lucas", "nicolas"},
        "dev": {"yweweler"},
        "test": {"theo"},
    }
    for name, listed in items.items():
        names = [item.utt_id for item in listed]
        assert names == sorted(names)
        for file in ("wav.scp", "text", "utt2dur"):
            assert list(read(datadir / name / file)) == names
    assert {path.stem for path in (datadir / "wav").iterdir()} == {
        item.utt_id for listed in items.values() for item in listed
    }


def test_each_speaker_is_left_out_once(fsdd):
    for test, dev in zip(SPEAKERS, SPEAKERS[1:] + SPEAKERS[:1], strict=True):
        sets = fsdd.division(test, dev)

        assert sets["test"] == (test,)
        assert sets["dev"] == (dev,)
        assert sorted(sets["train"] + (test, dev)) == list(SPEAKERS)


def test_every_digit_comes_equally_often_in_strings_of_3_to_8(fsdd, prepared):
    _, items = prepared

    for name, speakers in {"train": 4, "dev": 1, "test": 1}.items():
        texts = [item.text.split() for item in items[name]]
        assert len(texts) == 91 * speakers
        words = Counter(word for text in texts for word in text)
        assert words == dict.fromkeys(fsdd.corpus.WORDS, 50 * speakers)
        lengths = Counter(map(len, texts))
        assert lengths == {
            length: (15 + (length == 5)) * speakers for length in range(3, 9)
        }


@pytest.mark.parametrize("perturbed", [False, True])
def test_a_seed_decides_every_byte(fsdd, prepared, perturbed):
    folder = prepared[0].parent / "corpus" / "recordings"
    recordings = fsdd.corpus.read_speaker(folder, "lucas")

    def strings(seed):
        rng = np.random.default_rng(seed)
        for samples, text in fsdd.compose(recordings, fsdd.LENGTHS, rng, perturbed):
            yield fsdd.wav(samples), text

    found, again, other = ([*strings(seed)] for seed in (5, 5, 6))

    assert found == again
    assert all(one != another for one, another in zip(found, other, strict=True))


def test_strings_do_not_depend_on_the_division(fsdd, prepared, archive):
    datadir, items = prepared
    other = datadir.with_name("other_division")

    found = fsdd.prepare(other, "george", "jackson", archive, rounds=1, single_rounds=0)

    assert [item.utt_id for item in found["test"]] == [
        item.utt_id for item in items["train"] if item.utt_id.startswith("george-00-")
    ]
    for item in found["test"]:
        assert item.path.read_bytes() == (datadir / "wav" / item.path.name).read_bytes()


def test_strings_are_8_khz_mono_equally_loud_and_as_long_as_listed(prepared):
    _, items = prepared

    for listed in items.values():
        for item in listed:
            with wave.open(str(item.path)) as audio:
                assert audio.getparams()[:3] == (1, 2, 8000)
                assert audio.getnframes() == pytest.approx(8000 * item.seconds)
                samples = np.frombuffer(audio.readframes(-1), dtype="<i2")
            assert np.abs(samples.astype(int)).max() == pytest.approx(16384, abs=1)


@pytest.mark.parametrize(("rounds", "single_rounds"), [(1, 0), (2, 2), (0, 1)])
def test_rounds_of_strings_and_of_single_digits_are_perturbed_but_for_the_first(
    fsdd, tmp_path, monkeypatch, rounds, single_rounds
):
    recordings = {"lucas": [fsdd.corpus.Recording(3, HUM / 32768)] * 500}
    calls = []

    def compose(recordings, lengths, rng, perturbed):
        calls.append((max(lengths), perturbed))
        return []

    monkeypatch.setattr(fsdd, "compose", compose)

    sets = {"train": ("lucas",), "test": ("lucas",)}
    fsdd.write_audio(recordings, sets, tmp_path / "wav", 0, rounds, single_rounds)

    lengths = [8] * rounds + [1] * single_rounds
    train = [(length, number > 0) for number, length in enumerate(lengths)]
    assert calls == [*train, (8, False)]


def test_a_round_of_single_digits_has_each_recording_once(fsdd):
    recordings = [fsdd.corpus.Recording(3, np.array([n])) for n in range(500)]

    strings = fsdd.draw_strings(recordings, fsdd.SINGLE, np.random.default_rng(0))

    assert {len(string) for string in strings} == {1}
    assert sorted(int(string[0].samples[0]) for string in strings) == [*range(500)]


def test_a_perturbed_string_has_a_speed_of_its_own(fsdd):
    hum = np.sin(2 * np.pi * 400 * np.arange(2000) / 8000) * np.hanning(2000)
    recordings = [fsdd.corpus.Recording(3, hum)] * 500

    def pitches(is_perturbed):
        rng = np.random.default_rng(0)
        for samples, _ in fsdd.compose(recordings, fsdd.LENGTHS, rng, is_perturbed):
            spectrum = np.abs(np.fft.rfft(samples, 65536))
            yield np.argmax(spectrum) / 65536 * 8000 / 400

    assert np.ptp([*pitches(False)]) < 0.03
    speeds = [*pitches(True)]
    assert 0.79 < min(speeds) < 0.85 < 1.15 < max(speeds) < 1.23


def test_pauses_hold_noise_as_loud_as_the_quietest_of_the_recordings(fsdd):
    rng = np.random.default_rng(3)
    loud = [np.concatenate([rng.normal(0, s, 800) for s in (0.01, 0.3)]) for _ in "ab"]

    samples = fsdd.join(loud, np.random.default_rng(4))

    pauses = np.random.default_rng(4)
    first = round(pauses.uniform(0.1, 0.4) * 8000)
    between = round(pauses.uniform(0.05, 0.6) * 8000)
    last = round(pauses.uniform(0.1, 0.4) * 8000)
    assert len(samples) == first + between + last + 3200
    places = (slice(0, first), slice(first + 1600, first + 1600 + between))
    for place in places:
        assert 0.005 < np.sqrt(np.mean(samples[place] ** 2)) < 0.015
        assert (samples[place] != 0).all()
    # the fades are 5 ms; in between, a recording is as it was
    inside = slice(first + 40, first + 1560)
    np.testing.assert_array_equal(samples[inside], loud[0][40:1560])


def test_faster_audio_is_shorter_and_higher(fsdd):
    hum = np.sin(2 * np.pi * 400 * np.arange(8000) / 8000)

    faster = fsdd.perturbation.change_speed(hum, 125)

    assert len(faster) == 6400
    assert np.argmax(np.abs(np.fft.rfft(faster))) * 8000 / 6400 == pytest.approx(500)


def test_noise_stays_in_its_range(fsdd):
    hum = 0.1 * np.sin(np.arange(16000))

    found = []
    for seed in range(40):
        noise = fsdd.perturbation.add_noise(hum, np.random.default_rng(seed)) - hum
        found.append(10 * np.log10(np.mean(hum**2) / np.mean(noise**2)))

    assert 10 <= min(found) < 15 < 35 < max(found) <= 40


def test_another_microphone_changes_the_spectrum_and_not_the_time(fsdd):
    click = np.zeros(4001)
    click[2000] = 1.0

    found = fsdd.perturbation.change_channel(click, np.random.default_rng(0))

    assert np.argmax(np.abs(found)) == 2000
    gain = 20 * np.log10(np.abs(np.fft.rfft(found)))
    assert np.ptp(gain) > 3
    assert np.abs(np.diff(gain)).max() < 0.1


WAV = "7_lucas_31.wav"
HUM = 1000 * np.sin(np.arange(800))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "lucas has 49 recordings of 7 in .*; FSDD has 50"),
        (b"", "7_lucas_31 has unreadable audio"),
        (recording([]), "7_lucas_31 has no frames in its audio"),
        (recording(HUM)[:-100], "has 1544 of the 1644 bytes that the header of"),
        (recording(HUM, rate=16000), "7_lucas_31 is at 16000 Hz, not 8000 Hz"),
        (recording(HUM, channels=2), "7_lucas_31 has 2 channels, not one"),
        (recording(0 * HUM + 5), "7_lucas_31 is silent, or too short"),
        (recording(HUM[:100]), r"too short for a digit \(100 samples\)"),
    ],
)
def test_says_what_is_wrong_with_a_recording(fsdd, changed, content, message):
    folder = changed(WAV, content)

    with pytest.raises(fsdd.RecipeError, match=message):
        fsdd.corpus.read_speaker(folder, "lucas")


def test_recordings_that_are_missing_are_told_before_anything_is_written(
    fsdd, tmp_path
):
    archive = pack(tmp_path / "one.tar.gz", {"recordings/0_george_0.wav": b"RIFF"})

    with pytest.raises(fsdd.RecipeError, match="george has 1 recordings of 0 in "):
        fsdd.prepare(tmp_path / "data" / "division", "theo", "lucas", archive)
    with pytest.raises(fsdd.RecipeError, match="lucas has 0 recordings of 0 in "):
        fsdd.corpus.read_speaker(tmp_path / "data" / "corpus" / "recordings", "lucas")

    assert not (tmp_path / "data" / "division").exists()


@pytest.mark.parametrize(
    ("test_speaker", "dev_speaker", "message"),
    [
        ("ann", "theo", "FSDD has no speaker ann, but george, "),
        ("theo", "theo", "theo cannot be the dev and the test speaker"),
    ],
)
def test_speakers_are_checked(fsdd, tmp_path, test_speaker, dev_speaker, message):
    with pytest.raises(fsdd.RecipeError, match=message):
        fsdd.prepare(tmp_path / "division", test_speaker, dev_speaker)


def test_githubs_archive_is_downloaded_once(fsdd, tmp_path, monkeypatch):
    top = "free-spoken-digit-dataset-1.0.10"
    asked = []

    def download(urls, target):
        asked.extend(urls)
        recording = {f"{top}/recordings/0_george_0.wav": b"RIFF"}
        pack(target, {f"{top}/README.md": b"", **recording})

    monkeypatch.setattr(fsdd.corpus.archives, "download", download)

    folder = fsdd.corpus.fetch(tmp_path)

    assert fsdd.corpus.fetch(tmp_path) == folder
    assert os.listdir(folder) == ["0_george_0.wav"]
    (url,) = asked
    assert url.startswith("https://github.com/Jakobovski/free-spoken-digit-dataset/")
    assert url.endswith("/v1.0.10.tar.gz")


def prepare_py(monkeypatch, fsdd, datadir, archive):
    options = ["--test_speaker", "theo", "--dev_speaker", "lucas", "--rounds", "1"]
    options += ["--single_rounds", "0"]
    files = ["--datadir", str(datadir), "--archive", str(archive)]
    monkeypatch.setattr(sys, "argv", ["prepare.py", *options, *files])
    return fsdd.main()


@pytest.mark.parametrize("kind", ["cut short", "another", "no archive"])
def test_a_useless_archive_is_refused_in_one_line(
    fsdd, archive, tmp_path, capsys, monkeypatch, kind
):
    given = tmp_path / "given.tar.gz"
    if kind == "another":
        pack(given, {"an4/README": b""})
    elif kind == "cut short":
        given.write_bytes(archive.read_bytes()[:100_000])
    else:
        given.write_bytes(b"<html>")

    assert prepare_py(monkeypatch, fsdd, tmp_path / "data" / "division", given) == 1

    said = capsys.readouterr().err
    message = "is not an archive of FSDD: it has no recordings/0_george_0.wav"
    wanted = message if kind == "another" else "is broken: "
    assert said.startswith(f"prepare.py: error: {given} {wanted}")
    assert said.count("\n") == 1
    assert not (tmp_path / "data").exists()


def test_a_full_disk_leaves_nothing_half_written(fsdd, prepared, monkeypatch):
    datadir, _ = prepared
    kept = sorted(os.listdir(datadir / "wav"))
    recordings = {"theo": [fsdd.corpus.Recording(3, HUM / 32768)] * 500}
    encode, calls = fsdd.wav, []

    def full(samples):
        calls.append(samples)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return encode(samples)

    monkeypatch.setattr(fsdd, "wav", full)

    message = f"^no space left on the device to write {datadir / 'wav'}$"
    with pytest.raises(fsdd.RecipeError, match=message):
        fsdd.write_audio(recordings, {"test": ("theo",)}, datadir / "wav", 0, 1, 0)

    assert sorted(os.listdir(datadir / "wav")) == kept
    assert not any(name.startswith(".") for name in os.listdir(datadir))


@pytest.mark.skipif(not REAL.is_file(), reason=f"FSDD is not at {REAL}")
def test_reads_the_real_recordings(fsdd, tmp_path):
    folder = fsdd.corpus.fetch(tmp_path, REAL)

    recordings = fsdd.corpus.read_speaker(folder, "theo")

    seconds = sum(len(recording.samples) for recording in recordings) / 8000
    assert seconds == pytest.approx(194.4, abs=0.1)
    assert len(list(folder.glob("*.wav"))) == 3000


def run_sh(*arguments):
    return subprocess.run(
        [RECIPE / "run.sh", "--python", sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--test_speaker", "ann"], "--test_speaker is one of george jackson"),
        (["--dev_speaker"], "option --dev_speaker needs a value"),
        (["--dev_speaker", "yweweler"], "yweweler cannot be both speakers"),
        (["--speaker", "theo"], "unknown option '--speaker'"),
    ],
)
def test_run_sh_says_what_is_wrong_with_an_option(arguments, message):
    result = run_sh(*arguments)

    assert result.returncode == 1
    assert result.stderr.startswith(f"run.sh: error: {message}")
    assert result.stderr.count("\n") == 1


def test_the_help_has_what_is_fsdds_own():
    result = run_sh("--help")

    assert result.returncode == 0
    assert "  --test_speaker NAME " in result.stdout
    assert "  --dev_speaker NAME " in result.stdout
    assert "Trains and decodes a transducer on FSDD" in result.stdout


@pytest.mark.slow
def test_a_division_has_a_folder_and_tokens_of_its_own(archive, tmp_path):
    options = ["--test_speaker", "lucas", "--archive", archive, "--datadir", tmp_path]

    result = run_sh(*options, "--stop_stage", "2")
    again = run_sh(*options, "--stop_stage", "2")

    assert result.returncode == 0, result.stderr
    assert "Stage 1: data: finished earlier" in again.stdout
    division = tmp_path / "test_lucas_dev_nicolas"
    assert sorted(tmp_path.iterdir()) == [tmp_path / "corpus", division]
    paths = [line.split()[1] for line in (division / "test/wav.scp").open()]
    assert len(paths) == 91
    assert all(path.startswith(f"{division}/wav/lucas-") for path in paths)
    tokens = (division / "token_list/char/tokens.txt").read_text().split()
    assert tokens[:2] + tokens[-1:] == ["<blank>", "<unk>", "<sos/eos>"]
    # 15 letters and the space
    assert len(tokens) == 19

    words = run_sh(*options, "--stop_stage", "2", "--token_type", "word")
    assert words.returncode == 0, words.stderr
    tokens = (division / "token_list/word/tokens.txt").read_text().split()
    assert tokens[:2] + tokens[-1:] == ["<blank>", "<unk>", "<sos/eos>"]
    assert len(tokens) == 13
