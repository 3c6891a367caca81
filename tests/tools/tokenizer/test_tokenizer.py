"""`trainer tokenizer`: vocabularies beside those of `tokenizers`, folders in transformers, data and errors."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from trainer.base.errors import DataError, TrainerError, UsageError
from trainer.cli.program import answer
from trainer.tools.tokenizer import training
from trainer.tools.tokenizer.families import FAMILIES
from trainer.tools.tokenizer.training import TokenizerRequest, train_tokenizer

SENTENCE = "The Cat sat on a Mat, and the dog ran to the old house beside the river; nobody saw it."
NIGHTLY = ("roberta", "gpt2", "t5")
OF_BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def texts(number: int = 150) -> list[str]:
    draws = random.Random(3)
    stems = ["run", "walk", "Sing", "read", "play", "jump", "write", "paint"]
    return [
        " ".join(draws.choice(stems) + draws.choice(["", "s", "ing", "er", "ed", "ers"]) for _ in range(9)) + "."
        for _ in range(number)
    ]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join(texts()) + "\n")
    return path


def trained(data: Path, family: str, **keys: Any) -> Any:
    output = data.parent / f"{family}{len(list(data.parent.iterdir()))}"
    train_tokenizer(TokenizerRequest((str(data),), output, family=family, **keys))
    return AutoTokenizer.from_pretrained(output)


def used(rows: list[str]) -> list[str]:
    """The texts to train on: every hundredth is held out."""
    return [text for number, text in enumerate(rows, start=1) if number % 100]


def test_bytes_are_joined_as_tokenizers_joins_them(data):
    theirs = Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    options = {"vocab_size": 300, "min_frequency": 2, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    theirs.train_from_iterator(used(texts()), trainers.BpeTrainer(special_tokens=["<|endoftext|>"], **options))
    ours = trained(data, "gpt2", size=300)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours(SENTENCE)["input_ids"] == theirs.encode(SENTENCE).ids


@pytest.mark.parametrize("lowercase", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_pieces_are_those_of_tokenizers_and_equal_again(data, lowercase):
    theirs = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    theirs.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    theirs.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rows = used(texts())
    small = [text.lower() if lowercase else text for text in rows]
    inner = sorted({f"##{letter}" for text in small for word in text.replace(".", "").split() for letter in word[1:]})
    options = {"vocab_size": 90, "min_frequency": 2, "special_tokens": [*OF_BERT, *inner]}
    theirs.train_from_iterator(rows, trainers.WordPieceTrainer(**options))
    ours = [trained(data, "bert", size=90, lowercase=lowercase) for _ in range(2)]
    assert ours[0].get_vocab() == ours[1].get_vocab() == theirs.get_vocab()
    assert ours[0].tokenize(texts()[0]) == theirs.encode(texts()[0]).tokens
    assert type(ours[0]).__name__ == "BertTokenizer"


def test_a_unigram_model_has_the_pieces_of_tokenizers(data):
    theirs = Tokenizer(models.Unigram())
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    special = ["<pad>", "</s>", "<unk>"]
    theirs.train_from_iterator(
        used(texts()), trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>")
    )
    ours = trained(data, "t5", size=160)
    sentinels = {f"<extra_id_{number}>" for number in range(100)}
    assert ours.get_vocab().keys() == theirs.get_vocab().keys() | sentinels
    assert ours.convert_tokens_to_ids(special) == [0, 1, 2]
    assert ours.convert_tokens_to_ids("<extra_id_0>") == len(ours) - 1
    assert ours(SENTENCE)["input_ids"][-1] == 1


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in FAMILIES]
)
def test_each_family_frames_texts_and_opens_again(data, family):
    sizes = {"bert": 90, "t5": 160}
    ours = trained(data, family, size=sizes.get(family, 300), max_length=64)
    frames = {
        "bert": (["[CLS]"], ["[SEP]"]),
        "modernbert": (["[CLS]"], ["[SEP]"]),
        "roberta": (["<s>"], ["</s>"]),
        "gpt2": ([], []),
        "llama": (["<|begin_of_text|>"], []),
        "t5": ([], ["</s>"]),
    }
    start, end = frames[family]
    tokens = ours.convert_ids_to_tokens(ours("runs")["input_ids"])
    assert tokens == [*start, *ours.tokenize("runs"), *end]
    pair = ours("runs", "walks")
    assert ("token_type_ids" in pair) == (family == "bert")
    if family == "bert":
        assert pair["token_type_ids"][0] == 0
        assert pair["token_type_ids"][-1] == 1
    assert (ours.mask_token is not None) == (family in ("bert", "modernbert", "roberta"))
    assert ours.model_max_length == 64
    assert ours.decode(ours("runs")["input_ids"], skip_special_tokens=True).strip() == "runs"
    if ours.mask_token:
        assert ours.mask_token_id in ours(f"runs {ours.mask_token} walks")["input_ids"]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param("bert", "bpe", marks=pytest.mark.nightly),
        ("modernbert", "wordpiece"),
        pytest.param("roberta", "unigram", marks=pytest.mark.nightly),
    ],
)
def test_another_kind_keeps_the_special_tokens(data, family, kind):
    ours = trained(data, family, kind=kind, size=300)
    special = FAMILIES[family].special
    assert ours.convert_tokens_to_ids(special) == list(range(len(special)))
    ids = ours("Singers")["input_ids"]
    assert [ids[0], ids[-1]] == [ours.cls_token_id, ours.sep_token_id]
    assert ours.unk_token_id not in ids
    assert "##a" not in ours.all_special_tokens


def test_data_of_several_formats_and_the_report(tmp_path, capsys):
    rows, folder = texts(400), tmp_path / "data"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.txt").write_text("\n".join(rows[:100]))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in rows[100:250]))
    (folder / "c.csv").write_text("text,other\n" + "".join(f"{text},x\n" for text in [*rows[250:], ""]))
    (folder / "inner" / "d.json").write_text(json.dumps([{"text": None}, {"text": "last words"}]))
    output = tmp_path / "out"
    assert answer(["tokenizer", str(folder / "*.*"), str(folder / "inner"), str(output), "--size", "2000"]) == 0
    shown, report = capsys.readouterr().out, json.loads((output / "report.json").read_text())
    assert report["rows"] + report["measured"]["rows"] == 401
    assert report["measured"]["rows"] == 4
    assert report["held_out"]
    assert report["size"] < 2000
    assert "2,000 tokens were asked for" in shown
    tokenizer = AutoTokenizer.from_pretrained(output)
    held = [[*rows, "last words"][place] for place in (99, 199, 299, 399)]
    tokens = [tokenizer.tokenize(text) for text in held]
    words = sum(len(text.split()) for text in held)
    assert report["measured"]["fertility"] == round(sum(map(len, tokens)) / words, 4)
    assert report["measured"]["bytes_per_token"] == round(sum(map(len, held)) / sum(map(len, tokens)), 4)


def test_unknown_characters_are_counted(tmp_path):
    rows = texts(200)
    rows[99] = "runs \u0394 walks \u0394"
    (tmp_path / "a.txt").write_text("\n".join(rows))
    output = tmp_path / "out"
    report = train_tokenizer(TokenizerRequest((str(tmp_path / "a.txt"),), output, size=200))
    tokenizer = AutoTokenizer.from_pretrained(output)
    tokens = [token for text in (rows[99], rows[199]) for token in tokenizer.tokenize(text)]
    assert tokens.count("[UNK]") == 2
    assert report["measured"]["unknown_share"] == round(2 / len(tokens), 6)


@pytest.mark.parametrize(
    ("keys", "kind", "problem"),
    [
        ({"size": 20}, UsageError, "`--size` must hold the .* special tokens and characters, but is 20"),
        ({"size": 200, "family": "gpt2"}, UsageError, "must hold the 257 special tokens"),
        ({"size": 110, "family": "t5"}, UsageError, "`--size` is 110, and the trainer of unigram refuses it"),
        ({"kind": "unigram", "family": "llama"}, UsageError, "`--kind` unigram needs a token for unknown"),
        ({"data": ("nothing/*.txt",)}, DataError, "nothing/\\*.txt is no file, folder or pattern"),
        ({"text": "words"}, DataError, "`--text` names the column `words`, but .* has `a`, `b`"),
        ({}, DataError, "`--text` must name the column of texts, because .* has `a`, `b`"),
        ({"data": ("empty.txt",)}, DataError, "`DATA` must hold a text, but empty.txt has none"),
        ({"data": ("texts.doc",)}, DataError, "must have an ending such as .txt"),
        ({"output": Path("texts.txt")}, UsageError, "`OUT` must name a new folder, but texts.txt exists"),
        ({"size": 10**20}, UsageError, "`--size` must be at most 10,000,000, but is 100,000,000,000,000,000,000"),
        ({"min_frequency": 10**20}, UsageError, "`--min-frequency` must be at most 10,000,000"),
        ({"data": ("texts.txt",), "text": "a"}, UsageError, "`--text` is a, but lines of texts have no columns"),
        ({"data": ("nulls.jsonl",)}, DataError, "`DATA` must hold a text, but nulls.jsonl has none"),
    ],
)
def test_errors(data, monkeypatch, keys, kind, problem):
    monkeypatch.chdir(data.parent)
    Path("empty.txt").write_text("\n \n")
    Path("texts.doc").write_text("words")
    Path("nulls.jsonl").write_text('{"text": null, "n": 1}\n')
    Path("rows.jsonl").write_text(json.dumps({"a": "one", "b": "two"}) + "\n")
    of_rows = "text" in keys or not keys
    given: dict[str, Any] = {"data": ("rows.jsonl" if of_rows else "texts.txt",), "output": Path("out"), **keys}
    with pytest.raises(kind, match=problem):
        train_tokenizer(TokenizerRequest(**given))
    assert not Path("out").exists()


def test_a_folder_that_another_process_has_written_stays(data, monkeypatch):
    out = data.parent / "out"
    monkeypatch.setattr(training, "shares", lambda *_: out.mkdir())
    with pytest.raises(UsageError, match="`OUT` must name a new folder"):
        train_tokenizer(TokenizerRequest((str(data),), out, size=200))
    assert not list(out.iterdir())


def test_urls_are_read_one_after_the_other(data):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe("/tokenizer/part-1.txt", "\n".join(texts()[:70]).encode())
    memory.pipe("/tokenizer/part-2.txt", "\n".join(texts()[70:]).encode())
    outputs = [data.parent / "url", data.parent / "file"]
    places = ["memory://tokenizer/part-*.txt", str(data)]
    for place, output in zip(places, outputs, strict=True):
        train_tokenizer(TokenizerRequest((place,), output, size=120))
    vocabularies = [AutoTokenizer.from_pretrained(output).get_vocab() for output in outputs]
    assert vocabularies[0] == vocabularies[1]
    with pytest.raises(TrainerError, match="there is none at memory://tokenizer/other"):
        train_tokenizer(TokenizerRequest(("memory://tokenizer/other.txt",), data.parent / "x"))


@pytest.mark.parametrize("keys", [{}, {"streaming": True, "shuffle_window": 30}], ids=["files", "stream"])
def test_the_texts_of_a_recipe_give_the_tokenizer_of_its_files(tmp_path, keys):
    rows = [{"text": text, "label": "Quagga"} for text in texts(60)]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = {
        "name": "texts",
        "task": {
            "type": "sequence_classification",
            "text": "text",
            "labels": ["Quagga", "Zebra"],
            "metrics": ["accuracy"],
        },
        "model": {"name_or_path": "google-bert/bert-base-uncased"},
        "data": {"source": "files", "train": "train.jsonl", "validation": None, "max_length": 16, **keys},
        "training": {"max_steps": 1},
    }
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    train_tokenizer(TokenizerRequest([str(tmp_path / "train.jsonl")], tmp_path / "files", size=80))
    words = ["tokenizer", str(tmp_path / "recipe.json"), str(tmp_path / "recipe"), "--size", "80", "--recipe"]
    words.insert(2, "data.max_length=8")
    assert answer(words) == 0
    files, ours = ((tmp_path / name / "tokenizer.json").read_text() for name in ("files", "recipe"))
    assert ours == files
    with pytest.raises(UsageError, match="`--recipe` takes one recipe"):
        answer([*words, "--text", "label"])
