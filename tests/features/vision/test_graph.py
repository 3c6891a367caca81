"""ONNX graphs of models of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig

from trainer.features.onnx.graph import _sample, to_onnx
from trainer.features.onnx.opener import open_folder
from trainer.features.vision.samples import _GRAPH_SIZE


def _sizes(**sizes: Any) -> dict[str, Any]:
    return {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, **sizes}


CROPPED = {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}}
UNCROPPED = {"size": {"shortest_edge": 32}, "do_center_crop": False}
SAMPLE_SIZE = dict(zip(("height", "width"), _GRAPH_SIZE, strict=True))
CONVNEXT = {"hidden_sizes": [4, 4, 4, 4], "depths": [1, 1, 1, 1], "image_size": 32}
RESNET = {"embedding_size": 4, "hidden_sizes": [4, 4], "depths": [1, 1]}
# The class of a processor, its settings, the model, and the sizes of the dimensions; None: the image decides.
IMAGES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], tuple[int, int] | None]] = {
    "crop after a larger size": (
        "ViT",
        {"size": {"height": 40, "width": 40}, "do_center_crop": True, "crop_size": {"height": 32, "width": 32}},
        "vit",
        _sizes(image_size=32, patch_size=16),
        (32, 32),
    ),
    "a share of the edge": (
        "ConvNext",
        {"size": {"shortest_edge": 32}, "crop_pct": 0.875},
        "convnext",
        CONVNEXT,
        (32, 32),
    ),
    "crop after an edge": ("Bit", CROPPED, "dinov2", _sizes(image_size=32, patch_size=16), (32, 32)),
    "a mobile network": ("MobileNetV2", CROPPED, "mobilenet_v2", {"depth_multiplier": 0.1}, (32, 32)),
    "an edge without a crop": ("Bit", UNCROPPED, "resnet", RESNET, None),
    "a size that the model does not read": ("Bit", UNCROPPED, "convnext", CONVNEXT, None),
    "a size that the model reads": ("Bit", UNCROPPED, "vit", _sizes(image_size=32, patch_size=16), (32, 32)),
    "another size than the model's": ("ViT", {"size": {"height": 40, "width": 40}}, "convnext", CONVNEXT, (40, 40)),
    "the sample's size": ("ViT", {"size": SAMPLE_SIZE}, "vit", _sizes(image_size=[96, 64], patch_size=32), (96, 64)),
}


def _image_folder(folder: Path, name: str) -> Any:
    kind, settings, model_type, sizes, _ = IMAGES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **sizes)
    model = transformers.AutoModelForImageClassification.from_config(config).eval()
    model.save_pretrained(folder)
    getattr(transformers, f"{kind}ImageProcessorPil")(**settings).save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", IMAGES)
def test_a_graph_reads_the_images_of_its_processor(tmp_path: Path, name: str) -> None:
    size = IMAGES[name][-1]
    model = _image_folder(tmp_path, name)
    inputs, free = _sample(tmp_path, model)
    expected = (size, (0,)) if size else (_GRAPH_SIZE, (0, 2, 3))
    assert (tuple(inputs["pixel_values"].shape[2:]), free) == expected


@pytest.mark.nightly
@pytest.mark.parametrize("name", IMAGES)
def test_images(tmp_path: Path, name: str) -> None:
    model = _image_folder(tmp_path, name)
    to_onnx(tmp_path, type(model), None)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    generator = np.random.default_rng(0)
    width = 37 if name == "a size that the model reads" else 53
    for rows in (1, 3):
        images = [generator.integers(0, 256, (37, width, 3), np.uint8) for _ in range(rows)]
        inputs = processor(images, input_data_format="channels_last", return_tensors="np")
        found = open_folder({"folder": str(tmp_path)})({"pixel_values": inputs["pixel_values"]})["logits"]
        with torch.no_grad():
            expected = model(torch.from_numpy(inputs["pixel_values"])).logits
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=2e-6)
