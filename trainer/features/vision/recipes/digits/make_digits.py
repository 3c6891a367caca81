"""Makes the digits: `train.parquet` and `validation.parquet` beside this file.

Each image is one of the characters 0 to 9 in the font that Pillow brings, of some size, turned, moved, stretched and
covered with noise, each as its index says. The images are the same whenever it is run, given the versions named in
`README.md`:

    python recipes/digits/make_digits.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFont

FOLDER = Path(__file__).parent
SIZE = 16  # height and width
SPLITS = {"train": (0, 3000), "validation": (3000, 500)}  # first index, number
LEVELS = 16  # of brightness: what is written then is small


def image(index: int) -> tuple[np.ndarray, int]:
    """The image of an index, `[height, width]` of values from 0 to 255, and its digit."""
    random = np.random.Generator(np.random.Philox(key=index))
    digit = int(random.integers(10))
    large, middle = 4 * SIZE, 2 * SIZE  # drawn four times as large, and reduced
    glyph = Image.new("L", (large, large))
    font = ImageFont.load_default(float(random.uniform(48, 64)))
    ImageDraw.Draw(glyph).text((middle, middle), str(digit), fill=255, font=font, anchor="mm")
    angle, shear, stretch = random.normal(0, 0.15), random.normal(0, 0.15), np.exp(random.normal(0, 0.12))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = turn @ np.array([[stretch, shear], [0, 1 / stretch]])
    centre = np.array([middle, middle])
    move = centre - matrix @ (centre + random.normal(0, 2.5, 2))
    coefficients = (*matrix[0], move[0], *matrix[1], move[1])
    moved = glyph.transform((large, large), Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)
    values = np.asarray(moved.resize((SIZE, SIZE), Image.Resampling.BOX), np.float64)
    noisy = values * random.uniform(0.5, 1) + random.normal(0, 16, values.shape)
    step = 256 // LEVELS
    return (noisy.clip(0, 255) // step * step).astype(np.uint8), digit


def rows(first: int, number: int) -> Iterator[dict[str, object]]:
    for index in range(first, first + number):
        pixels, digit = image(index)
        yield {"image": pixels.tolist(), "label": digit}


def main() -> None:
    schema = pa.schema([("image", pa.list_(pa.list_(pa.uint8()))), ("label", pa.int64())])
    for name, (first, number) in SPLITS.items():
        table = pa.Table.from_pylist(list(rows(first, number)), schema)
        pq.write_table(table, FOLDER / f"{name}.parquet", compression="zstd", compression_level=19)


if __name__ == "__main__":
    main()
