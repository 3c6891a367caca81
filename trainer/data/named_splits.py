"""Data sets with names for their splits: those of the hub, local folders with the same structure, saved `DatasetDict`s.

Only the readers of `datasets` run; `datasets` no longer supports code that comes with a data set.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base.errors import DataError, TrainerError
from trainer.data.formats.base import NULLS, CellKind, reason
from trainer.data.formats.typed import with_types
from trainer.data.readers import refuse_datasets_cache
from trainer.recipe.schema import FolderData, HubData

if TYPE_CHECKING:
    from datasets import Dataset


def load_named(
    data: HubData | FolderData, kinds: Mapping[str, CellKind]
) -> tuple[Mapping[str, Dataset], str, tuple[Path, ...]]:
    """Return the splits by name, the name of the data set for messages, and the folders that hold its images.

    Args:
        kinds: the kinds of the columns that the task or a map reads.

    Raises:
        DataError: the data set cannot be read.
        TrainerError: the hub cannot be reached.
    """
    if isinstance(data, HubData):
        return _load_hub(data, kinds), _hub_name(data), _hub_folders(data.name)
    return _load_folder(data), f"`{data.path}`", (Path(data.path),)


def _hub_name(data: HubData) -> str:
    return f"`{data.name}`" + (f" (subset `{data.subset}`)" if data.subset else "")


def _hub_folders(name: str) -> tuple[Path, ...]:
    """Return the folders that hold the images of a data set: a local folder, or the caches of the hub.

    `datasets` unpacks archives of both into its cache.
    """
    import datasets
    from huggingface_hub import constants

    local = Path(name)
    return (local if local.is_dir() else Path(constants.HF_HUB_CACHE), Path(datasets.config.HF_DATASETS_CACHE))


def _load_hub(data: HubData, kinds: Mapping[str, CellKind]) -> Mapping[str, Dataset]:
    import datasets

    load = partial(datasets.load_dataset, data.name, data.subset, revision=data.revision)
    try:
        splits: Mapping[str, Dataset] = load()
        first = next(iter(splits.values()))
        if first.info.builder_name == "csv" and any(_is_guessed(first.features.get(name)) for name in kinds):
            texts = {
                name: datasets.Value("string") if _is_guessed(kind) else kind for name, kind in first.features.items()
            }
            # Loaded again as texts, because a guessed number has lost its leading zeros.
            again = load(features=datasets.Features(texts), **NULLS)
            return dict(zip(again, with_types([*again.values()], kinds), strict=True))
    except datasets.exceptions.DatasetNotFoundError as error:
        raise DataError(
            f"`data.name` must name a data set on the hub or a local folder, but is `{data.name}`:"
            f" {reason(error)}; check the spelling, and for a gated data set the access of your hub token"
        ) from error
    except ConnectionError as error:
        raise TrainerError(
            f"`data.name` is `{data.name}`, which is no local folder and not in the hub's cache, and the hub cannot be"
            " reached; set `data.name` to a local copy of the data set, or fetch it where there is a network"
            " and copy the hub's cache folder (HF_HOME)"
        ) from error
    except Exception as error:  # readers raise any type; for an unknown subset the message lists the subsets
        if Path(data.name, "state.json").is_file():  # the reader takes folders of `DatasetDict` only
            raise DataError(
                f"`data.name` must name a data set, but `{data.name}` was written by `save_to_disk` of `datasets`; use"
                ' `data.source` "folder" and name it in `data.path`'
            ) from error
        refuse_datasets_cache(error)
        raise DataError(
            f"`data.name` and `data.subset` must name a data set, but {_hub_name(data)} cannot be read: {reason(error)}"
        ) from error
    return splits


def _is_guessed(feature: Any) -> bool:
    """Return whether the type of a column of CSV is one that pandas guesses; a card may name others."""
    return type(feature).__name__ == "Value" and feature.dtype in ("int64", "float64", "bool")


def _load_folder(data: FolderData) -> Mapping[str, Dataset]:
    import datasets

    if not Path(data.path).is_dir():
        raise DataError(f"`data.path` must be a folder, but there is none at `{data.path}`; correct it")
    try:
        loaded = datasets.load_from_disk(data.path)
    except Exception as error:  # of any type: a saved split without rows raises IndexError
        raise DataError(
            "`data.path` must be a folder that `save_to_disk` of `datasets` wrote, each split with a row, but"
            f" `{data.path}` cannot be read as one: {reason(error)};"
            ' for a folder of JSON, CSV or Parquet files use `data.source` "files" or "hub"'
        ) from error
    return loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
