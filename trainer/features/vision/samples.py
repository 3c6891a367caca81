"""Images without data, for plans, checks and graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.features.vision.processor import image_size, load_image_processor, takes_images_of
from trainer.models.input_samples import InputSamples
from trainer.recipe.schema import Model

_PIXELS = "pixel_values"
_DEFAULT_SIZE = (224, 224)  # if the configuration has no image size
_GRAPH_SIZE = (96, 64)  # height and width, where images of any size are read


class ImageSamples(InputSamples):
    """Images `[rows, channels, height, width]`."""

    def blank(self, config: Any, num_rows: int) -> dict[str, Tensor]:
        return {_PIXELS: torch.zeros(num_rows, config.num_channels, *(image_size(config) or _DEFAULT_SIZE))}

    def drawn(self, config: Any, seeds: Sequence[int]) -> dict[str, Tensor]:
        shape = (getattr(config, "num_channels", 3), *(image_size(config) or _DEFAULT_SIZE))
        images = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return {_PIXELS: torch.stack(images)}

    def of_graph(self, folder: Path, model: Any, num_rows: int) -> tuple[dict[str, Tensor], Sequence[int]]:
        processor = load_image_processor(Model(name_or_path=str(folder)), model.config)
        is_free = processor.size is None and takes_images_of(model, model.config, _GRAPH_SIZE)
        size = _GRAPH_SIZE if is_free else processor.size or image_size(model.config) or _GRAPH_SIZE
        pixels = torch.zeros(num_rows, processor.num_channels, *size)
        return {_PIXELS: pixels}, (0, 2, 3) if is_free else (0,)
