"""A loopback server that takes the place of Kubeflow's status server, with a CA of its own."""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/reviews/status"
TOKEN = "eyJhbGciOiJSUzI1NiJ9.c2VjcmV0.c2lnbmVk"


def certificate(folder: Path, name: str = "ca.crt") -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 that signs itself, and its key; return both files."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "status server")])
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = folder / name, folder / f"{name}.key"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return files


class StatusServer:
    """The server: `requests` holds the path, the headers and the body of each request.

    `answer` handles a request in place of the usual answer, which is 200 for the token of `TOKEN`, and else 403.
    """

    def __init__(self, folder: Path) -> None:
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.answer: Callable[[BaseHTTPRequestHandler], None] = self._answer
        self.came = threading.Condition()
        self.ca, key = certificate(folder)
        self.token = folder / "token"
        self.token.write_text(TOKEN)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.came:
                    server.requests.append((self.path, dict(self.headers), body))
                    server.came.notify_all()
                with suppress(OSError):
                    server.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that leaves is no error
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.ca, key)
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True, do_handshake_on_connect=False)

    @property
    def variables(self) -> dict[str, str]:
        """The variables that the controller sets."""
        address = f"https://127.0.0.1:{self._http.server_address[1]}{PATH}"
        values = {"URL": address, "CA_CERT": self.ca, "TOKEN": self.token}
        return {f"KUBEFLOW_TRAINER_SERVER_{name}": str(value) for name, value in values.items()}

    @property
    def statuses(self) -> list[dict[str, Any]]:
        return [body["trainerStatus"] for _, _, body in self.requests]

    def wait(self, number: int, seconds: float = 10) -> None:
        """Wait until that many requests have come."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.requests) >= number, seconds), self.requests

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        request.send_response(200 if request.headers["Authorization"] == f"Bearer {TOKEN}" else 403)
        request.end_headers()

    @contextmanager
    def serving(self) -> Iterator[None]:
        thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._http.shutdown()
            self._http.server_close()
