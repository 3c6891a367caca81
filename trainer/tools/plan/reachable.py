"""A check, before any slow import, that the configuration of a model can be read: an unreachable hub costs a second."""

from __future__ import annotations

import os
import socket
from collections.abc import Container
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, try_to_load_from_cache

from trainer.base.disk import within
from trainer.base.errors import UsageError
from trainer.recipe.schema import Model

_SECONDS = 1.0
_FILES = ("config.json", "adapter_config.json")


def is_here(name: str, revision: str | None = None) -> bool:
    """Return whether the configuration of a model is in a folder, or in the hub's cache."""
    # `try_to_load_from_cache` returns a mark, and no path, for a file that is known to be missing.
    return os.path.isabs(name) or any(
        isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in _FILES
    )


def require_reachable(model: Model, known: Container[str] = ()) -> None:
    """Require the configuration of a model on this machine, or a hub that answers.

    `known` are names of models with a shape of the package.

    Raises:
        UsageError: there is neither.
    """
    name = model.name_or_path
    if name is None or (name in known and model.revision is None) or is_here(name, model.revision):
        return
    # The name of the host must be found within this time, too.
    if constants.HF_HUB_OFFLINE or not (bool(getproxies()) or within(_SECONDS, _answers, otherwise=False)):
        raise UsageError(
            f"`model.name_or_path` is {name!r}, which is not in the hub's cache, and the hub cannot be reached; a plan"
            " needs its configuration only: fetch it where there is a network (hf download NAME config.json), name a"
            " folder, or set `model.name_or_path` to null and describe the model in `model.config`"
        )


def _answers() -> bool:
    """Return whether the hub accepts a connection."""
    place = urlsplit(constants.ENDPOINT)
    try:
        port = place.port or (80 if place.scheme == "http" else 443)
        socket.create_connection((place.hostname or "", port), _SECONDS).close()
    except OSError:
        return False
    return True
