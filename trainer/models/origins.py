"""Limits of the files of a model that transformers reads, and errors for those that it cannot read."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from textwrap import shorten

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HFValidationError, StrictDataclassError

from trainer.base.errors import TrainerError, UsageError, causes, storage_error

_LARGEST_BYTES = 1 << 28  # the largest tokenizers have some 40 MB
_WHOLE_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "config.json", "generation_config.json",
    "merges.txt", "model.safetensors.index.json", "preprocessor_config.json", "processor_config.json",
    "sentencepiece.bpe.model", "special_tokens_map.json", "spiece.model", "spm.model", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip

CANNOT_READ = (
    OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RecursionError, StrictDataclassError,
)  # fmt: skip
"""Errors of transformers for configurations and tokenizers that it cannot read; values have any type."""


def one_line(error: Exception) -> str:
    """Return the message of an error of transformers on one line of at most 300 characters."""
    text = f"no {error}" if isinstance(error, KeyError) else str(error)
    return shorten(text, 300, placeholder=" ...") or type(error).__name__


def not_found(key: str, name: str, error: Exception) -> TrainerError:
    """Return the error for a folder or repository, named by the recipe's `key`, that could not be opened."""
    for cause in (error, *causes(error)):
        if not isinstance(cause, OSError) or isinstance(cause, FileNotFoundError):
            continue
        if str(cause.filename or "").startswith(HF_HUB_CACHE):
            return storage_error(
                f"the hub's cache must be a folder that can be used, but {cause.filename} cannot ({cause.strerror});"
                " make room, restore its permissions, or set HF_HOME to another folder",
                cause,
            )
    return UsageError(
        f"`{key}` is {name!r}, which could not be opened: {one_line(error)}; give a folder that holds it, or the name"
        " of a repository that this machine can reach or has in its cache"
    )


def require_small_files(key: str, name: str, revision: str | None) -> None:
    """Refuse a file that transformers reads as a whole and that may exceed the memory, in a folder or in the cache."""
    for file in _WHOLE_FILES:
        path = Path(name, file)
        with suppress(HFValidationError):  # transformers has a better message
            if not Path(name).is_dir() and isinstance(
                cached := try_to_load_from_cache(name, file, revision=revision), str
            ):
                path = Path(cached)
        if path.is_file() and path.stat().st_size > _LARGEST_BYTES:
            raise UsageError(
                f"`{key}` is {name!r}, which has a {file} of {path.stat().st_size:,} bytes, but may have at most"
                f" {_LARGEST_BYTES:,}; copy the file of the model again"
            )
