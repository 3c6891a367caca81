from __future__ import annotations

import io
import logging

from trainer.cli.hub_retries import OneLine


def test_attempts_on_a_hub_become_one_line() -> None:
    logger, shown = logging.Logger("hub"), io.StringIO()
    logger.addHandler(logging.StreamHandler(shown))
    logger.addFilter(OneLine())
    for attempt in range(1, 6):
        logger.warning(f"'[Errno 111] Connection refused' thrown while requesting HEAD https://u:p@hub.co/{attempt}")
        logger.warning(f"Retrying in {attempt}s [Retry {attempt}/5].")
    logger.warning("Rate limited. Waiting 30s before retry [Retry 1/5].")
    first, second = shown.getvalue().splitlines()
    assert (
        first == "the hub at hub.co does not answer ([Errno 111] Connection refused); trying again for up to a minute"
    )
    assert second.startswith("Rate limited.")
