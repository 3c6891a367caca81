"""A server on the loopback, over a folder, that can be away or silent: WebHDFS, and HTTP with ranges."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

PREFIX = "/webhdfs/v1"


class WebHdfs(ThreadingHTTPServer):
    """The server; `state` is how it answers from now on."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.folder = folder
        self.state: Literal["well", "away", "silent", "cut", "closed", "slow"] = "well"
        self.heard: Callable[[str, str], None] = lambda operation, path: None
        """Called with each operation and its path, before the answer."""
        self.has_ranges = True
        self.ended = threading.Event()

    def url(self, path: str) -> str:
        """Return the URL of a path for fsspec."""
        return f"webhdfs://127.0.0.1:{self.server_port}/{path}"

    def http_url(self, path: str) -> str:
        """Return the URL of a path by HTTP."""
        return f"http://127.0.0.1:{self.server_port}/{path}"


@contextmanager
def webhdfs(folder: Path) -> Iterator[WebHdfs]:
    """Serve a folder in this context."""
    folder.mkdir(exist_ok=True)
    server = WebHdfs(folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Answers(BaseHTTPRequestHandler):
    server: WebHdfs
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        name = address.path.removeprefix(PREFIX)
        query = {key: values[0] for key, values in parse_qs(address.query).items()}
        operation = query.get("op", "")
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.heard(operation, name)
        if self.server.state == "slow":
            self.server.ended.wait(0.2)
        if self.server.state == "silent":
            self.server.ended.wait()
            self.close_connection = True
        elif self.server.state == "closed":
            self._say(401)
        elif self.server.state == "away":
            self._say(503, b"<html>in maintenance</html>")
        elif self.server.state == "cut":
            self.close_connection = True
        elif not operation and self.command in ("GET", "HEAD"):
            self._give(self.server.folder / name.lstrip("/"))
        elif not operation:  # the data itself, at the address of a redirection
            with (self.server.folder / name.lstrip("/")).open("ab") as file:
                file.write(body)
            self._say(201)
        else:
            self._do(operation, self.server.folder / name.lstrip("/"), name, query)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 (names of http.server)

    def _do(self, operation: str, path: Path, name: str, query: dict[str, str]) -> None:
        if operation in ("CREATE", "APPEND"):
            if operation == "CREATE":
                path.write_bytes(b"")
            self.send_response(307)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}{name}")
            self.send_header("content-length", "0")
            self.end_headers()
        elif operation == "MKDIRS":
            path.mkdir(parents=True, exist_ok=True)
            self._say(200, b"{}")
        elif operation == "DELETE":
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            self._say(200, b"{}")
        elif not path.exists():
            problem = {"RemoteException": {"exception": "FileNotFoundException", "message": f"no {name}"}}
            self._say(404, json.dumps(problem).encode())
        elif operation == "OPEN":
            start = int(query["offset"])
            self._say(200, path.read_bytes()[start : start + int(query["length"])])
        elif operation == "GETFILESTATUS":
            self._say(200, json.dumps({"FileStatus": _status(path, "")}).encode())
        else:
            assert operation == "LISTSTATUS", operation
            listed = sorted(path.iterdir()) if path.is_dir() else []
            statuses = [_status(one, one.name) for one in listed] or [_status(path, "")] * path.is_file()
            self._say(200, json.dumps({"FileStatuses": {"FileStatus": statuses}}).encode())

    def _give(self, path: Path) -> None:
        """Answer a plain request for a file, a part of it, or the links of a folder."""
        if path.is_dir():
            return self._say(200, "".join(f'<a href="{one.name}">x</a>' for one in path.iterdir()).encode())
        if not path.exists():
            return self._say(404)
        content, part = path.read_bytes(), self.headers.get("range")
        if part is None or not self.server.has_ranges:
            return self._say(200, content)
        first, last = part.removeprefix("bytes=").split("-")
        return self._say(206, content[int(first) : int(last) + 1])

    def _say(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _status(path: Path, suffix: str) -> dict[str, Any]:
    is_folder = path.is_dir()
    size = 0 if is_folder else path.stat().st_size
    return {"pathSuffix": suffix, "type": "DIRECTORY" if is_folder else "FILE", "length": size}
