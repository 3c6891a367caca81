"""The bytes that a rank reads of the files of a pretrained model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from trainer.models.describe import ModelDescription
from trainer.models.fill import empty_parts
from trainer.models.hub_files import CannotLoadPartsError, require_safe_shards
from trainer.models.matching import fitted
from trainer.models.place import ModelCut
from trainer.models.stored_weights import Index, StoredWeights


class CountedWeights(StoredWeights):
    """Stored tensors that are returned on `meta`; the bytes of each file that would be read are counted."""

    device = "meta"

    def __init__(self, files: Sequence[str | Path]) -> None:
        super().__init__(files)
        self.num_bytes: Counter[str] = Counter()

    def _copy(self, key: str, targets: Sequence[tuple[Index, Tensor]]) -> None:
        for _, target in targets:
            self.num_bytes[Path(self._files[key]).name] += target.numel() * self.dtypes[key].itemsize


def count_reads(described: ModelDescription, cut: ModelCut) -> Mapping[str, int]:
    """Return the bytes of each file that a rank reads of a pretrained model, from the headers of the files.

    If the model must be built whole, these are all bytes.

    Raises:
        UsageError: the files are missing, do not fit the model, or it cannot be cut.
    """
    require_safe_shards(described.recipe, described.config)
    with described.explained():
        try:
            counted = CountedWeights(described.files())
            stored = fitted(described, counted)
        except CannotLoadPartsError as error:
            raise described.not_described(error) from error
        try:
            parts, _, sources = empty_parts(described, cut, stored)
            parts.read(stored, sources.renamed)
            keys = [key for keys in sources.converted for key in keys]
        except CannotLoadPartsError:
            # The try above counted some reads; a whole load reads all.
            counted.num_bytes.clear()
            keys = list(stored.shapes)
        for key in keys:
            stored.read(key)
    return counted.num_bytes
