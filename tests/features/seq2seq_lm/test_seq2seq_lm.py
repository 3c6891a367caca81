from __future__ import annotations

import math
from types import SimpleNamespace

import datasets
import pytest
import sacrebleu
import torch
import transformers
from rouge_score import rouge_scorer, scoring

from tests.helpers.seq2seq import tiny_tokenizer
from tests.helpers.training import TINY_T5
from trainer.base.errors import DataError, UsageError
from trainer.features.seq2seq_lm.section import Seq2SeqLM
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.tasks.registry import build_task
from trainer.tasks.types import EvaluatedSplit

WHERE = "`rows.jsonl`"
ROUGE = ["rouge1", "rouge2", "rougeL", "rougeLsum"]


def task_of(start: int = 0, **keys):
    task = build_task(Seq2SeqLM(type="seq2seq_lm", **keys))
    return task.for_configuration(SimpleNamespace(decoder_start_token_id=start))


def rows_of(sources, targets):
    return datasets.Dataset.from_dict({"source": sources, "target": targets})


def encode(rows, first_row=0, max_length=8, tokenizer=None, **keys):
    return task_of(**keys).encode(rows, tokenizer or tiny_tokenizer(), max_length, WHERE, first_row)


def test_a_target_ends_with_the_end_token_and_the_decoder_starts_with_its_start_token():
    encoded = encode(rows_of(["word1 word2", "word3"], ["word4 word5 word6", ""]), prefix="word0 ")
    assert encoded["input_ids"] == [[3, 4, 5, 1], [3, 6, 1]]
    assert encoded["labels"] == [[7, 8, 9, 1], [1]], "an empty target is valid"
    model = transformers.AutoModelForSeq2SeqLM.from_config(
        transformers.AutoConfig.for_model(**TINY_T5, decoder_start_token_id=0)
    )
    for labels, inputs in zip(encoded["labels"], encoded["decoder_input_ids"], strict=True):
        assert model.prepare_decoder_input_ids_from_labels(torch.tensor([labels])).tolist() == [inputs]


@pytest.mark.parametrize("adds_end", [True, False])
def test_a_long_target_is_cut_before_its_end_token(adds_end):
    rows = rows_of(["word1"] * 3, ["word1 word2 word3", "word1 word2 word3 word4", ""])
    encoded = encode(rows, max_target_length=4, tokenizer=tiny_tokenizer(adds_end))
    assert encoded["labels"] == [[4, 5, 6, 1], [4, 5, 6, 1], [1]]
    assert encoded["cut_target"] == [False, True, False]


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        (["word1", None], ["a", "b"], "column `source`, row 8 of `rows.jsonl` is null"),
        (["word1", " "], ["a", "b"], "column `source`, row 8 of `rows.jsonl` is an empty text; leave the row out"),
        (["word1", "word2"], ["a", None], "column `target`, row 8 of `rows.jsonl` is null; every row needs a target"),
    ],
)
def test_a_row_without_a_text_is_refused(sources, targets, message):
    with pytest.raises(DataError, match=message):
        encode(rows_of(sources, targets), first_row=6)


def test_a_column_that_is_missing_or_not_of_texts():
    rows = datasets.Dataset.from_dict({"source": ["a"], "number": [1]})
    with pytest.raises(DataError, match=r"`task.target` names the column `target`, but .* columns are `source`"):
        task_of().resolve(rows, WHERE)
    with pytest.raises(DataError, match=r"`task.target` must name a column of strings, .* holds int64"):
        task_of(target="number").resolve(rows, WHERE)


def test_models_and_tokenizers_that_do_not_fit():
    rows = rows_of(["word1"], ["word2"])
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UsageError, match="has no end token"):
        encode(rows, tokenizer=tokenizer)
    with pytest.raises(UsageError, match=r"must be more than the 2 special tokens .* but is 2"):
        encode(rows, max_target_length=2, tokenizer=two_special_tokens())
    with pytest.raises(UsageError, match="names none; set `decoder_start_token_id`"):
        build_task(Seq2SeqLM(type="seq2seq_lm")).for_configuration(transformers.BertConfig())
    small = transformers.BartConfig(max_position_embeddings=64)
    with pytest.raises(UsageError, match=r"`task.max_target_length` must be at most the 64 positions .* but is 128"):
        build_task(Seq2SeqLM(type="seq2seq_lm")).for_configuration(small)


def two_special_tokens():
    from tokenizers import processors

    tokenizer = tiny_tokenizer()
    template = processors.TemplateProcessing(single="<unk> $A </s>", special_tokens=[("</s>", 1), ("<unk>", 2)])
    tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


def test_a_missing_package_is_named_before_the_training(monkeypatch):
    from trainer.features.seq2seq_lm import metrics

    def missing(package):
        raise ImportError(f"No module named {package[0]!r}")

    monkeypatch.setattr(metrics, "_module", missing)
    with pytest.raises(
        UsageError, match=r'names bleu, .* package sacrebleu; install it \(pip install "recipe-trainer\[gen'
    ):
        task_of(metrics=["bleu"]).resolve(rows_of(["a"], ["b"]), WHERE)
    task_of(metrics=["perplexity"]).resolve(rows_of(["a"], ["b"]), WHERE)


def test_the_loss_is_that_of_transformers():
    """Its mean over the same targets, times their number; padding does not count."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**TINY_T5, decoder_start_token_id=0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    ids, labels = torch.randint(5, 99, (4, 9)), torch.randint(5, 99, (4, 6))
    labels[1, 2:] = IGNORED_LABEL
    starts = model.prepare_decoder_input_ids_from_labels(labels)
    task = task_of()
    logits = model(input_ids=ids, decoder_input_ids=starts).logits
    loss = task.loss_sum(logits, labels) / task.num_valid(labels)
    torch.testing.assert_close(loss, model(input_ids=ids, labels=labels).loss)


def test_metrics_of_texts_equal_the_packages():
    sources = ["word1"] * 3
    targets = ["word1 word2 word3 word4 word5 word6", "word7 word8\nword9", "word10 word11 word12 word13"]
    texts = ["word1 word2 word3 word4 word6", "word9 word7 word8", ""]
    tokenizer = tiny_tokenizer()
    task = task_of(metrics=[*ROUGE, "bleu", "chrf", "perplexity"])
    assert task.generates
    assert not task_of(metrics=["accuracy"]).generates
    ids = [tokenizer(text)["input_ids"] for text in texts]
    padded = [[*row, *[IGNORED_LABEL] * (9 - len(row))] for row in ids]
    sums = {"num_labels": torch.tensor([2, 3, 1]), "losses": torch.tensor([1.0, 2.0, 0.5])}
    split = EvaluatedSplit(rows_of(sources, targets), [], tokenizer)
    found = task.split_metrics({"generated": torch.tensor(padded), **sums}, split)
    assert list(found) == list(task.metric_names)
    aggregator = scoring.BootstrapAggregator()
    scorer = rouge_scorer.RougeScorer(ROUGE, use_stemmer=True)
    scores = [scorer.score(target, text) for target, text in zip(targets, texts, strict=True)]
    for score in scores:
        aggregator.add_scores(score)
    for kind in ROUGE:
        assert found[kind] == pytest.approx(sum(score[kind].fmeasure for score in scores) / 3)
        low, high = (getattr(aggregator.aggregate()[kind], bound).fmeasure for bound in ("low", "high"))
        assert low <= found[kind] <= high
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(texts, [targets]).score)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(texts, [targets]).score)
    assert 0 < found["bleu"] < 100
    assert found["perplexity"] == pytest.approx(math.exp(3.5 / 6))


def test_rows_to_predict_have_no_target():
    task = task_of(metrics=["perplexity"]).without_labels()
    assert task.generates
    assert task.columns == ("source",)
    rows, tokenizer = datasets.Dataset.from_dict({"source": ["word1 word2", "word3"]}), tiny_tokenizer()
    task.check_columns(rows.features, WHERE)
    assert task.encode(rows, tokenizer, 8, WHERE, 0) == {"input_ids": [[4, 5, 1], [6, 1]], "cut": [False, False]}
    answers = {"generated": torch.tensor([[7, 8, 1], [1, IGNORED_LABEL, IGNORED_LABEL]])}
    assert task.readable(answers, EvaluatedSplit(rows, [], tokenizer)) == [
        {"generated": "word4 word5"},
        {"generated": ""},
    ]


def test_cached_rows_depend_on_their_encoding():
    same = {task_of(metrics=["bleu"]).fingerprint, task_of(generation={"num_beams": 2}).fingerprint}
    assert same == {task_of().fingerprint}
    others = [task_of(start=5), task_of(prefix="a "), task_of(max_target_length=9), task_of(target="other")]
    assert len({task.fingerprint for task in others} | same) == 5
