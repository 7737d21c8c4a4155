"""Archives (.tar.gz) of a corpus: download, check and unpack."""

from __future__ import annotations

import gzip
import os
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath

from recipe.files import RecipeError, writing

BLOCK = 1 << 20
TIMEOUT = 30  # seconds without a byte


def member_path(name: str, strip: str = "") -> PurePosixPath:
    """Give a member's path without the leading folder `strip`."""
    path = PurePosixPath(name)
    return path.relative_to(strip) if strip and path.parts[:1] == (strip,) else path


def check_archive(
    path: Path, corpus: str, wanted: Collection[str], strip: str = ""
) -> None:
    """Read an archive to its end.

    Args:
        path: The archive.
        corpus: Name of what it should be, for the error.
        wanted: Members that it must have.
        strip: A leading folder that all members have, and `wanted` do not.

    Raises:
        RecipeError: If the file is cut short, damaged, no gzipped tar file, or lacks
            a member.
    """
    try:
        with gzip.open(path) as stream:  # compares length and CRC at the end
            while stream.read(BLOCK):
                pass
        with tarfile.open(path, "r:gz") as tar:
            names = {member_path(name, strip).as_posix() for name in tar.getnames()}
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as exc:
        raise RecipeError(f"{path} is broken: {exc}") from exc
    lacks = sorted(set(wanted) - names)
    if lacks:
        raise RecipeError(f"{path} is not {corpus}: it has no {', '.join(lacks)}")


def download(urls: Sequence[str], target: Path) -> None:
    """Fetch a file, from the first address that has it.

    What an interrupted download left beside `target` is gone on with.

    Args:
        urls: Addresses of the same file.
        target: Where it is put once it is complete.

    Raises:
        RecipeError: If no address gives it, or no space is left.
    """
    partial = target.with_name(f".{target.name}.download")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        failures = []
        for url in urls:
            try:
                _fetch(url, partial)
            # a full disk is an OSError too, but none of these
            except (urllib.error.URLError, TimeoutError, ConnectionError) as exc:
                failures.append(f"{url}: {exc}")
                continue
            os.replace(partial, target)
            return
    raise RecipeError(
        f"cannot download {target.name} ({'; '.join(failures)}); the same command "
        "goes on with what has come, or name a local copy with --archive"
    )


def fetch(
    urls: Sequence[str],
    target: Path,
    corpus: str,
    wanted: Collection[str],
    archive: Path | None = None,
    strip: str = "",
) -> Path:
    """Give a checked archive.

    Args:
        urls: Addresses of the archive.
        target: Where it is downloaded to, unless `archive` is given; an interrupted
            download is gone on with, a broken archive fetched again.
        corpus: As for `check_archive`.
        wanted: As for `check_archive`.
        archive: A local archive.
        strip: As for `check_archive`.

    Returns:
        Its path.

    Raises:
        RecipeError: If there is no such file, it is broken or something else, the
            download fails, or no space is left.
    """
    if archive is not None:
        if not archive.is_file():
            raise RecipeError(f"no such archive: {archive}")
        check_archive(archive, corpus, wanted, strip)
        return archive
    if target.is_file():
        try:
            check_archive(target, corpus, wanted, strip)
        except RecipeError as exc:
            print(f"{exc}; fetching it again", file=sys.stderr)
        else:
            return target
    target.unlink(missing_ok=True)
    download(urls, target)
    try:
        check_archive(target, corpus, wanted, strip)
    except RecipeError:
        target.unlink()
        raise
    return target


def _fetch(url: str, partial: Path) -> None:
    """Append what is missing of a file to `partial`."""
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url)
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as exc:
        if exc.code != 416:
            raise
        # nothing lies beyond what is there: complete, or of another file
        if exc.headers.get("Content-Range", "").rpartition("/")[2] == str(have):
            return
        partial.unlink()
        return _fetch(url, partial)
    with response:
        resumed = response.status == 206
        length = response.headers.get("Content-Length")
        with partial.open("ab" if resumed else "wb") as sink:
            shutil.copyfileobj(response, sink, BLOCK)
    start = have if resumed else 0
    if length is not None and partial.stat().st_size != start + int(length):
        got = partial.stat().st_size - start
        raise ConnectionError(f"the connection ended after {got} of {length} bytes")


def _is_extracted(archive: Path, folder: Path, strip: str) -> bool:
    """Tell whether every file of `archive` lies in `folder`, byte for byte."""
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = folder / member_path(member.name, strip)
            if member.isfile() and not (
                path.is_file()
                and path.stat().st_size == member.size
                and path.read_bytes() == tar.extractfile(member).read()
            ):
                return False
    return True


def extract(archive: Path, folder: Path, strip: str = "") -> Path:
    """Unpack an archive that `check_archive` has passed.

    A complete `folder` is kept; one that lacks a file of the archive, or has another
    content under its name, is replaced as a whole.

    Args:
        archive: The archive.
        folder: A folder for it alone.
        strip: A leading folder that all members have, and that is left out.

    Returns:
        `folder`.

    Raises:
        RecipeError: If a member would land outside `folder`, or no space is left.
    """
    if not hasattr(tarfile, "data_filter"):
        raise RecipeError(
            f"this Python ({sys.version.split()[0]}) cannot unpack archives safely; "
            "3.10.12, 3.11.4 and later can"
        )
    if _is_extracted(archive, folder, strip):
        return folder

    def inside(member: tarfile.TarInfo, where: str) -> tarfile.TarInfo | None:
        path = member_path(member.name, strip)
        if not path.parts:
            return None  # the leading folder itself
        return tarfile.data_filter(member.replace(name=path.as_posix()), where)

    partial = folder.with_name(f".{folder.name}.partial")
    with writing(folder):
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            with tarfile.open(archive, "r:gz") as tar:
                tar.extractall(partial, filter=inside)
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(partial, folder)
        except tarfile.TarError as exc:
            raise RecipeError(f"{archive} cannot be unpacked: {exc}") from exc
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder
