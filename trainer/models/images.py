"""The image processor of a model: the checkpoint's own, or one that follows from a configuration; never torchvision's.

A processor of transformers resizes and crops on 8 bits a channel, then rescales and normalises. The first half is done
once and kept, the second when a batch is made, so a processor that does not fall into these halves is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainer.base.errors import UsageError
from trainer.models.building import load_config, not_found
from trainer.recipe.schema import Model

if TYPE_CHECKING:
    import PIL.Image

_MODES = {1: "L", 3: "RGB"}  # Pillow's, by the channels that a model reads
_DEFAULT_MEAN = _DEFAULT_STD = 0.5
_PROBES = ((37, 53), (53, 37))  # height and width: whatever resizes to one size makes these equal
_TOLERANCE = 1e-5  # of a normalised value: sums in another order


class ImageProcessor:
    """Makes of an image what a model reads, up to the normalisation.

    Args:
        processor: of transformers, on Pillow and numpy.
        num_channels: that the model reads: 1 or 3.

    Raises:
        UsageError: the processor does not resize first and normalise then.
    """

    def __init__(self, processor: Any, num_channels: int) -> None:
        self._processor = processor
        self._num_channels = num_channels
        self.scale = float(processor.rescale_factor) if processor.do_rescale else 1.0
        self.mean = self._of_channels(processor.image_mean if processor.do_normalize else None, 0.0)
        self.std = self._of_channels(processor.image_std if processor.do_normalize else None, 1.0)
        self.size = self._probe()

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same image would become another array."""
        return json.dumps([self._num_channels, self._processor.to_dict()], sort_keys=True, default=str)

    def __call__(self, image: PIL.Image.Image) -> NDArray[np.uint8]:
        """The image resized, in the model's channels: `[channels, height, width]`; an alpha channel is left out."""
        return self._halved(np.asarray(image.convert(_MODES[self._num_channels])))

    def save(self, folder: Path) -> None:
        """Writes `preprocessor_config.json`.

        Raises:
            OSError: it cannot be written.
        """
        self._processor.save_pretrained(folder)

    def _of_channels(self, values: Any, default: float) -> tuple[float, ...]:
        listed = list(values) if isinstance(values, list | tuple) else [default if values is None else values]
        listed = listed * self._num_channels if len(listed) == 1 else listed
        if len(listed) != self._num_channels:
            raise UsageError(
                f"the image processor of the model normalises {len(listed)} channels (`image_mean`, `image_std`), but"
                f" the model reads {self._num_channels}; mend its `preprocessor_config.json`"
            )
        return tuple(map(float, listed))

    def _halved(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """What the processor does before it rescales; `pixels` are `[height, width]` or `[height, width, 3]`."""
        resized = self._process(pixels, do_rescale=False, do_normalize=False)
        return resized.astype(np.uint8, casting="unsafe")

    def _process(self, pixels: NDArray[np.uint8], **options: bool) -> NDArray[Any]:
        with_channels = pixels if pixels.ndim == 3 else pixels[:, :, None]
        features = self._processor(with_channels, input_data_format="channels_last", return_tensors="np", **options)
        processed: NDArray[Any] = features["pixel_values"][0]
        return processed

    def _probe(self) -> tuple[int, int] | None:
        """The height and width that every image gets; None: that depends on the image."""
        sizes = set()
        for height, width in _PROBES:
            values = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
            pixels = values if self._num_channels == 3 else values[:, :, 0]
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


def load_image_processor(recipe: Model) -> ImageProcessor:
    """The image processor of the recipe's model.

    With random weights: to the `image_size` of the configuration, if it names one, and values from -1 to 1.

    Raises:
        UsageError: there is none, it cannot be reached, or it does not fit the model.
    """
    config = load_config(recipe, {})
    channels = getattr(config, "num_channels", None)
    if channels not in _MODES:
        key = "model.config" if recipe.config is not None else "model.name_or_path"
        raise UsageError(
            f"`{key}` must be a model that reads images of 1 or 3 channels, but the configuration of a"
            f" {config.model_type} says `num_channels` {channels}; use a model such as vit"
        )
    size = _image_size(config)
    if recipe.config is not None:
        return ImageProcessor(_default_processor(size, channels), channels)
    processor = ImageProcessor(_load(recipe), channels)
    if size is not None and hasattr(config, "patch_size") and processor.size not in (None, size):
        raise UsageError(
            f"`model.name_or_path` is {recipe.name_or_path!r}, whose image processor makes images of"
            f" {processor.size}, but whose model reads {size} (height, width); mend its `preprocessor_config.json`"
        )
    return processor


def _image_size(config: Any) -> tuple[int, int] | None:
    size = getattr(config, "image_size", None)
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1])) if size else None


def _default_processor(size: tuple[int, int] | None, num_channels: int) -> Any:
    from transformers import ViTImageProcessorPil  # like the one below, it takes long to import

    return ViTImageProcessorPil(
        do_resize=size is not None,
        size=None if size is None else {"height": size[0], "width": size[1]},
        do_convert_rgb=num_channels == 3,  # for whoever opens the exported folder
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
            f"`model.name_or_path` is {name!r}, whose image processor ({type(processor).__name__}) needs torchvision;"
            " use a model whose processor works on Pillow"
        )
    return processor
