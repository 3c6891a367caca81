"""Every test of this folder that shows an error of several keys requires that it names each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainer.recipe.paths import dotted
from trainer.recipe.reading import loading
from trainer.recipe.reading.rules import message
from trainer.recipe.schema.section import Contradiction


@pytest.fixture(autouse=True, scope="module")
def _each_key_is_named() -> Iterator[None]:
    def checked(contradiction: Contradiction) -> str:
        text = message(contradiction)
        assert [key for key in map(dotted, contradiction.keys) if f"`{key}`" not in text] == [], text
        return text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "message", checked)
        yield
