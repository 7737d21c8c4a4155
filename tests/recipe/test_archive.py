"""recipe.archive: downloads that are gone on with."""

import errno
import http.server
import os
import threading

import pytest

CONTENT = bytes(range(256)) * 4000


@pytest.fixture
def archive_tool(local):
    return local("archive")


@pytest.fixture
def server():
    """A server that gives CONTENT; `server.ends_after` cuts its answers short."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked = self.headers.get("Range")
            self.server.asked.append(asked)
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            if not self.server.resumes:
                start, asked = 0, None
            if self.path != "/corpus.tar.gz":
                self.send_error(404)
            elif asked and start >= len(CONTENT):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(CONTENT)}")
                self.end_headers()
            else:
                self.send_response(206 if asked else 200)
                self.send_header("Content-Length", str(len(CONTENT) - start))
                self.end_headers()
                self.wfile.write(CONTENT[start:][: self.server.ends_after])

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked, server.resumes, server.ends_after = [], True, None
        server.url = f"http://127.0.0.1:{server.server_port}/corpus.tar.gz"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_downloads_from_the_first_address_that_has_it(archive_tool, server, tmp_path):
    target = tmp_path / "new" / "corpus.tar.gz"

    archive_tool.download([server.url + ".no", server.url], target)

    assert target.read_bytes() == CONTENT
    assert os.listdir(target.parent) == ["corpus.tar.gz"]


@pytest.mark.parametrize("resumes", [True, False])
def test_goes_on_with_what_has_come(archive_tool, server, tmp_path, resumes):
    target = tmp_path / "corpus.tar.gz"
    server.ends_after = 300_000
    with pytest.raises(archive_tool.RecipeError, match=r"300000 of 1024000 bytes.*go"):
        archive_tool.download([server.url], target)
    assert not target.exists()

    server.ends_after, server.resumes = None, resumes
    archive_tool.download([server.url], target)

    assert target.read_bytes() == CONTENT
    assert server.asked == [None, "bytes=300000-"]


def test_a_complete_download_that_was_not_renamed_is_kept(
    archive_tool, server, tmp_path
):
    target = tmp_path / "corpus.tar.gz"
    (tmp_path / ".corpus.tar.gz.download").write_bytes(CONTENT)

    archive_tool.download([server.url], target)

    assert target.read_bytes() == CONTENT


def test_more_than_there_is_was_of_another_file(archive_tool, server, tmp_path):
    target = tmp_path / "corpus.tar.gz"
    (tmp_path / ".corpus.tar.gz.download").write_bytes(CONTENT + b"more")

    archive_tool.download([server.url], target)

    assert target.read_bytes() == CONTENT


def test_names_every_address_that_failed(archive_tool, server, tmp_path):
    urls = [server.url + ".no", "http://127.0.0.1:9/corpus.tar.gz"]

    with pytest.raises(archive_tool.RecipeError, match=r"404.*127\.0\.0\.1:9.*refused"):
        archive_tool.download(urls, tmp_path / "corpus.tar.gz")


def test_a_full_device_keeps_what_has_come(archive_tool, server, tmp_path, monkeypatch):
    target = tmp_path / "corpus.tar.gz"

    def fill_up(source, sink, length):
        sink.write(source.read(1000))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(archive_tool.shutil, "copyfileobj", fill_up)
        with pytest.raises(archive_tool.RecipeError, match=f"no space .* {target}$"):
            archive_tool.download([server.url], target)
    archive_tool.download([server.url], target)

    assert server.asked == [None, "bytes=1000-"]
    assert target.read_bytes() == CONTENT
