from __future__ import annotations

import copy
from itertools import chain

import datasets
import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors
from torch import nn

from tests.helpers.training import (
    NUM_SPECIAL,
    TINY_DECODERS,
    VOCABULARY,
    build_tiny,
    sgd_sections,
    tiny_documents,
    tiny_recipe,
)
from trainer.base.errors import DataError, UsageError
from trainer.parallel.dropout import MicrobatchKey
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.recipe.schema import CausalLM
from trainer.tasks.causal_lm import DECODERS
from trainer.tasks.registry import build_task
from trainer.tasks.text.columns import tokenise

WHERE = "`rows.jsonl`"
TEXTS = ["a file is read", "open", "", "the name of a directory that holds many files"]


def task_of(**keys):
    return build_task(CausalLM(type="causal_lm", **keys))


def rows_of(**columns):
    return datasets.Dataset.from_dict(columns)


def encode(task, rows, tokenizer, max_length=100, batch=2):
    """Return the rows of `batch` rows at a time, and of the packer."""
    task = task.resolve(rows, WHERE)
    packer = task.packer(max_length)
    parts = []
    for first in range(0, len(rows), batch):
        some = rows.select(range(first, min(first + batch, len(rows))))
        features = task.encode(some, tokenizer, max_length, WHERE, first)
        parts.append(packer.add(features) if packer else features)
    if packer:
        parts.append(packer.finish())
    return {name: list(chain.from_iterable(part.get(name, []) for part in parts)) for name in parts[0] | parts[-1]}


def byte_tokenizer(trim_offsets):
    """Return a byte-level BPE, with a token ` no`."""
    special = ["<s>", "</s>", "<pad>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "\u0120n", "\u0120no"]
    merges = [("\u0120", "n"), ("\u0120n", "o")]
    backend = tokenizers.Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=trim_offsets)
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def documents_of(tokenizer):
    return [tokenizer(text)["input_ids"] for text in TEXTS if text]


def test_a_long_text_continues_in_the_next_row_and_every_token_after_the_first_is_predicted_once(tokenizer):
    encoded = encode(task_of(text="text"), rows_of(text=TEXTS), tokenizer, max_length=4)
    long = documents_of(tokenizer)[2]
    assert encoded["input_ids"][-3:] == [long[0:4], long[4:8], long[8:-1]]
    assert encoded["labels"][-3:] == [long[1:5], long[5:9], long[9:]]
    assert sum(map(len, encoded["labels"])) == sum(len(ids) - 1 for ids in documents_of(tokenizer))


@pytest.mark.parametrize("batch", [1, 4])
def test_packed_rows_are_full_and_positions_restart(tokenizer, batch):
    encoded = encode(task_of(text="text", packing="documents"), rows_of(text=TEXTS), tokenizer, 7, batch)
    documents = documents_of(tokenizer)
    assert [len(ids) for ids in encoded["input_ids"][:-1]] == [7] * (len(encoded["input_ids"]) - 1)
    assert list(chain(*encoded["input_ids"])) == list(chain(*(ids[:-1] for ids in documents)))
    assert list(chain(*encoded["labels"])) == list(chain(*(ids[1:] for ids in documents)))
    first, second = len(documents[0]) - 1, len(documents[1]) - 1
    assert encoded["position_ids"][0] == [*range(first), *range(7 - first)]
    assert encoded["position_ids"][1][: second - 7 + first + 1] == [*range(second - 7 + first), 0]


@pytest.mark.parametrize("batch", [1, 4])
def test_packed_rows_are_one_stream(tokenizer, batch):
    encoded = encode(task_of(text="text", packing="joined"), rows_of(text=TEXTS), tokenizer, 6, batch)
    stream = list(chain(*documents_of(tokenizer)))
    assert "position_ids" not in encoded
    assert [len(ids) for ids in encoded["input_ids"][:-1]] == [6] * (len(encoded["input_ids"]) - 1)
    assert list(chain(*encoded["input_ids"])) == stream[:-1]
    assert list(chain(*encoded["labels"])) == stream[1:]


def test_only_completions_are_trained(tokenizer):
    rows = rows_of(prompt=["open the", "", "a direct"], completion=[" file", "read", "ory"])
    encoded = encode(task_of(prompt="prompt", completion="completion"), rows, tokenizer)
    end = tokenizer.sep_token_id
    for row, ids, labels in zip(rows, encoded["input_ids"], encoded["labels"], strict=True):
        prompt = tokenizer(row["prompt"])["input_ids"][:-1]
        assert ids[: len(prompt)] == prompt  # as it has alone, even if a token could span the border
        whole = [*ids, end]
        assert labels == [IGNORED_LABEL] * (len(prompt) - 1) + whole[len(prompt) :]
        assert tokenizer.decode(whole[len(prompt) : -1]) == row["completion"].strip()


@pytest.mark.parametrize("blank", ["", " ", "\n"])
@pytest.mark.parametrize(
    ("frame", "texts"), [("{} $A", ["<s>no", "no", "<s>"]), ("{} $A </s>", ["<s>no</s>", "no</s>", "<s>no", "no", ""])]
)
def test_special_tokens_are_not_added_twice(frame, texts, blank):
    tokenizer = byte_tokenizer(trim_offsets=False)
    special = [("<s>", 0), ("</s>", 1)]
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single=frame.format("<s>"), special_tokens=special
    )
    start, end = [0], [1]
    for text in texts:
        body = tokenizer(text.removeprefix("<s>").removesuffix("</s>"), add_special_tokens=False)["input_ids"]
        text = text.replace("<s>", blank + "<s>").replace("</s>", "</s>" + blank)
        if body:
            whole = encode(task_of(text="text"), rows_of(text=[text]), tokenizer)
            assert [*whole["input_ids"][0], whole["labels"][0][-1]] == [*start, *body, *end]
        behind = end if "</s>" in frame else []
        for prefix in ("", " n"):
            made = tokenizer(prefix, add_special_tokens=False)["input_ids"]
            found = tokenise(rows_of(text=[text]), ["text"], tokenizer, 9, WHERE, 0, prefix)
            assert found["input_ids"] == [[*start, *made, *body, *behind]]
        task = task_of(prompt="prompt", completion="completion")
        prompt = text.rstrip().removesuffix("</s>")
        (ids,) = encode(task.without_labels(), rows_of(prompt=[prompt]), tokenizer)["input_ids"]
        assert ids == [*start, *body]
        rows = rows_of(
            prompt=[prompt, "", prompt], completion=[f" n</s>{blank}", f"{text.rstrip()} n", f"{blank}<s> n"]
        )
        pair = encode(task, rows, tokenizer)
        completion = tokenizer(" n", add_special_tokens=False)["input_ids"]
        assert pair["input_ids"][0] == [*start, *body, *completion]
        assert pair["labels"][0] == [IGNORED_LABEL] * len(body) + [*completion, *end]
        assert pair["input_ids"][1].count(0) == 1
        if prompt:
            assert (pair["input_ids"][2], pair["labels"][2]) == (pair["input_ids"][0], pair["labels"][0])


def test_packed_examples_are_never_split(tokenizer):
    rows = rows_of(prompt=["open", "read the", "a"], completion=[" the file", " name", " file"])
    alone = encode(task_of(prompt="prompt", completion="completion"), rows, tokenizer)
    packed = encode(task_of(prompt="prompt", completion="completion", packing="documents"), rows, tokenizer, 9)
    lengths = [len(ids) for ids in alone["input_ids"]]
    assert lengths[0] + lengths[1] <= 9 < sum(lengths)
    assert packed["labels"] == [alone["labels"][0] + alone["labels"][1], alone["labels"][2]]
    assert packed["position_ids"] == [[*range(lengths[0]), *range(lengths[1])], [*range(lengths[2])]]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"text": ["a", None]}, r"column `text`, row 2 of `rows.jsonl` is null"),
        ({"prompt": ["a"], "completion": [" "]}, r"column `completion`, row 1 .* is an empty completion"),
        (
            {"prompt": ["a", "a file " * 30], "completion": ["b", "b"]},
            r"column `completion`, row 2 .* no token to train within `data.max_length` \(20\): \d+ tokens come",
        ),
        ({"text": [1, 2]}, r"`task.text` must name a column of strings or of token ids, but .* holds int64"),
        ({"prompt": ["a"]}, r"`task.completion` names the column `completion`, but"),
    ],
)
def test_bad_rows_are_refused(tokenizer, columns, problem):
    keys = {name: name for name in columns} | ({"completion": "completion"} if "prompt" in columns else {})
    with pytest.raises(DataError, match=problem):
        encode(task_of(**keys), rows_of(**columns), tokenizer, max_length=20)


def test_an_example_is_cut_to_its_first_tokens_and_the_last_is_only_predicted(tokenizer):
    rows = rows_of(prompt=["a file"], completion=[" of a directory that holds many files"])
    task = task_of(prompt="prompt", completion="completion")
    whole = encode(task, rows, tokenizer)
    tokens = [*whole["input_ids"][0], whole["labels"][0][-1]]
    for length in (len(tokens), len(tokens) - 1):
        found = encode(task, rows, tokenizer, max_length=length)
        assert [*found["input_ids"][0], found["labels"][0][-1]] == tokens[:length]
        assert found["cut"] == [length < len(tokens)]


def test_models_that_see_later_tokens_are_refused():
    config = transformers.AutoConfig.for_model("bert")
    with pytest.raises(UsageError, match="but bert sees all tokens"):
        task_of(text="text").for_configuration(config)
    with pytest.raises(UsageError, match=r'`task.packing` is "documents", but decoders of the type bart'):
        task_of(text="text", packing="documents").for_configuration(transformers.AutoConfig.for_model("bart"))
    assert task_of(text="text").for_configuration(transformers.AutoConfig.for_model("opt"))


LENGTHS = (6, 1, 9, 4)


@pytest.mark.parametrize("model_type", DECODERS)
def test_packed_documents_have_the_logits_that_they_have_alone(model_type):
    keys = {"packing": "documents"}
    recipe = tiny_recipe(task={"type": "causal_lm", **keys}, model={"config": TINY_DECODERS[model_type]})
    parts = build_tiny(recipe).parts
    model, task = parts.models[0].eval().double(), parts.task
    documents = [torch.randint(NUM_SPECIAL, VOCABULARY, (1, length)) for length in LENGTHS]
    padding = torch.zeros(1, 3, dtype=torch.long)
    packed = {
        "input_ids": torch.cat([*documents, padding], 1),
        "position_ids": torch.cat([*(torch.arange(length)[None] for length in LENGTHS), padding], 1),
        "attention_mask": torch.cat([*map(torch.ones_like, documents), padding], 1),
    }
    with torch.no_grad():
        together = model(**task.model_inputs(packed), use_cache=False).logits[:, : sum(LENGTHS)].split(LENGTHS, 1)
        for ids, logits in zip(documents, together, strict=True):
            torch.testing.assert_close(logits, model(input_ids=ids).logits, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("model_type", ["gpt2", "mistral"])
def test_packed_documents_see_nothing_of_each_other_under_dropout(model_type):
    """With dropout, our own attention runs instead of torch's."""
    recipe = tiny_recipe(
        task={"type": "causal_lm", "packing": "documents"},
        model={"config": TINY_DECODERS[model_type], "dropout": 0.3},
    )
    parts = build_tiny(recipe).parts
    model, keys = parts.models[0].train(), parts.built[0].dropout_keys
    ids = torch.randint(NUM_SPECIAL, VOCABULARY, (1, 12))
    others = torch.where(torch.arange(12) < 5, (ids + 7) % VOCABULARY, ids)

    def logits(ids, **positions):
        with torch.no_grad(), keys.use(MicrobatchKey(0, torch.tensor([3]))):
            return model(input_ids=ids, use_cache=False, **positions).logits[:, 5:]

    packed = {"position_ids": torch.cat([torch.arange(5), torch.arange(7)])[None]}
    assert torch.equal(logits(ids, **packed), logits(others, **packed))
    assert not torch.allclose(logits(ids), logits(others))


def test_the_training_is_that_of_a_plain_loop_of_transformers():
    steps, rate = 6, 0.05
    sections = sgd_sections(rate) | {"training": {"max_steps": steps, "max_grad_norm": None, "micro_batch_size": 5}}
    training = build_tiny(tiny_recipe(task={"type": "causal_lm"}, **sections))
    model = copy.deepcopy(training.model)
    losses = [training.engine.train_step(batch).loss for batch in training.loader]

    split, expected = tiny_documents(), []
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), rate)
    for step in range(steps):
        batch = []
        for row in training.loader.row_ids(step):
            part = slice(split.offsets[row], split.offsets[row + 1])
            ids, labels = (torch.tensor(split.tokens[name][part]) for name in ("input_ids", "labels"))
            # transformers shifts labels itself, and has none for a token after the last
            batch.append((torch.cat([ids, ids[:1]]), torch.cat([torch.tensor([IGNORED_LABEL]), labels])))
        ids, labels = (
            nn.utils.rnn.pad_sequence(list(column), True, IGNORED_LABEL) for column in zip(*batch, strict=True)
        )
        num_items = (labels != IGNORED_LABEL).sum()
        loss = model(input_ids=ids.clamp(min=0), labels=labels, num_items_in_batch=num_items).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[0] - losses[-1] > 0.1
