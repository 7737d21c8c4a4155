"""egs/an4: archives of audio and of cepstra, splits, features, and bad data."""

import io
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
AN4 = ROOT / "egs" / "an4"
# The cepstra of the whole corpus, in a folder beside the checkout.
REAL = ROOT.parent / "shared" / "data" / "an4_mfcc.tar.gz"
WORDS = ("YES", "NO", "ENTER FIVE SIX", "R U B OUT")


@pytest.fixture(scope="module")
def an4(import_from):
    """The modules of egs/an4."""
    return import_from(AN4 / "asr_transducer1" / "local", "prepare", AN4 / "local")


def transcriptions():
    """The text of each transcription, and the place of each recording."""
    texts, recordings = {}, []
    for name, folder, count in (
        ("train", "an4_clstk", 948),
        ("test", "an4test_clstk", 130),
    ):
        lines = []
        for number in range(count):
            # so that the order of the file is not that of the names
            speaker = f"m{(7 * number) % 20:02d}"
            source = f"an{number}-{speaker}-b"
            words = WORDS[number % len(WORDS)]
            marked = f"<s> {words} </s>" if name == "test" else words
            lines.append(f"{marked} ({source})\n")
            recordings.append(f"{folder}/{speaker}/{source}")
        texts[f"an4/etc/an4_{name}.transcription"] = "".join(lines).encode()
    return texts, recordings


def mfc(cepstra):
    values = np.asarray(cepstra, dtype=">f4").tobytes()
    return (len(values) // 4).to_bytes(4, "big") + values


def sph(samples):
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, samples, 16000, format="NIST", subtype="PCM_16")
    return file.getvalue()


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """An archive of each kind."""
    noise, folder = np.random.default_rng(0), tmp_path_factory.mktemp("archives")

    def make(kind):
        members, recordings = transcriptions()
        for number, name in enumerate(recordings):
            if kind == "cepstra":
                content = mfc(noise.normal(size=(5 + number % 7, 13)))
                members[f"an4/feat/{name}.mfc"] = content
            else:
                content = sph(noise.normal(size=160 + number % 7) / 10)
                members[f"an4/wav/{name}.sph"] = content
        path = folder / f"{kind}.tar.gz"
        with tarfile.open(path, "w:gz", compresslevel=1) as tar:
            for name, content in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        return path

    return {kind: make(kind) for kind in ("cepstra", "audio")}


@pytest.fixture(scope="module")
def prepared(an4, archives, tmp_path_factory):
    """The data directory of each kind, and what was listed."""
    found = {}
    for kind, archive in archives.items():
        datadir = tmp_path_factory.mktemp(kind)
        found[kind] = datadir, an4.prepare(datadir, archive)
    return found


@pytest.fixture
def changed(prepared):
    """Return a function that changes a file of an unpacked corpus for one test."""
    before = []

    def change(kind, name, content):
        path = prepared[kind][0] / "corpus" / name
        before.append((path, path.read_bytes()))
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        return prepared[kind][0] / "corpus"

    yield change
    for path, content in before:
        path.write_bytes(content)


def read(path):
    return dict(line.split(" ", 1) for line in path.read_text().splitlines())


def test_the_first_100_names_are_for_development(prepared):
    datadir, items = prepared["cepstra"]

    sizes = {name: len(listed) for name, listed in items.items()}
    assert sizes == {"train_nodev": 848, "train_dev": 100, "test": 130}
    dev = list(read(datadir / "train_dev" / "text"))
    rest = list(read(datadir / "train_nodev" / "text"))
    assert dev + rest == sorted(dev + rest)
    assert len({*dev, *rest}) == 948
    assert read(datadir / "test" / "text")["m14-an2-b"] == "ENTER FIVE SIX"
    for name in sizes:
        names = list(read(datadir / name / "text"))
        assert list(read(datadir / name / "feats.scp")) == names
        assert list(read(datadir / name / "utt2dur")) == names
        assert (datadir / name / "feats_dim").read_text() == "40\n"
        assert not (datadir / name / "wav.scp").exists()
    assert float(read(datadir / "test" / "utt2dur")["m14-an2-b"]) == pytest.approx(
        0.01 * (5 + 950 % 7)
    )


def test_audio_is_listed_as_it_is(prepared):
    soundfile = pytest.importorskip("soundfile")
    datadir, items = prepared["audio"]

    assert [len(listed) for listed in items.values()] == [848, 100, 130]
    paths = read(datadir / "test" / "wav.scp")
    samples, rate = soundfile.read(paths["m14-an2-b"])
    assert (len(samples), rate) == (160 + 950 % 7, 16000)
    assert float(read(datadir / "test" / "utt2dur")["m14-an2-b"]) == pytest.approx(
        len(samples) / rate, abs=5e-4
    )
    assert not (datadir / "test" / "feats.scp").exists()


def test_features_are_the_spectrum_of_the_cepstra(an4):
    cepstra = np.random.default_rng(1).normal(size=(9, 13)) + 3

    found = an4.cepstra.features(cepstra)

    assert found.shape == (9, 40)
    assert found.dtype == np.float32
    # Sphinx's way: the mean over the filters of the energy times a cosine
    for order in range(13):
        again = sum(
            found[:, n] * np.cos(np.pi * order * (n + 0.5) / 40) / 40 for n in range(40)
        )
        np.testing.assert_allclose(again, cepstra[:, order], atol=1e-5)


RECORDING = "an4/feat/an4test_clstk/m14/an2-m14-b.mfc"
TRAIN = "an4/etc/an4_train.transcription"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (TRAIN, None, "cannot read the transcription .*an4_train"),
        (TRAIN, b"YES (an1-m01-b)\n", "lists 1 utterances; AN4 has 948 there"),
        (TRAIN, b"YES an1-m01-b\n", "line 1: malformed transcript line"),
        (TRAIN, b"(an1-m01-b)\n", "utterance m01-an1-b has an empty transcript"),
        (RECORDING, None, r"utterance m14-an2-b has no recording: .* is missing"),
        (RECORDING, b"", r"m14-an2-b: .* has 0 bytes .* declares 0 values"),
        (RECORDING, mfc(np.ones(26))[:-4], "has 100 bytes .* declares 26 values"),
        (RECORDING, mfc(np.ones(27)), "the 27 values of .* are no frames of 13"),
        (RECORDING, mfc(np.full(13, np.nan)), "values that are no numbers"),
    ],
)
def test_says_what_is_wrong_with_the_data(
    an4, changed, tmp_path, name, content, message
):
    corpus_dir = changed("cepstra", name, content)

    with pytest.raises(an4.RecipeError, match=message):
        an4.write_sets(corpus_dir, tmp_path)

    assert not (tmp_path / "test" / "text").exists()


def test_a_recording_at_another_rate_is_refused(an4, changed, tmp_path):
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, np.zeros(80), 8000, format="NIST", subtype="PCM_16")
    name = RECORDING.replace("feat", "wav").replace("mfc", "sph")

    with pytest.raises(an4.RecipeError, match="m14-an2-b is at 8000 Hz, not 16000"):
        an4.write_sets(changed("audio", name, file.getvalue()), tmp_path)


def test_another_archive_is_refused(an4, tmp_path):
    archive = tmp_path / "other.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("an4/README"))

    with pytest.raises(an4.RecipeError, match="not an archive of AN4: it has no an4/"):
        an4.prepare(tmp_path, archive)


def test_a_damaged_archive_is_refused_in_one_line(
    an4, archives, tmp_path, capsys, monkeypatch
):
    archive = tmp_path / "an4.tar.gz"
    content = archives["cepstra"].read_bytes()
    archive.write_bytes(content[: len(content) // 2])
    options = ["--datadir", str(tmp_path / "data"), "--archive", str(archive)]
    monkeypatch.setattr(sys, "argv", ["prepare.py", *options])

    assert an4.main() == 1

    said = capsys.readouterr().err
    assert said.startswith(f"prepare.py: error: {archive} is broken: ")
    assert said.count("\n") == 1


def test_a_broken_download_is_fetched_again_from_both_addresses(
    an4, archives, tmp_path, monkeypatch
):
    asked = []

    def download(urls, target):
        asked.append((urls, target))
        shutil.copy(archives["audio"], target)

    monkeypatch.setattr(an4.corpus.archives, "download", download)
    (tmp_path / "an4_sphere.tar.gz").write_bytes(b"broken")

    an4.corpus.fetch_archive(tmp_path)
    an4.corpus.fetch_archive(tmp_path)

    ((urls, target),) = asked
    assert target == tmp_path / "an4_sphere.tar.gz"
    assert [url.split("/")[2] for url in urls] == [
        "www.speech.cs.cmu.edu",
        "huggingface.co",
    ]
    assert all(url.endswith("/an4_sphere.tar.gz") for url in urls)


@pytest.mark.skipif(not REAL.is_file(), reason=f"AN4's cepstra are not at {REAL}")
def test_reads_the_whole_corpus(an4, tmp_path):
    items = an4.prepare(tmp_path, REAL)

    words = {
        name: sum(len(i.text.split()) for i in set_) for name, set_ in items.items()
    }
    assert words == {"train_nodev": 4851, "train_dev": 591, "test": 773}
    assert items["test"][0].text == "RUBOUT G M E F THREE NINE"
    assert np.load(items["test"][0].path).shape[1] == 40


@pytest.mark.slow
def test_run_sh_prepares_data_and_tokens_once(archives, tmp_path):
    command = [AN4 / "asr_transducer1/run.sh", "--python", sys.executable]
    command += ["--archive", archives["cepstra"], "--datadir", tmp_path / "data"]
    command += ["--expdir", tmp_path / "exp", "--stop_stage", "2"]

    first, again = (subprocess.check_output(command, text=True) for _ in range(2))

    assert "AN4: all stages together take" in first
    tokens = (tmp_path / "data/token_list/char/tokens.txt").read_text().split()
    letters = set("".join(WORDS).replace(" ", ""))
    assert set(tokens) == letters | {"<blank>", "<unk>", "<space>", "<sos/eos>"}
    for number in (1, 2):
        assert re.search(rf"Stage {number}: .*: finished earlier", again)
