"""From the recipe's data to padded batches: loading, tokenising once, order, partition. Knows no task and no model."""

from trainer.data.collate import Padding
from trainer.data.loader import EvalLoader, TrainLoader
from trainer.data.order import GlobalOrder
from trainer.data.sources import Split, Splits, load_splits
from trainer.data.split import EncodedSplit
from trainer.data.tokenise import encode_split

__all__ = [
    "EncodedSplit",
    "EvalLoader",
    "GlobalOrder",
    "Padding",
    "Split",
    "Splits",
    "TrainLoader",
    "encode_split",
    "load_splits",
]
