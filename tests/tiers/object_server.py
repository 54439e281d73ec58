"""A real S3 server on loopback in a process of its own, and in front of it a proxy that makes trouble.

The server: ``python object_server.py``; it says its port, and ends with its standard input.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

KEY = "AKIAOFTHETESTS0000"
SECRET = "a-secret-of-the-tests-0123456789"
TOKEN = "a-session-token-of-the-tests"
BUCKET = "bucket"

_AUTHORIZATION = (
    f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
)


@dataclass(frozen=True)
class Request:
    """A request as the proxy sees it, before the server does."""

    method: str
    path: str
    query: dict[str, list[str]]
    nbytes: int

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and "partNumber" in self.query

    @property
    def key(self) -> str:
        return self.path.removeprefix(f"/{BUCKET}/")


Trouble = Callable[[Request], "int | str | None"]
"""Says what to do with a request: a status that is answered in the server's place, ``"reset"``: the connection is cut
after half of the body, ``"reset after"``: the server gets it and the answer is lost, None: it is passed on."""


@dataclass
class Server:
    """The running server.

    Attributes:
        url: of the proxy.
        requests: all that have come, in order.
        trouble: what the proxy does; may be replaced at any time.
    """

    url: str
    backend: tuple[str, int]
    process: subprocess.Popen[str]
    requests: list[Request] = field(default_factory=list)
    trouble: Trouble = lambda _: None

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_SESSION_TOKEN": TOKEN,
            "AWS_REGION": "us-east-1",
        }

    def call(self, method: str, path: str, body: bytes = b"") -> bytes:
        """A request to the server itself, without the proxy."""
        return self.calls([(method, path, body)])[0]

    def calls(self, requests: list[tuple[str, str, bytes]]) -> list[bytes]:
        """Several requests, over one connection."""
        found = []
        connection = http.client.HTTPConnection(*self.backend, timeout=30)
        with contextlib.closing(connection):
            for method, path, body in requests:
                connection.request(method, path, body, {"Authorization": _AUTHORIZATION})
                answer = connection.getresponse()
                found.append(answer.read())
                if answer.status >= 300:
                    raise OSError(f"{method} {path}: {answer.status} {found[-1][:200]!r}")
        return found

    def uploads(self) -> int:
        """How many uploads are unfinished."""
        return self.call("GET", f"/{BUCKET}?uploads").count(b"<UploadId>")

    def names(self, prefix: str = "") -> list[str]:
        found: list[str] = []
        token = ""
        while True:
            data = self.call("GET", f"/{BUCKET}?list-type=2&prefix={prefix}{token}").decode()
            found += [part.partition("</Key>")[0] for part in data.split("<Key>")[1:]]
            if "<IsTruncated>true" not in data:
                return found
            token = "&continuation-token=" + data.split("<NextContinuationToken>")[1].partition("<")[0]

    def get(self, key: str) -> bytes:
        return self.call("GET", f"/{BUCKET}/{key}")

    def fill(self, prefix: str, count: int) -> None:
        """Put so many small objects into the bucket."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{prefix} {count}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def reset(self) -> None:
        """Forget all objects, requests and trouble."""
        self.trouble = lambda _: None
        self.call("POST", "/moto-api/reset")
        self.call("PUT", f"/{BUCKET}")
        self.requests.clear()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Server

    def handle_any(self) -> None:
        parts = urlsplit(self.path)
        nbytes = int(self.headers.get("Content-Length") or 0)
        request = Request(self.command, parts.path, parse_qs(parts.query, keep_blank_values=True), nbytes)
        self.served.requests.append(request)
        action = self.served.trouble(request)
        if action == "reset":
            self.rfile.read(nbytes // 2)
            self.close_connection = True
            self.connection.close()
            return
        body = self.rfile.read(nbytes)
        if isinstance(action, int):
            self._answer(action, f"<Error><Code>Trouble{action}</Code></Error>".encode(), {})
            return
        connection = http.client.HTTPConnection(*self.served.backend, timeout=60)
        with contextlib.closing(connection):
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        if action == "reset after":
            self.close_connection = True
            self.connection.close()
            return
        self._answer(answer.status, data, dict(answer.getheaders()))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        with contextlib.suppress(ConnectionError):
            self.send_response_only(status)
            skipped = {"connection", "transfer-encoding", "date", "server"}
            is_head = self.command == "HEAD"
            for name, value in headers.items():
                if name.lower() not in skipped and (is_head or name.lower() != "content-length"):
                    self.send_header(name, value)
            if not is_head:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if not is_head:
                self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: Any) -> None:
        """A client that was killed is no error of the proxy."""


@contextlib.contextmanager
def running_server() -> Iterator[Server]:
    """An S3 server and its proxy, with an empty bucket."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", os.path.abspath(__file__)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        port = int(process.stdout.readline())
        handler = type("Handler", (_Handler,), {})
        proxy = _Proxy(("127.0.0.1", 0), handler)
        server = Server(f"http://127.0.0.1:{proxy.server_address[1]}", ("127.0.0.1", port), process)
        handler.served = server  # type: ignore[attr-defined]
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            server.call("PUT", f"/{BUCKET}")
            yield server
        finally:
            proxy.shutdown()
            proxy.server_close()
            thread.join()
    finally:
        process.stdin.close()  # type: ignore[union-attr]
        process.stdout.close()  # type: ignore[union-attr]
        process.wait(30)


def _serve() -> None:
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    for line in sys.stdin:
        prefix, count = line.split()
        for index in range(int(count)):
            backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
            backend.put_object(BUCKET, f"{prefix}{index:05d}", b"1")
        print("done", flush=True)


if __name__ == "__main__":
    _serve()
