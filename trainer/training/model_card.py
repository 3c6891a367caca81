"""The model card: the `README.md` of an exported folder, for people and, in its head, for the hub.

It is written from the facts of a checkpoint, so that a run and `trainer export` write the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, though not in its `__all__`
from transformers.utils import CONFIG_NAME

from trainer.base.disk import replace_folder
from trainer.base.text import for_terminal, masked
from trainer.checkpoint.counters import Progress
from trainer.models.peft_folder import ADAPTER_CONFIG_NAME
from trainer.recipe.reading.trained import RECIPE_FILE
from trainer.tasks.registry import LIBRARIES, PIPELINE_TAGS, TEXT_TO_TEXT, WITHOUT_PIPELINE
from trainer.training.certificate import Certificate
from trainer.training.plain_reader import ONNX_NAME

CARD_NAME = "README.md"


def complete_folder(
    temporary: Path,
    place: Path,
    origin: Mapping[str, Any],
    progress: Progress,
    certificate: Certificate | None = None,
) -> None:
    """Add card and recipe to a new Hugging Face folder, and put the folder in its place.

    Args:
        temporary: The folder with the model, beside `place`.
        place: The final folder, which is replaced as a whole.
        origin: The origin in a checkpoint's facts.
        progress: The progress of the training when it had these weights.
        certificate: The comparison with the trained model; None: there was none.

    Raises:
        OSError: It cannot be written.
    """
    origin = masked(origin)  # an earlier version could save an address with a password
    write_card(temporary, origin, progress, certificate)
    if recipe := _part(origin, "recipe"):  # for `trainer evaluate` and `trainer predict`
        (temporary / RECIPE_FILE).write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
    replace_folder(temporary, place)


def write_card(
    folder: Path, origin: Mapping[str, Any], progress: Progress, certificate: Certificate | None = None
) -> None:
    """Write the card of a Hugging Face folder; arguments and errors are those of `complete_folder`."""
    config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    file = folder / ADAPTER_CONFIG_NAME
    adapter = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    card = _card(folder, config, adapter, origin, progress)
    if certificate is not None:
        card += "\n" + "\n".join(["## Verification", "", *certificate.lines()]) + "\n"
    (folder / CARD_NAME).write_text(card, encoding="utf-8")


def _card(
    folder: Path,
    config: Mapping[str, Any],
    adapter: Mapping[str, Any] | None,
    origin: Mapping[str, Any],
    progress: Progress,
) -> str:
    recipe = _part(origin, "recipe")
    layout, versions = _part(origin, "layout"), _part(origin, "versions")
    task_type = str(_part(recipe, "task").get("type"))
    tag = PIPELINE_TAGS.get(task_type)
    name = _plain(recipe.get("name", "model"))
    trained = f"{progress.step:,} optimizer steps, {progress.samples:,} rows"
    trained += f", {progress.tokens:,} tokens" if progress.tokens else ""
    architecture = config["architectures"][0]
    model = f"A `{architecture}` in `{config['dtype']}`"
    lines = _use(architecture, task_type, tag, _part(recipe, "task").get("prefix") or "")
    packages = "\n".join(f"- {_plain(package)} {_plain(version)}" for package, version in sorted(versions.items()))
    as_json = json.dumps(recipe, indent=2).replace("\x7f", "\\u007f")
    if adapter is not None:
        model = f"A LoRA adapter of PEFT in `{config['dtype']}` for the `{architecture}` of its base model"
        lines = _use_adapter(architecture, adapter)
    if (folder / ONNX_NAME).is_file():
        model = f"A `{architecture}` as a graph of ONNX in `{config['dtype']}`"
        lines = _use_graph(tag, config)
    use = "\n".join(lines)
    decay = _part(recipe, "training").get("ema_decay")
    averages = f"\n- weights: exponential moving averages with a decay of {_plain(decay)}" if decay is not None else ""
    text = f"""---
{_head(recipe, task_type, tag, adapter is not None).to_yaml().strip()}
---

# {name}

{model}, trained with `trainer`.

- task: {f"`{task_type}`" if tag else "unknown"}
- trained for: {trained}{averages}
- best evaluation: {_best(progress)}
- layout: {_layout(recipe, layout)}

## Use

```python
{use}
```

## Recipe

```json
{as_json}
```

## Versions

{packages}"""
    return text.rstrip() + "\n"


def _part(values: Any, key: str) -> Mapping[str, Any]:
    part = values.get(key) if isinstance(values, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _plain(value: Any) -> str:
    """Return a value of a checkpoint on one line, without HTML, links, code spans and control characters."""
    text = for_terminal(" ".join(str(value).split()))
    for mark, safe in (("&", "&amp;"), ("<", "&lt;"), ("[", "\\["), ("`", "'")):
        text = text.replace(mark, safe)
    return text


def _head(recipe: Mapping[str, Any], task_type: str, tag: str | None, is_adapter: bool) -> ModelCardData:
    """Return the metadata for the hub; it leaves out keys that are None."""
    data = _part(recipe, "data")
    dataset = _hub_name(data.get("name")) if data.get("source") == "hub" else None
    library = LIBRARIES.get(task_type, "transformers")
    return ModelCardData(
        library_name="peft" if is_adapter else library,
        base_model=_hub_name(_part(recipe, "model").get("name_or_path")),
        datasets=[dataset] if dataset else None,
        pipeline_tag=tag,
        tags=[task_type.replace("_", "-")] if tag else None,
    )


def _hub_name(name: Any) -> str | None:
    """Return a name that the hub can look up; None for a folder, which a recipe holds by its absolute path."""
    if not isinstance(name, str) or os.path.isabs(name):
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _best(progress: Progress) -> str:
    best = progress.best
    return f"{_plain(best.name)} {best.value:.6g} at step {best.step:,}" if best else "none"


def _layout(recipe: Mapping[str, Any], layout: Mapping[str, Any]) -> str:
    strategy = _part(recipe, "parallel").get("strategy")
    degrees = [f"{_plain(axis)} {_plain(degree)}" for axis, degree in layout.items() if degree != 1] or ["one process"]
    return f"{' x '.join(degrees)}, `{_plain(strategy)}`, `{_plain(recipe.get('precision'))}`"


def _use_graph(tag: str | None, config: Mapping[str, Any]) -> list[str]:
    takes_images = tag == PIPELINE_TAGS["image_classification"]
    processor, rows = ("AutoImageProcessor", "[image]") if takes_images else ("AutoTokenizer", '["..."]')
    further = []
    if tag == PIPELINE_TAGS["multiple_choice"]:
        rows = '["...", "..."], ["one choice", "another"], padding=True'
        further = ["inputs = {name: tensor[None] for name, tensor in inputs.items()}"]
    if tag == TEXT_TO_TEXT:
        first = _plain(config.get("decoder_start_token_id"))
        further = [f'inputs["decoder_input_ids"] = [[{first}]]  # and the tokens that were generated so far']
    return [
        "from onnxruntime import InferenceSession",
        f"from transformers import {processor}",
        "",
        'folder = "path/to/this/folder"',
        f'inputs = {processor}.from_pretrained(folder)({rows}, return_tensors="np")',
        *further,
        f'session = InferenceSession(f"{{folder}}/{ONNX_NAME}")',
        "outputs = session.run(None, {one.name: inputs[one.name] for one in session.get_inputs()})",
        "print(dict(zip([one.name for one in session.get_outputs()], outputs)))",
    ]


def _use_adapter(architecture: str, adapter: Mapping[str, Any]) -> list[str]:
    arguments = [json.dumps(_hub_name(adapter["base_model_name_or_path"]) or "path/to/the/base/model")]
    arguments += [f"revision={json.dumps(adapter['revision'])}"] if adapter["revision"] else []
    return [
        "from peft import PeftModel",
        f"from transformers import AutoConfig, {architecture}",
        "",
        'folder = "path/to/this/folder"',
        f"base = {architecture}.from_pretrained({', '.join(arguments)}, config=AutoConfig.from_pretrained(folder))",
        "model = PeftModel.from_pretrained(base, folder)",
    ]


def _use(architecture: str, task_type: str, tag: str | None, prefix: str) -> list[str]:
    if task_type == "reranker":
        return [
            "from sentence_transformers import CrossEncoder",
            "",
            'scores = CrossEncoder("path/to/this/folder").predict([("a query", "a document")])',
        ]
    if LIBRARIES.get(task_type) == "sentence-transformers":
        return [
            "from sentence_transformers import SentenceTransformer",
            "",
            'embed = SentenceTransformer("path/to/this/folder").encode',
        ]
    if tag == TEXT_TO_TEXT:  # transformers 5 has no such pipeline
        return [
            "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer",
            "",
            'model = AutoModelForSeq2SeqLM.from_pretrained("path/to/this/folder")',
            'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")',
            f'inputs = tokenizer({json.dumps(f"{prefix}...")}, return_tensors="pt")',
            "tokens = model.generate(inputs.input_ids, attention_mask=inputs.attention_mask)",
            "print(tokenizer.decode(tokens[0], skip_special_tokens=True))",
        ]
    if task_type == "multiple_choice":
        return [
            f"from transformers import AutoTokenizer, {architecture}",
            "",
            f'model = {architecture}.from_pretrained("path/to/this/folder")',
            'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")',
            'context, choices = "...", ["...", "..."]  # a question stands before each choice',
            'inputs = tokenizer([context] * len(choices), choices, padding=True, return_tensors="pt")',
            "scores = model(**{name: tensor[None] for name, tensor in inputs.items()}).logits[0]",
            "print(choices[int(scores.argmax())])",
        ]
    if tag is None or tag in WITHOUT_PIPELINE:
        return [
            f"from transformers import {architecture}",
            "",
            f'model = {architecture}.from_pretrained("path/to/this/folder")',
        ]
    return ["from transformers import pipeline", "", f'predict = pipeline("{tag}", "path/to/this/folder")']
