"""One line on a hub that does not answer, in place of two lines for each of the attempts of `huggingface_hub`."""

from __future__ import annotations

import logging
import re
from urllib.parse import urlsplit

_LOGGER = "huggingface_hub.utils._http"
_FAILED = re.compile(r"'(?P<error>.*)' thrown while requesting \w+ (?P<url>\S+)", re.DOTALL)


class OneLine(logging.Filter):
    """Filter that passes the first failed request to each host, in our words."""

    def __init__(self) -> None:
        super().__init__()
        self._hosts: set[str | None] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        # `huggingface_hub` logs this line after each request that failed.
        if text.startswith("Retrying in "):
            return False
        if (match := _FAILED.fullmatch(text)) is None:
            return True
        host = urlsplit(match["url"]).hostname
        # The new message has no places for the old arguments.
        is_first, record.args = host not in self._hosts, ()
        record.msg = f"the hub at {host} does not answer ({match['error']}); trying again for up to a minute"
        self._hosts.add(host)
        return is_first


def shorten_retries() -> None:
    """Show one line for each host of a hub that does not answer."""
    logging.getLogger(_LOGGER).addFilter(OneLine())
