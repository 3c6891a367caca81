"""From data sources to batches: loading, tokenising, caching, order. Knows no task and no model."""

from trainer.data.collate import Batching, Normalisation, Padding
from trainer.data.image_split import encode_images
from trainer.data.loader import EvalLoader, TrainLoader
from trainer.data.order import GlobalOrder
from trainer.data.sources import Split, Splits, load_splits
from trainer.data.split import EncodedSplit
from trainer.data.tokenised_split import encode_split

__all__ = [
    "Batching",
    "EncodedSplit",
    "EvalLoader",
    "GlobalOrder",
    "Normalisation",
    "Padding",
    "Split",
    "Splits",
    "TrainLoader",
    "encode_images",
    "encode_split",
    "load_splits",
]
