"""The keys of prepared rows: each part of a tokenizer or a task has a new key, or equal rows."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache

import datasets
import numpy as np
import pytest
import transformers
from transformers import AutoTokenizer

from trainer.data import cache as cache_module
from trainer.data.sources import Split
from trainer.data.tokenised_split import encode_split
from trainer.features.masked_lm.section import MaskedLM
from trainer.recipe.schema import CausalLM, SequenceClassification, SequenceRegression
from trainer.tasks.registry import build_task

ROWS = {
    "text": ["the file is open", "a name", "the end of the file"],
    "other": ["a file", "the name is open", "a"],
    "label": ["no", "yes", "no"],
    "number": [0.5, 1.5, 1.0],
    "lists": [["a"], ["a", "b"], []],
    "words": [["the", "file"], ["a", "name"], ["the", "end"]],
    "tags": [["O", "B-x"], ["O", "B-y"], ["B-x", "O"]],
    "answers": [{"text": [word], "answer_start": [at]} for word, at in (("open", 12), ("a", 0), ("file", 15))],
    "choices": [["a name", "the file"], ["a", "open"], ["the end", "is"]],
    "right": [0, 1, 1],
    "messages": [
        [{"role": "user", "content": "the file"}, {"role": "assistant", "content": "is open"}] * 2,
        [{"role": "system", "content": "a name"}, {"role": "assistant", "content": "a name is open"}],
        [{"role": "user", "content": "is"}, {"role": "assistant", "content": "the end"}],
    ],
    "image": [np.random.default_rng(row).integers(0, 256, (9, 7, 3)).tolist() for row in range(3)],
}
TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    "<pad>",
    "<mask>",
    "<x>",
    "a",
    "b",
    "the",
    "file",
    "is",
    "open",
    "name",
    "end",
    "[",
    "]",
]
TEMPLATE = (
    "{{ bos_token }}{{ unk_token }}{% for m in messages %}["
    "{% if m.role == 'assistant' %} {{ m.content }} {{ eos_token }}"
    "{% else %} {{ m.content }} {{ pad_token }} {{ mask_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[{% endif %}"
)
TASKS = {
    "classes": SequenceClassification(type="sequence_classification", text=["text", "other"]),
    "numbers": SequenceRegression(type="sequence_regression", text="text", label="number"),
    "masked": MaskedLM(type="masked_lm", text="text"),
    "texts": CausalLM(type="causal_lm", text="text", packing="documents"),
    "completions": CausalLM(type="causal_lm", prompt="text", completion="other"),
    "chats": CausalLM(type="causal_lm", messages="messages"),
}


@pytest.fixture
def folder(tmp_path):
    return written_tokenizer(tmp_path)


def written_tokenizer(tmp_path):
    """Write a tokenizer with each special token, a chat template and a further one, for tools."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(TOKENS)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> $B:1 </s>:1", [("<s>", 1), ("</s>", 2)]
    )
    roles = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "<pad>", "mask": "<mask>", "sep": "</s>", "cls": "<s>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        extra_special_tokens=["<x>"],
        model_max_length=64,
        **{f"{role}_token": token for role, token in roles.items()},
    )
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": TEMPLATE + "[ ]"}
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


class Outcomes:
    """Prepares rows twice, with a cache that earlier preparations wrote and with an empty one."""

    def __init__(self, folder):
        self._folder, self._fresh = folder, 0
        self.seen = set()

    def same(self, prepare) -> bool:
        """Return whether the cache gives the rows, or the error, that an empty one gives."""
        kept, fresh = self._folder / "kept", self._folder / "fresh"
        before = set(kept.glob("*/meta.json"))
        found = _outcome(prepare, kept)
        self.seen.add(found)
        if set(kept.glob("*/meta.json")) - before:
            return True  # a new key
        shutil.rmtree(fresh, ignore_errors=True)
        return _outcome(prepare, fresh) == found


def _outcome(prepare, folder) -> str:
    try:
        return prepare(folder).content_hash
    except Exception as error:  # the values of these tests make no sense
        return type(error).__name__


@pytest.fixture
def outcomes(tmp_path):
    return Outcomes(tmp_path)


@cache
def split_of(*columns):
    rows = datasets.Dataset.from_dict({name: ROWS[name] for name in columns or ROWS})
    return Split(rows, "`rows.jsonl`")


def resolved(section, config=None):
    task, split = build_task(section), split_of()
    return task.resolve(split.rows, split.where).for_configuration(config or transformers.GPT2Config())


def task_of(name):
    return resolved(TASKS[name])


def prepared(task, tokenizer, max_length=12):
    return lambda folder: encode_split(split_of(), task, tokenizer, max_length, folder)


def others(value) -> Iterator[object]:
    """Yield other values of about the same type."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value / 2 + 1
    elif isinstance(value, str):
        yield "other" if value in ROWS else "</s>" if value in TOKENS else f"{value} x"
    elif isinstance(value, tuple | list):
        yield from (value[::-1], [*value[1:], "<pad>"])
    elif isinstance(value, Mapping):
        yield from ({**value, name: other} for name in value for other in others(value[name]))
    elif is_dataclass(value):
        for field in fields(value):
            yield from (replace(value, **{field.name: other}) for other in others(getattr(value, field.name)))
    elif value is None:
        yield from ("other", True)
    elif isinstance(value, transformers.AddedToken):
        yield "<x>"


@pytest.mark.parametrize("name", TASKS)
def test_each_field_of_a_task(tmp_path, name):
    assert_each_field_has_a_key(tmp_path, TASKS[name])


def assert_each_field_has_a_key(tmp_path, section, config=None):
    """Change each field of a task; the prepared rows then have another key, or are the same."""
    tokenizer = AutoTokenizer.from_pretrained(written_tokenizer(tmp_path))
    assert_fields_are_known(tmp_path, resolved(section, config), lambda task: prepared(task, tokenizer))


def assert_fields_are_known(tmp_path, task, prepare):
    outcomes = Outcomes(tmp_path)
    assert outcomes.same(prepare(task))
    for field in fields(task):
        for other in others(getattr(task, field.name)):
            assert outcomes.same(prepare(replace(task, **{field.name: other}))), (field.name, other)
    assert len(outcomes.seen) > 1


@pytest.mark.parametrize("name", ["chats", pytest.param("classes", marks=pytest.mark.slow)])
def test_each_attribute_of_a_tokenizer(tmp_path, name):
    assert_each_attribute_has_a_key(tmp_path, task_of(name))


def assert_each_attribute_has_a_key(tmp_path, task):
    """Change each attribute of a tokenizer; the prepared rows then have another key, or are the same."""
    outcomes, tokenizer = Outcomes(tmp_path), AutoTokenizer.from_pretrained(written_tokenizer(tmp_path))
    assert outcomes.same(prepared(task, tokenizer))
    for attribute, value in vars(tokenizer).items():
        for other in others(value):
            changed = copy.deepcopy(tokenizer)
            setattr(changed, attribute, other)
            assert outcomes.same(prepared(task, changed)), (attribute, other)
    assert len(outcomes.seen) > 2


def changes(value) -> Iterator[object]:
    """Yield copies of a JSON value, each with one change of a field or an item in it."""
    if isinstance(value, dict | list):
        for place in value if isinstance(value, dict) else range(len(value)):
            for other in changes(value[place]):
                changed = copy.copy(value)
                changed[place] = other
                yield changed
    else:
        yield from others(value)


def test_each_field_of_each_file_of_a_tokenizer(folder, outcomes):
    tasks = [task_of("chats"), task_of("classes")]
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert {file.name for file in files} >= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    for file in [None, *files]:
        text = file.read_text() if file else ""
        edits = [""] if file is None else [f"{text} a"]
        if file and file.suffix == ".json":
            edits = [json.dumps(changed) for changed in changes(json.loads(text))]
        for edit in edits:
            if file is not None:
                file.write_text(edit)
            try:
                tokenizer = AutoTokenizer.from_pretrained(folder)
            except Exception:  # nor do the files
                continue
            assert all(outcomes.same(prepared(task, tokenizer)) for task in tasks), (file, edit)
        if file is not None:
            file.write_text(text)
    assert len(outcomes.seen) > 5


@pytest.mark.parametrize("change", ["chat_template.jinja", "eos_token"])
def test_another_template_or_end_token_makes_other_rows(folder, tmp_path, change):
    task = task_of("chats")
    first = prepared(task, AutoTokenizer.from_pretrained(folder))(tmp_path / "cache")
    if change == "eos_token":
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<x>"}))
    else:
        (folder / change).write_text(TEMPLATE.replace("[", "] ["))
    second = prepared(task, AutoTokenizer.from_pretrained(folder))(tmp_path / "cache")
    assert second.content_hash != first.content_hash


@pytest.mark.parametrize("library", ["tokenizers", "jinja2", "transformers"])
def test_the_versions_of_libraries(monkeypatch, library):
    assert_the_version_is_known(monkeypatch, task_of("chats"), library)


def assert_the_version_is_known(monkeypatch, task, library):
    def key():
        return cache_module.entry_key(task, (library,), rows="rows")

    before = key()
    monkeypatch.setattr(cache_module, "installed", lambda name: "0" if name == library else None)
    assert key() != before


def test_a_slow_tokenizer_is_known_by_its_files(tmp_path, outcomes):
    vocabulary = {"<unk>": 0, "a": 1, "b</w>": 2, "ab</w>": 3, "a</w>": 4, "the</w>": 5}
    config = {"tokenizer_class": "CTRLTokenizer", "unk_token": "<unk>", "pad_token": "<unk>"}
    task = task_of("numbers")
    split = Split(datasets.Dataset.from_dict({"text": ["ab a ab", "a"], "number": [0.5, 1.5]}), "`rows.jsonl`")
    for merges in ("#version\na b</w>\n\n", "#version\n\n"):
        for name, text in (("vocab.json", vocabulary), ("tokenizer_config.json", config)):
            (tmp_path / name).write_text(json.dumps(text))
        (tmp_path / "merges.txt").write_text(merges)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        assert not tokenizer.is_fast
        for _ in range(2):  # earlier calls fill its cache
            assert outcomes.same(lambda folder, own=tokenizer: encode_split(split, task, own, 8, folder))
        assert len(list((tmp_path / "kept").glob("*/meta.json"))) == len(outcomes.seen)
    assert len(outcomes.seen) == 2
