"""Image processor of a model: the checkpoint's, or one derived from a configuration; never torchvision's.

A processor of transformers resizes and crops with 8 bits per channel, then rescales and normalises. The first half runs
once and its result is kept; the second half runs for each batch. Other processors are refused.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch import nn

from trainer.base.errors import UsageError
from trainer.models.hub_files import not_found
from trainer.recipe.schema import Model

_MODES = {1: "L", 3: "RGB"}  # Pillow modes by the model's number of channels
_DEFAULT_MEAN = _DEFAULT_STD = 0.5
_PROBES = ((37, 53), (53, 37), (131, 517))
"""Heights and widths, which become equal if the processor resizes to one size. The last differ in multiples of 64."""
_TOLERANCE = 1e-5  # for normalised values, summed in another order


class ImageProcessor:
    """Conversion of an image to a model's input, except for rescaling and normalisation.

    Args:
        processor: a processor of transformers, with Pillow and numpy.
        num_channels: the number of channels that the model reads, 1 or 3.

    Raises:
        UsageError: the processor does not resize first and normalise afterwards.
    """

    def __init__(self, processor: Any, num_channels: int) -> None:
        self._processor = processor
        self.num_channels = num_channels
        self.scale = float(processor.rescale_factor) if processor.do_rescale else 1.0
        self.mean = self._of_channels(processor.image_mean if processor.do_normalize else None, 0.0)
        self.std = self._of_channels(processor.image_std if processor.do_normalize else None, 1.0)
        self.size = self._probe()

    @property
    def fingerprint(self) -> str:
        """A string that changes whenever the array of an image would change."""
        return json.dumps([self.num_channels, self._processor.to_dict()], sort_keys=True, default=str)

    def __call__(self, image: PIL.Image.Image) -> NDArray[np.uint8]:
        """Return the resized image `[channels, height, width]` in the model's channels, without an alpha channel."""
        return self._halved(self.pixels(image))

    def pixels(self, image: PIL.Image.Image) -> NDArray[np.uint8]:
        """Return an image `[height, width]` or `[height, width, 3]` in the model's channels."""
        return np.asarray(image.convert(_MODES[self.num_channels]))

    def save(self, folder: Path) -> None:
        """Write `preprocessor_config.json`.

        Raises:
            OSError: the file cannot be written.
        """
        self._processor.save_pretrained(folder)

    def _of_channels(self, values: Any, default: float) -> tuple[float, ...]:
        listed = list(values) if isinstance(values, list | tuple) else [default if values is None else values]
        listed = listed * self.num_channels if len(listed) == 1 else listed
        if len(listed) != self.num_channels:
            raise UsageError(
                f"the image processor of the model normalises {len(listed)} channels (`image_mean`, `image_std`), but"
                f" the model reads {self.num_channels}; correct its `preprocessor_config.json`"
            )
        return tuple(map(float, listed))

    def _halved(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the result before rescaling; `pixels` is `[height, width]` or `[height, width, 3]`."""
        # Pixels of 8 bits before the rescaling, so that a cache holds one byte for each channel.
        resized = self._process(pixels, do_rescale=False, do_normalize=False)
        # A processor with fractions here fails the comparison in `_probe`, so the conversion loses nothing.
        return resized.astype(np.uint8, casting="unsafe")

    def _process(self, pixels: NDArray[np.uint8], **options: bool) -> NDArray[Any]:
        with_channels = pixels if pixels.ndim == 3 else pixels[:, :, None]
        features = self._processor(with_channels, input_data_format="channels_last", return_tensors="np", **options)
        processed: NDArray[Any] = features["pixel_values"][0]
        return processed

    def _probe(self) -> tuple[int, int] | None:
        """Check the processor, and return the height and width of every image, or None if they depend on the image."""
        sizes = set()
        for height, width in _PROBES:
            values = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
            pixels = values if self.num_channels == 3 else values[:, :, 0]
            # Both halves, one after the other, must give the whole: only then may the first half be cached.
            whole, halved = self._process(pixels), self._halved(pixels)
            by_channel = (-1, 1, 1)
            mean, std = np.array(self.mean).reshape(by_channel), np.array(self.std).reshape(by_channel)
            if whole.shape != halved.shape or np.abs((halved * self.scale - mean) / std - whole).max() > _TOLERANCE:
                raise UsageError(
                    f"the model's image processor ({type(self._processor).__name__}) does not resize images first and"
                    " then rescale and normalise their values by constants, which is the only kind that can be used;"
                    " use another model"
                )
            sizes.add((int(halved.shape[1]), int(halved.shape[2])))
        return sizes.pop() if len(sizes) == 1 else None


def load_image_processor(recipe: Model, config: Any) -> ImageProcessor:
    """Load the image processor of the recipe's model, which `config` describes.

    A model with random weights gets a processor that resizes to the configuration's `image_size`, if present. This
    processor scales values to the range from -1 to 1.

    Raises:
        UsageError: the model has no processor, the processor cannot be loaded, or it does not fit the model.
    """
    channels = getattr(config, "num_channels", None)
    if channels not in _MODES:
        key = "model.config" if recipe.is_random else "model.name_or_path"
        raise UsageError(
            f"`{key}` must be a model that reads images of 1 or 3 channels, but the configuration of a"
            f" {config.model_type} has `num_channels` {channels}; use a model such as vit"
        )
    size = image_size(config)
    if recipe.is_random:
        return ImageProcessor(_default_processor(size, channels), channels)
    processor = ImageProcessor(_load(recipe), channels)
    if processor.size not in (None, size) and size is not None and not _takes(config, processor.size):
        raise UsageError(
            f"`model.name_or_path` is {recipe.name_or_path!r}: its image processor must make images of"
            f" {size} (height, width), which its model reads, but makes {processor.size}; edit its"
            " `preprocessor_config.json`"
        )
    return processor


def image_size(config: Any) -> tuple[int, int] | None:
    """Return the height and width that a configuration states; None without any."""
    size = getattr(config, "image_size", None)
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1])) if size else None


def takes_images_of(model: nn.Module, config: Any, size: tuple[int, int]) -> bool:
    """Return whether a model computes images of a height and width, by a pass on its device.

    Its configuration does not tell: ConvNeXt and Swin have an `image_size` and a `patch_size`, but read other sizes.
    """
    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            model(pixel_values=torch.zeros(1, config.num_channels, *size, device=device))
    except (RuntimeError, ValueError):
        return False
    return True


def _takes(config: Any, size: tuple[int, int]) -> bool:
    from transformers import AutoModelForImageClassification

    with torch.device("meta"):
        # A copy, because a model keeps its configuration, and may change it.
        model = AutoModelForImageClassification.from_config(copy.deepcopy(config)).eval()
    return takes_images_of(model, config, size)


def _default_processor(size: tuple[int, int] | None, num_channels: int) -> Any:
    from transformers import ViTImageProcessorPil  # imported here, because the import is slow

    return ViTImageProcessorPil(
        do_resize=size is not None,
        size=None if size is None else {"height": size[0], "width": size[1]},
        do_convert_rgb=num_channels == 3,  # for users of the exported folder
        image_mean=[_DEFAULT_MEAN] * num_channels,
        image_std=[_DEFAULT_STD] * num_channels,
    )


def _load(recipe: Model) -> Any:
    from transformers import AutoImageProcessor

    name = str(recipe.name_or_path)
    try:
        processor = AutoImageProcessor.from_pretrained(
            name, revision=recipe.revision or "main", backend="pil", trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise not_found("model.name_or_path", name, error) from error
    if getattr(processor, "backend", None) != "pil":
        raise UsageError(
            f"`model.name_or_path` is {name!r}, but its image processor ({type(processor).__name__}) needs torchvision;"
            " use a model with a processor that works on Pillow"
        )
    return processor
