"""The key `model.quantization`: its rules beside an adapter, and models of a package without it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.training import TINY_DECODERS, tiny_recipe
from trainer.base import extensions
from trainer.base.errors import UsageError
from trainer.models.configuration import load_config
from trainer.models.registered_forms import form_of
from trainer.recipe.reading.rules import contradictions, message
from trainer.recipe.schema import Model

LORA = {"type": "lora", "rank": 2}


def problems(keys: dict[str, Any]) -> str:
    """Return the errors of rules on the section `model`."""
    return "; ".join(map(message, contradictions({"model": tiny_recipe(model=keys).model})))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"quantization": "nf4"}, r"`model\.quantization` is nf4, but quantised weights cannot be trained"),
        ({"adapter": {**LORA, "start": "loftq"}}, r"`model\.adapter\.start` is \"loftq\".*`model\.quantization`; set"),
        ({"adapter": {**LORA, "start": "pissa"}, "quantization": "int8"}, r"is \"pissa\", which quantises other"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(keys: dict[str, Any], words: str) -> None:
    assert re.search(words, problems(keys))


def test_other_models_have_no_form() -> None:
    plain = {"config": {"model_type": "llama"}, "adapter": LORA}
    form = form_of(Model.model_validate({**plain, "quantization": "int8"}))
    assert form is not None
    assert str(form) == "`model.quantization` int8"
    assert form_of(Model.model_validate(plain)) is None


def test_a_package_without_the_feature_reads_no_quantised_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    config = {**TINY_DECODERS["llama"], "architectures": ["LlamaForCausalLM"], "quantization_config": stored}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    monkeypatch.delitem(extensions._registered, ("weight_form", "model.quantization"))
    with pytest.raises(UsageError, match=r"\(bitsandbytes\), which cannot be read; name the model .* made from$"):
        load_config(Model.model_validate({"name_or_path": str(tmp_path), "adapter": LORA}), {})
    assert "but no key quantises any; set it to null" in problems({"adapter": {**LORA, "start": "loftq"}})
