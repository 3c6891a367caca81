"""`trainer push`: an exported folder to a hub, as one commit, private unless asked otherwise.

The hub is huggingface.co, or that of `HF_ENDPOINT`. Only plain files of the folder are sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_session
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, though not in its `__all__`

from trainer.base.errors import TrainerError, UsageError
from trainer.base.text import for_terminal, has_secret, without_secrets
from trainer.recipe.reading.trained import ADAPTER, CONFIG, folder_with

_HUB = "https://huggingface.co"
_SECONDS = 60.0
"""The time without an answer after which a hub counts as silent."""
_NETWORK: Any = tuple(one for one in HfHubHTTPError.__mro__ if one.__name__ == "HTTPError")  # of its HTTP library
_TEXTS = (".json", ".jinja", ".md", ".txt", ".yaml", ".yml")
_FIXES = {
    401: "log in with `hf auth login`, or set HF_TOKEN to a token that may write",
    403: "use a token that may write there, or another name",
    404: "check the name and HF_ENDPOINT",
    409: "another commit came first, or the name is taken; push again, or name another",
    413: "the hub takes no file of this size; export into smaller files",
}


@dataclass(frozen=True)
class Pushed:
    """The result of a push: the folder, its files, and the address of the commit."""

    folder: Path
    names: tuple[str, ...]
    num_bytes: int
    is_private: bool
    address: str


def push(source: Path, name: str, public: bool = False, endpoint: str | None = None) -> Pushed:
    """Send an exported folder to a hub.

    Args:
        source: An exported folder, or that of a run: then its best model, or else its last one.
        name: The name of the repository, "owner/name" or "name"; it is created if it is not there.
        public: Whether everybody may read a new repository, or the repository is public already.
        endpoint: The address of the hub; None: `HF_ENDPOINT`, or huggingface.co.

    Raises:
        UsageError: The folder holds more than an exported model, or the name or its repository does not fit.
        TrainerError: The hub refused, or did not answer.
    """
    folder = _exported(source)
    files = _plain_files(folder)
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UsageError(f"`NAME` must be owner/name or name, but is {name!r}: {error}; name another") from error
    api = HfApi(endpoint=endpoint)
    get_session().timeout = _SECONDS
    with _naming_the_hub(api.endpoint, name):
        try:
            repository = api.create_repo(name, private=not public).repo_id
        except HfHubHTTPError as error:
            if error.response.status_code != 409:
                raise
            found = api.repo_info(name)
            if not found.private and not public:
                raise UsageError(
                    f"`NAME` must be a private repository, but everybody can read {name}; add --public to push there"
                ) from error
            repository = found.id
        operations = [CommitOperationAdd(path, str(folder / path)) for path in files]
        with _transfer_of(api.endpoint):
            done = api.create_commit(repository, operations, commit_message="Upload a model that trainer exported")
    num_bytes = sum((folder / path).stat().st_size for path in files)
    return Pushed(folder, tuple(files), num_bytes, not public, str(done.commit_url))


def _exported(source: Path) -> Path:
    if (found := folder_with(source, CONFIG, ADAPTER)) is not None:
        return found
    state = "holds neither best/ nor model/" if source.is_dir() else "does not exist"
    raise UsageError(
        f"`RUN` must be the folder of a run or of an exported model, but {source} {state}; train it to its end, or"
        f" export a checkpoint: trainer export {source} FOLDER"
    )


def _plain_files(folder: Path) -> list[str]:
    names = []
    for place, folders, files in os.walk(folder):
        for name in sorted([*folders, *files]):
            path = Path(place, name)
            shown = path.relative_to(folder).as_posix()
            kind = "a link" if path.is_symlink() else "hidden" if name.startswith(".") else None
            if kind is None and not (path.is_dir() or path.is_file()):
                kind = "no plain file"
            if kind is None and path.is_file() and path.suffix in _TEXTS and _holds_secret(path):
                kind = "a file with a password or a token"
            if kind is not None:
                raise UsageError(f"`RUN` must hold an exported model only, but {folder} has {shown}, {kind}; remove it")
            if path.is_file():
                names.append(shown)
    return sorted(names)


def _holds_secret(path: Path) -> bool:
    if path.name == "tokenizer.json" or path.stat().st_size > 10_000_000:  # a vocabulary holds no address
        return False
    return any(has_secret(line) for line in path.read_text(encoding="utf-8", errors="replace").splitlines())


@contextmanager
def _transfer_of(hub: str) -> Iterator[None]:
    """Send large files by Git LFS inside the block, unless the hub is huggingface.co, which has Xet."""
    before = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = before or hub != _HUB
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before


@contextmanager
def _naming_the_hub(hub: str, name: str) -> Iterator[None]:
    """Turn the errors of the hub and of the network into errors for the user."""
    hub = without_secrets(hub)
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise UsageError("`HF_HUB_OFFLINE` must be 0 to push, but is set; unset it") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        fix = _FIXES.get(status, "push again later" if status >= 500 else "check the name and HF_ENDPOINT")
        answer = " ".join((error.server_message or error.response.reason_phrase).split())
        reason = for_terminal(without_secrets(answer))
        raise TrainerError(
            f"`NAME` could not be pushed: {hub} answered {status} for {name}: {reason}; {fix}"
        ) from error
    except LocalTokenNotFoundError as error:
        raise TrainerError(f"`NAME` could not be pushed: there is no token for {hub}; {_FIXES[401]}") from error
    except (OSError, RuntimeError, ValueError, *_NETWORK) as error:
        problem = f"it did not answer for {_SECONDS:g} s" if "Timeout" in type(error).__name__ else str(error)
        raise TrainerError(
            f"`NAME` could not be pushed: {hub} cannot be used for {name}: {for_terminal(without_secrets(problem))};"
            " check the network and HF_ENDPOINT, and push again"
        ) from error
