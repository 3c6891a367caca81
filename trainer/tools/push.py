"""`trainer push`: an exported folder to a hub, as one commit, private unless asked otherwise.

The hub is huggingface.co, or that of `HF_ENDPOINT`. Only plain files of the folder are sent, and files that an older
push left are deleted. `upload_folder` of huggingface_hub would divide them over several commits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_session
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

from trainer.base.errors import TrainerError, UsageError
from trainer.base.text import has_secret, without_secrets
from trainer.use.trained import ADAPTER, CONFIG, folder_with

_HUB = "https://huggingface.co"
_SECONDS = 60.0  # without an answer, after which a hub counts as silent
# By name, because versions of huggingface_hub differ in their HTTP library.
_NETWORK: Any = tuple(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")  # of its HTTP library
_TEXTS = (".json", ".jinja", ".md", ".txt", ".yaml", ".yml")
_EXPORTED = (
    "config.json", "generation_config.json", "trainer_recipe.json", "model*.safetensors", "model.safetensors.*",
    "model.onnx*", "adapter_config.json", "adapter_model*.safetensors", "modules.json", "sentence_bert_config.json",
    "config_sentence_transformers.json", "[0-9]*_*/config.json", "[0-9]*_*/model.safetensors",
    "contrastive_scale/model.safetensors", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "*.model", "*.spm", "chat_template.*", "additional_chat_templates/*.jinja",
    "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""The files of exported folders, apart from the model card: a loader reads each of them if it is there."""
_WEIGHTS = (".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".safetensors")
"""Endings of the weights of all programs."""
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"
_FIXES = {401: _LOGIN, 403: _LOGIN, 404: "check the name and HF_ENDPOINT", 409: "push again", 412: "push again"}


class Pushed(NamedTuple):
    """The result of a push: the folder, its files, files of an older push that it deleted, and the commit's address.

    `others` are weights of other programs that are still there.
    """

    folder: Path
    names: tuple[str, ...]
    num_bytes: int
    is_private: bool
    address: str
    deleted: tuple[str, ...]
    others: tuple[str, ...]


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
    api = HfApi(endpoint=endpoint)
    get_session().timeout = _SECONDS
    constants.HF_HUB_DISABLE_XET |= api.endpoint != _HUB  # other hubs have Git LFS for large files, and no Xet
    with _naming_the_hub(without_secrets(api.endpoint), name):
        # `create_repo` completes a name without an owner by that of the token.
        there = api.model_info(api.create_repo(name, private=not public, exist_ok=True).repo_id)
        if bool(there.private) == public:
            needs, has, fix = "private", "everybody can read", "add --public to push there"
            if public:
                needs, has, fix = "public", "only its members can read", "leave out --public, or change it on the hub"
            raise UsageError(f"`NAME` must be a {needs} repository, but {has} {name}; {fix}")
        present = [sibling.rfilename for sibling in there.siblings or ()]
        deleted = tuple(path for path in present if path not in files and _is_exported(path))
        others = tuple(path for path in present if path.endswith(_WEIGHTS) and path not in (*files, *deleted))
        done = api.create_commit(
            there.id,
            [*map(CommitOperationDelete, deleted), *(CommitOperationAdd(path, str(folder / path)) for path in files)],
            commit_message="Upload a model that trainer exported",
            parent_commit=there.sha,  # a commit between is an error
        )
    num_bytes = sum((folder / path).stat().st_size for path in files)
    return Pushed(folder, tuple(files), num_bytes, not public, str(done.commit_url), deleted, others)


def _is_exported(path: str) -> bool:
    """Return whether an export writes a file of this name; a pattern holds for one folder."""
    return any(path.count("/") == pattern.count("/") and fnmatchcase(path, pattern) for pattern in _EXPORTED)


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
    for path in sorted(folder.rglob("*")):
        shown = path.relative_to(folder).as_posix()
        kind = "a link" if path.is_symlink() else "hidden" if path.name.startswith(".") else None
        if kind is None and not (path.is_dir() or path.is_file()):
            kind = "no plain file"
        if kind is None and path.is_file():
            kind = "a file with a password or a token" if _holds_secret(path) else None
            names.append(shown)
        if kind is not None:
            raise UsageError(f"`RUN` must hold an exported model only, but {folder} has {shown}, {kind}; remove it")
    return sorted(names)


def _holds_secret(path: Path) -> bool:
    if path.suffix not in _TEXTS or path.name == "tokenizer.json" or path.stat().st_size > 10_000_000:
        return False  # no text, or a vocabulary, which holds no address
    return any(map(has_secret, path.read_text(encoding="utf-8", errors="replace").splitlines()))


@contextmanager
def _naming_the_hub(hub: str, name: str) -> Iterator[None]:
    """Turn the errors of the hub and of the network into errors for the user."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise UsageError("`HF_HUB_OFFLINE` must be 0 to push, but is set; unset it") from error
    except HFValidationError as error:
        raise UsageError(f"`NAME` must be owner/name or name, but is {name!r}: {error}; name another") from error
    except LocalTokenNotFoundError as error:
        raise TrainerError(f"`NAME` could not be pushed: there is no token for {hub}; {_LOGIN}") from error
    except HfHubHTTPError as error:
        status, answer = error.response.status_code, error.server_message or error.response.reason_phrase
        reason, fix = without_secrets(" ".join(answer.split())), _FIXES.get(status, "push again later")
        raise TrainerError(
            f"`NAME` could not be pushed: {hub} answered {status} for {name}: {reason}; {fix}"
        ) from error
    except (OSError, RuntimeError, ValueError, *_NETWORK) as error:
        problem = f"it did not answer for {_SECONDS:g} s" if "Timeout" in type(error).__name__ else str(error)
        raise TrainerError(
            f"`NAME` could not be pushed: {hub} cannot be used for {name}: {without_secrets(problem)};"
            " check the network and HF_ENDPOINT, and push again"
        ) from error
