"""The status server of Kubeflow Trainer 2.2 and later: one POST replaces `status.trainerStatus` of a TrainJob.

The controller sets three environment variables: the address of the TrainJob, a file with the CA of the server, and a
file with a token for this TrainJob. It renews both, so each request reads them again. Source: `pkg/statusserver` and
`pkg/runtime/framework/plugins/trainjobstatus` of kubeflow/trainer.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainer.ranks.environment import library_settings

URL, CA, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
TIMEOUT_SECONDS = 5.0  # of each operation on the socket
_MOST_BYTES = 1 << 16  # of a token, and of a request, as in the server


class StatusError(Exception):
    """A reason without secrets why a status was not written."""


@dataclass(frozen=True)
class StatusServer:
    """The address of one TrainJob, and the files that the controller mounts."""

    url: str
    ca: str
    token: str

    @classmethod
    def of_environment(cls) -> StatusServer:
        """Return the server that the environment variables name."""
        return cls(*library_settings(URL, CA, TOKEN, defaults={}))

    def write(self, status: Mapping[str, Any]) -> None:
        """Replace the status.

        Redirects and proxies are not followed, because the token is for this server alone.

        Raises:
            StatusError: the server, its address or a file does not serve.
        """
        body = json.dumps({"trainerStatus": status}, ensure_ascii=False).encode(errors="replace")
        if len(body) > _MOST_BYTES:
            raise StatusError(f"the status has {len(body):,} bytes, more than {_MOST_BYTES:,}; log fewer metrics")
        host, port, path = self._place()
        headers = {"Authorization": f"Bearer {self._read_token()}", "Content-Type": "application/json"}
        try:
            trusted = ssl.create_default_context(cafile=self.ca)
        except (OSError, ValueError) as error:  # an error of ssl is an OSError
            raise StatusError(f"the CA certificate {self.ca!r} ({CA}) cannot be used: {_short(error)}") from error
        connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_SECONDS, context=trusted)
        try:
            connection.request("POST", path, body, headers)
            code = connection.getresponse().status
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StatusError(f"no answer from {host}:{port}: {_short(error)}") from error
        finally:
            connection.close()
        if code != HTTPStatus.OK:
            name = HTTPStatus(code).phrase if code in {*HTTPStatus} else "unknown"
            raise StatusError(f"{host}:{port} answered {code} ({name})")

    def _place(self) -> tuple[str, int, str]:
        try:
            url = urlsplit(self.url)
            host, port, rest = url.hostname, url.port or 443, (url.username, url.query, url.fragment)
        except ValueError:
            host = None
        if not host or url.scheme != "https" or any(rest) or not re.fullmatch(r"/[\x21-\x7e]*", url.path):
            raise StatusError(f"{URL} must be https://HOST:PORT/PATH, but is not")
        return host, port, url.path

    def _read_token(self) -> str:
        try:
            # A pipe would block.
            if not stat.S_ISREG(Path(self.token).stat().st_mode):
                raise StatusError(f"the token {self.token!r} ({TOKEN}) must be a file")
            with open(self.token, "rb") as file:
                token = file.read(_MOST_BYTES).decode("ascii").strip()
        except (OSError, ValueError) as error:  # a name with a null byte, or text that is not ASCII
            reason = _short(error) if isinstance(error, OSError) else "it is no text in ASCII"
            raise StatusError(f"the token {self.token!r} ({TOKEN}) cannot be read: {reason}") from error
        if not re.fullmatch(r"[\x21-\x7e]+", token):
            raise StatusError(f"the token {self.token!r} ({TOKEN}) must be one word, but is not")
        return token


def _short(error: Exception) -> str:
    """Return the kind of an error, with its reason if the system or the certificate gives it, and not the server."""
    reason = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else getattr(error, "strerror", "")
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__
