"""The special tokens, templates and classes of families of tokenizers, and the parts of each kind of model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CONTINUED = "##"
"""The prefix of pieces inside of a word, in the vocabulary of WordPiece."""


@dataclass(frozen=True)
class Family:
    """The tokenizers of a family of models.

    Attributes:
        kind: the kind of model of its own tokenizers.
        tokens: its special tokens by their names in transformers, in the order of their ids.
        single, pair: the templates of a text and of two texts; empty: nothing is added.
        class_name: the class of transformers for its own kind; None: that of all fast tokenizers.
        inputs: the inputs of its models.
        sentinels: the number of tokens `<extra_id_N>` at the end of the vocabulary.
    """

    kind: str
    tokens: Mapping[str, str]
    single: str = ""
    pair: str = ""
    class_name: str | None = None
    inputs: Sequence[str] = ("input_ids", "attention_mask")
    sentinels: int = 0

    @property
    def special(self) -> list[str]:
        """Its special tokens, each once, in the order of their ids."""
        return list(dict.fromkeys(self.tokens.values()))


_OF_BERT = {
    "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"
}  # fmt: skip
_OF_ROBERTA = {
    "bos_token": "<s>", "cls_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "sep_token": "</s>",
    "unk_token": "<unk>", "mask_token": "<mask>",
}  # fmt: skip
_END, _BEGIN = "<|endoftext|>", "<|begin_of_text|>"
FAMILIES = {
    "bert": Family(
        "wordpiece",
        _OF_BERT,
        "[CLS] $A [SEP]",
        "[CLS] $A [SEP] $B:1 [SEP]:1",
        "BertTokenizer",
        ("input_ids", "token_type_ids", "attention_mask"),
    ),
    "modernbert": Family("bpe", _OF_BERT, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]"),
    "roberta": Family("bpe", _OF_ROBERTA, "<s> $A </s>", "<s> $A </s> </s> $B </s>", "RobertaTokenizer"),
    "gpt2": Family("bpe", {"unk_token": _END, "bos_token": _END, "eos_token": _END}, class_name="GPT2Tokenizer"),
    # The tokens of Llama 3; earlier ones came from SentencePiece.
    "llama": Family(
        "bpe",
        {"bos_token": _BEGIN, "eos_token": "<|end_of_text|>", "pad_token": "<|finetune_right_pad_id|>"},
        f"{_BEGIN} $A",
        f"{_BEGIN} $A {_BEGIN}:1 $B:1",
    ),
    "t5": Family(
        "unigram",
        {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
        "$A </s>",
        "$A </s> $B </s>",
        "T5Tokenizer",
        sentinels=100,
    ),
}
USUAL_FAMILIES = {"wordpiece": "bert", "bpe": "modernbert", "unigram": "t5"}


@dataclass(frozen=True)
class TokenizerShape:
    """A tokenizer to train: its family, its kind of model, and how it reads texts."""

    family_name: str
    kind: str
    lowercase: bool | None = None  # None: as the family does
    max_length: int | None = None
    _family: Family = field(init=False)

    def __post_init__(self) -> None:
        # The dataclass is frozen.
        object.__setattr__(self, "_family", FAMILIES[self.family_name])

    @property
    def family(self) -> Family:
        return self._family

    @property
    def is_lowercase(self) -> bool:
        return self.family_name == "bert" if self.lowercase is None else self.lowercase

    @property
    def unknown(self) -> str | None:
        """The token of unknown characters; None: there is none."""
        return self.family.tokens.get("unk_token")

    def blank(self) -> Tokenizer:
        """Return a tokenizer without a vocabulary, which normalises and divides texts as the trained one does."""
        if self._class is not None:
            built: Tokenizer = self._class(**self._options).backend_tokenizer
            normalizer, words = built.normalizer, built.pre_tokenizer
        else:
            normalizer, words = self._normalizer(), _words(self.kind)
        empty = {"wordpiece": models.WordPiece(unk_token=self.unknown or ""), "bpe": models.BPE()}
        tokenizer = Tokenizer(empty.get(self.kind) or models.Unigram())
        # Their setters take no None.
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = words
        return tokenizer

    def trainer(self, size: int, min_frequency: int, further: Sequence[str] = ()) -> Any:
        """Return the trainer of `tokenizers` for a vocabulary; `further` tokens get the ids behind the special ones."""
        shared: dict[str, Any] = {"vocab_size": size - self.family.sentinels, "show_progress": False}
        special = [*self.family.special, *further]
        if self.kind == "unigram":
            return trainers.UnigramTrainer(special_tokens=special, unk_token=self.unknown, **shared)
        shared["min_frequency"] = min_frequency
        if self.kind == "bpe":
            return trainers.BpeTrainer(
                special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **shared
            )
        return trainers.WordPieceTrainer(special_tokens=special, continuing_subword_prefix=CONTINUED, **shared)

    def finished(self, trained: Tokenizer) -> Any:
        """Return the tokenizer of transformers with the vocabulary of a trained one."""
        model = json.loads(trained.to_str())["model"]
        tokens: dict[str, Any] = dict(self.family.tokens)
        if self.family_name == "roberta":  # as in its own files: the mask takes the blank before it
            tokens["mask_token"] = AddedToken(tokens["mask_token"], lstrip=True, special=True)
        options = {**tokens, "model_input_names": list(self.family.inputs)}
        if self.max_length is not None:
            options["model_max_length"] = self.max_length
        vocabulary = self._vocabulary(model)
        if self._class is not None:
            merges = {"merges": [tuple(merge) for merge in model["merges"]]} if self.kind == "bpe" else {}
            return self._class(vocab=vocabulary, **merges, **options, **self._options)
        backend = Tokenizer(self._model(vocabulary, model))
        backend.normalizer, backend.pre_tokenizer = self._normalizer(), _words(self.kind)
        backend.decoder = _decoder(self.kind)
        special = self.family.special
        if self.family.single:
            ids = [(token, backend.token_to_id(token)) for token in special]
            backend.post_processor = processors.TemplateProcessing(
                single=self.family.single, pair=self.family.pair, special_tokens=ids
            )
        return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **options)

    @property
    def _class(self) -> Any:
        """The class of transformers that builds the parts itself; None: another kind, or letters that it keeps."""
        name, family = self.family.class_name, self.family
        keeps = self.family_name == "bert" or not self.is_lowercase
        return getattr(transformers, name) if name and self.kind == family.kind and keeps else None

    @property
    def _options(self) -> dict[str, Any]:
        return {"do_lower_case": self.is_lowercase} if self.family_name == "bert" else {}

    def _vocabulary(self, model: Mapping[str, Any]) -> Any:
        if self.kind != "unigram":
            return model["vocab"]
        # In the order of T5: the last sentinel comes first.
        ends = [(f"<extra_id_{number}>", 0.0) for number in reversed(range(self.family.sentinels))]
        return [*((piece, score) for piece, score in model["vocab"]), *ends]

    def _model(self, vocabulary: Any, model: Mapping[str, Any]) -> Any:
        if self.kind == "wordpiece":
            return models.WordPiece(vocabulary, unk_token=self.unknown or "", continuing_subword_prefix=CONTINUED)
        if self.kind == "bpe":
            return models.BPE(vocabulary, [tuple(merge) for merge in model["merges"]])
        return models.Unigram(vocabulary, unk_id=model["unk_id"])

    def _normalizer(self) -> Any:
        if self.kind == "wordpiece":
            return normalizers.BertNormalizer(lowercase=self.is_lowercase)
        form = normalizers.NFC() if self.kind == "bpe" else normalizers.NFKC()
        return normalizers.Sequence([form, normalizers.Lowercase()]) if self.is_lowercase else form


def _words(kind: str) -> Any:
    if kind == "wordpiece":
        return pre_tokenizers.BertPreTokenizer()
    return pre_tokenizers.ByteLevel(add_prefix_space=False) if kind == "bpe" else pre_tokenizers.Metaspace()


def _decoder(kind: str) -> Any:
    if kind == "wordpiece":
        return decoders.WordPiece(prefix=CONTINUED)
    return decoders.ByteLevel() if kind == "bpe" else decoders.Metaspace()
