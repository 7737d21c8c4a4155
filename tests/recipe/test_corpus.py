"""egs/mini_an4/local/corpus.py: archive, unpacking, splits, and what bad data gets."""

import errno
import gzip
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

soundfile = pytest.importorskip("soundfile")

SETS = {
    "train": ["fash-an253-b", "fbbh-cen8-b", "mwhw-an152-b", "mwhw-cen8-b"],
    "valid": ["fash-an251-b"],
    "test": ["fcaw-cen8-b", "mmxg-cen8-b"],
}
TRAIN = "an4/etc/an4_train.transcription"
PREPARE = (
    Path(__file__).parents[2] / "egs" / "mini_an4" / "asr_transducer1/local/prepare.py"
)
AUDIO = "an4/wav/an4_clstk/fbbh/cen8-fbbh-b.sph"


@pytest.fixture
def corpus_dir(corpus, archive, tmp_path):
    return corpus.extract(archive, tmp_path / "corpus")


def everything_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def make_archive(path, members):
    """Write a gzipped tar file of names and contents."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def edit_transcription(corpus_dir, old, new):
    path = corpus_dir / TRAIN
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_splits_four_one_and_two_utterances(corpus, corpus_dir):
    splits = corpus.splits(corpus_dir)

    assert {name: [u.utt_id for u in split] for name, split in splits.items()} == SETS
    march = splits["train"][1]
    assert march.text == "MARCH THIRD NINETEEN TWENTY EIGHT"
    assert march.speaker == "fbbh"
    assert march.path == (corpus_dir / AUDIO).resolve()
    samples, rate = soundfile.read(march.path)
    assert (len(samples), rate) == (44800, 16000)
    assert np.abs(samples).max() > 0.1


@pytest.mark.skipif(
    importlib.util.find_spec("espnet3") is None, reason="needs ESPnet3's recipe"
)
def test_splits_as_the_builder_of_espnet3(
    corpus, corpus_dir, archive, tmp_path, monkeypatch
):
    builder = pytest.importorskip("egs3.mini_an4.esp2_asr.dataset.builder")
    # the builder's only outside help, played by cat: the manifests do not depend on it
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "sph2pipe").write_text('#!/bin/sh\nfor file; do :; done\ncat "$file"\n')
    (tools / "sph2pipe").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    shutil.copy(archive, recipe)
    theirs = builder.MiniAn4Builder()
    theirs.prepare_source(recipe)
    theirs.build(recipe)

    for name, utterances in corpus.splits(corpus_dir).items():
        lines = (recipe / "data" / "manifest" / f"{name}.tsv").read_text().splitlines()
        fields = [line.split("\t") for line in lines]
        assert [(u.utt_id, u.text) for u in utterances] == [
            (f[0], f[2]) for f in fields
        ]
        for utterance, (_, wav, _) in zip(utterances, fields, strict=True):
            assert Path(wav).read_bytes() == utterance.path.read_bytes()


def broken(content, how):
    if how == "cut short":
        return content[: len(content) // 2]
    if how == "without its checksum":
        return content[:-8]
    if how == "damaged":
        middle = len(content) // 2
        return (
            content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]
        )
    if how == "no gzip":
        return gzip.decompress(content)
    return b""


BROKEN = ["cut short", "without its checksum", "damaged", "no gzip", "empty"]


@pytest.mark.parametrize("how", BROKEN)
def test_refuses_a_broken_archive_and_writes_nothing(corpus, archive, tmp_path, how):
    bad = tmp_path / "bad.tar.gz"
    bad.write_bytes(broken(archive.read_bytes(), how))

    with pytest.raises(corpus.RecipeError, match=r"bad\.tar\.gz is broken"):
        corpus.fetch_archive(tmp_path / "data", bad)

    assert everything_in(tmp_path / "data") == []


@pytest.mark.parametrize("how", BROKEN)
def test_replaces_a_broken_archive_of_an_earlier_run(
    corpus, archive, tmp_path, monkeypatch, how
):
    whole = archive.read_bytes()
    (tmp_path / "downloads.tar.gz").write_bytes(broken(whole, how))
    monkeypatch.setattr(corpus, "_installed_archive", lambda: archive)

    assert corpus.fetch_archive(tmp_path).read_bytes() == whole
    assert everything_in(tmp_path) == ["downloads.tar.gz"]


def test_keeps_a_whole_archive(corpus, archive, tmp_path, monkeypatch):
    shutil.copy(archive, tmp_path)
    before = (tmp_path / "downloads.tar.gz").stat()
    monkeypatch.setattr(corpus, "_installed_archive", lambda: pytest.fail("looked"))

    after = corpus.fetch_archive(tmp_path).stat()

    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_takes_the_archive_out_of_a_wheel(corpus, archive, tmp_path):
    wheel = tmp_path / "espnet.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.write(archive, "egs3/mini_an4/esp2_asr/downloads.tar.gz")

    fetched = corpus.fetch_archive(tmp_path / "data", wheel)

    assert fetched.read_bytes() == archive.read_bytes()
    assert everything_in(tmp_path / "data") == ["downloads.tar.gz"]


def test_names_the_wheel_that_lacks_the_archive(corpus, tmp_path):
    wheel = tmp_path / "espnet-202511.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("espnet2/__init__.py", "")

    with pytest.raises(corpus.RecipeError, match=r"espnet-202511\.whl has no egs3/"):
        corpus.fetch_archive(tmp_path / "data", wheel)

    assert everything_in(tmp_path / "data") == []


def test_names_what_another_archive_lacks(corpus, tmp_path):
    other = make_archive(tmp_path / "other.tar.gz", {"downloads/a": b"a"})

    with pytest.raises(corpus.RecipeError, match=r"not mini_an4.*an4_train\.transcri"):
        corpus.fetch_archive(tmp_path / "data", other)


def test_a_failed_download_says_what_pip_said(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_installed_archive", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    with pytest.raises(corpus.RecipeError, match=r"--archive.*espnet==202611"):
        corpus.fetch_archive(tmp_path)

    assert everything_in(tmp_path) == []


def test_a_second_unpacking_leaves_the_files_alone(corpus, archive, corpus_dir):
    before = {path: path.stat().st_ino for path in corpus_dir.rglob("*")}
    assert len(before) > 20

    corpus.extract(archive, corpus_dir)

    assert {path: path.stat().st_ino for path in corpus_dir.rglob("*")} == before


@pytest.mark.parametrize("harm", ["missing", "cut short", "overwritten", "half"])
def test_unpacks_again_what_is_not_whole(corpus, archive, corpus_dir, harm):
    audio = corpus_dir / AUDIO
    content = audio.read_bytes()
    if harm == "missing":
        audio.unlink()
    elif harm == "cut short":
        audio.write_bytes(content[:-2])
    elif harm == "overwritten":
        audio.write_bytes(content[:-2] + b"\1\1")
    else:  # killed while it unpacked
        corpus_dir.rename(corpus_dir.with_name(".corpus.partial"))
        (corpus_dir.with_name(".corpus.partial") / TRAIN).unlink()

    corpus.extract(archive, corpus_dir)

    assert audio.read_bytes() == content
    assert (corpus_dir / TRAIN).is_file()
    assert [path.name for path in corpus_dir.parent.iterdir()] == ["corpus"]


@pytest.mark.parametrize("name", ["downloads/../../evil", "../evil"])
def test_unpacks_nothing_outside_its_folder(corpus, archive, tmp_path, name):
    with tarfile.open(archive) as tar:
        members = {m.name: tar.extractfile(m).read() for m in tar if m.isfile()}
    root = tmp_path / "root"
    root.mkdir()
    bad = make_archive(tmp_path / "bad.tar.gz", {**members, name: b"evil"})

    with pytest.raises(corpus.RecipeError, match="cannot be unpacked"):
        corpus.extract(bad, root / "deep" / "corpus")

    assert everything_in(root) == ["deep"]
    assert not list(tmp_path.rglob("evil"))


def test_names_the_utterance_without_audio(corpus, corpus_dir):
    (corpus_dir / AUDIO).unlink()

    with pytest.raises(corpus.RecipeError, match=r"fbbh-cen8-b has no audio.*missing"):
        corpus.splits(corpus_dir)


def write_audio(path, kind):
    noise = np.random.default_rng(0).integers(-9999, 9999, 16000).astype("int16")
    if kind == "unreadable":
        path.write_bytes(b"no audio at all" * 100)
    elif kind == "cut short":
        path.write_bytes(path.read_bytes()[:40000])
    elif kind == "at 8000 Hz":
        soundfile.write(path, noise, 8000, format="WAV")
    elif kind == "no frames":
        soundfile.write(path, noise[:0], 16000, format="WAV")
    else:
        soundfile.write(path, noise.reshape(-1, 2), 16000, format="WAV")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("unreadable", "unreadable audio"),
        ("cut short", "19488 of the 44800 frames"),
        ("at 8000 Hz", "at 8000 Hz, not 16000 Hz"),
        ("no frames", "no frames"),
        ("stereo", "2 channels"),
    ],
)
def test_names_the_utterance_with_bad_audio(corpus, corpus_dir, kind, message):
    write_audio(corpus_dir / AUDIO, kind)

    with pytest.raises(corpus.RecipeError, match=f"fbbh-cen8-b .*{message}"):
        corpus.splits(corpus_dir)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (
            "<s> </s> (an152-mwhw-b)",
            "line 4: utterance mwhw-an152-b has an empty trans",
        ),
        ("(an152-mwhw-b)", "line 4: utterance mwhw-an152-b has an empty transcript"),
        ("<s> START </s>", "line 4: malformed transcript line '<s> START </s>'"),
        ("<s> START </s> (an152-mwhw)", "line 4: malformed transcript line"),
        (
            "<s> GO </s> (an253-fash-b)",
            "line 4: utterance fash-an253-b is listed twice",
        ),
    ],
)
def test_names_the_bad_line_of_a_transcription(corpus, corpus_dir, new, message):
    edit_transcription(corpus_dir, "<s> START </s> (an152-mwhw-b)", new)

    with pytest.raises(corpus.RecipeError, match=message):
        corpus.splits(corpus_dir)


def test_needs_an_utterance_to_train_on(corpus, corpus_dir):
    (corpus_dir / TRAIN).write_text("<s> YES </s> (an251-fash-b)\n")

    with pytest.raises(corpus.RecipeError, match="no utterance for the train set"):
        corpus.splits(corpus_dir)


@pytest.fixture
def small_device(tmp_path):
    """A file system of 250 kB: the archive does not fit."""
    folder = tmp_path / "device"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=250k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        pytest.skip("only root can mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_device_leaves_nothing_behind(archive, small_device):
    result = subprocess.run(
        [
            sys.executable,
            PREPARE,
            *("--datadir", small_device / "data"),
            *("--archive", archive),
        ],
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 1
    target = small_device / "data" / "downloads.tar.gz"
    assert result.stderr == (
        f"prepare.py: error: no space left on the device to write {target}\n"
    )
    assert everything_in(small_device) == ["data"]


def test_a_device_that_fills_while_unpacking_keeps_the_earlier_corpus_out(
    corpus, archive, tmp_path, monkeypatch
):
    written = []
    copy = tarfile.copyfileobj

    def fill_up(source, target, length=None, *args, **kwargs):
        written.append(length)
        if len(written) == 5:
            target.write(source.read(100))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        copy(source, target, length, *args, **kwargs)

    monkeypatch.setattr(tarfile, "copyfileobj", fill_up)
    target = tmp_path / "corpus"

    with pytest.raises(corpus.RecipeError, match=f"no space left .* {target}$"):
        corpus.extract(archive, target)

    assert len(written) == 5
    assert everything_in(tmp_path) == []
