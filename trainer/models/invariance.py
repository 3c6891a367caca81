"""Check that a row's logits depend neither on its padding nor on the other rows, and that a model adds no loss.

The tests check the families of the table. Any other model is checked before training: two short rows in one forward
pass, then the shorter row alone. Dropout masks are keyed by row, so the check also covers training mode. If rows are
packed, the second of two documents of a row must have the logits that it has alone. The loss of a language model must
be the cross entropy of its logits, which the tasks compute.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.base.errors import UsageError
from trainer.models.dropout import RefuseUnkeyedDropout
from trainer.models.input_samples import samples_of
from trainer.parallel.dropout import REMEDY, DropoutKeys, MicrobatchKey
from trainer.parallel.microbatch import IGNORED_LABEL

_LENGTHS = (16, 9)  # tokens of the two rows, or documents
_TOLERANCE = 1e-4  # relative to the largest logit; rounding gives 1e-6
_LANGUAGE_MODELS = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM")
_MOST_LAYERS = 8  # of a sample; includes every kind of layer in a model that alternates them


def check_invariance(
    model: nn.Module, keys: DropoutKeys | None, packed: bool = False, auto_class_name: str = "", is_trained: bool = True
) -> list[str]:
    """Compare the logits of a row alone with those of the same row in a padded batch, and perhaps in a packed row.

    Args:
        model: a whole model of transformers on the CPU, in fp32, with dropout keyed by `keys`.
        keys: the keys of the dropout; None with torch's dropout, and the comparison then runs without dropout.
        packed: whether the task packs several documents into a row.
        is_trained: whether the model is trained, so that the loss of a language model is compared.

    Returns:
        Notes for the user. With torch's dropout, a dependence gives a note instead of an error.

    Raises:
        UsageError: the logits depend on the layout or on other documents of a packed row, the forward pass failed, or
            the model's own loss has further terms.
    """
    described: Any = model
    name = f"model type {described.config.model_type!r}"
    training = model.training
    try:
        # Keyed masks are equal in both passes, so dropout does not disturb the comparison; torch's would.
        model.train(keys is not None)
        with _padding_decided(described):
            problem = _dependence(model, keys, name, auto_class_name)
            if packed and (problem is None or keys is None):
                _require_documents_apart(model.eval(), name)
            if problem is None and is_trained and auto_class_name in _LANGUAGE_MODELS:
                _require_plain_loss(model.eval(), name, auto_class_name)
    finally:
        model.train(training)
    if problem is None:
        return []
    if keys is None:
        return [f"{name} depends on the layout: {problem}"]
    raise UsageError(f"{name} cannot be trained independently of the layout: {problem}; use another model, or {REMEDY}")


def sample_of(model_class: Any, config: Any, attention: str, is_whole: bool = False) -> nn.Module:
    """Build a model with random weights, to check a model that no rank holds whole.

    It has the widths of `config` and, unless `is_whole`, at most 8 layers, if its configuration allows fewer layers.
    """
    # A copy, because the attention of the sample is set in it.
    config = copy.deepcopy(config)
    config._attn_implementation = attention
    layers = getattr(config, "num_hidden_layers", None)
    with torch.random.fork_rng(devices=[]):
        # The same weights on every rank, so that all come to the same result.
        torch.manual_seed(0)
        if isinstance(layers, int) and layers > _MOST_LAYERS and not is_whole:
            small = copy.deepcopy(config)
            try:
                small.num_hidden_layers = _MOST_LAYERS
                shallow: nn.Module = model_class(small)
                return shallow
            except Exception:  # other keys of the configuration also count layers
                pass
        sample: nn.Module = model_class(config)
    return sample


@torch.no_grad()
def _dependence(model: nn.Module, keys: DropoutKeys | None, name: str, auto_class_name: str) -> str | None:
    """Return a description of how the logits depend on the layout, or None if they do not."""
    try:
        # The shorter row is row 1 in both passes, so it has the same dropout keys.
        together = _logits(model, _inputs(model, _LENGTHS, auto_class_name), (0, 1), keys, name)
        alone = _logits(model, _inputs(model, _LENGTHS[1:], auto_class_name), (1,), keys, name)
    except UsageError:  # raised for a dropout without a keyed form
        raise
    except Exception as error:  # a model may raise any error for unexpected inputs
        return f"a forward pass over two short rows failed ({type(error).__name__}: {error})"
    row = together[1]
    if alone.dim() > 2:  # [rows, tokens, ...]: the logits of padding are not used
        row = row[: alone.shape[1]]
    difference = _difference(row, alone[0])
    if difference <= _TOLERANCE:
        return None
    return f"the logits of a row change by {difference:.1e} when a longer row is in the batch"


@torch.no_grad()
def _require_documents_apart(model: Any, name: str) -> None:
    """Compare the logits of a document alone with those behind another one; only positions separate the two."""
    ids = _inputs(model, _LENGTHS)["input_ids"]
    first, second = ids[:1], ids[1:, : _LENGTHS[1]]
    # Positions that begin again at 0 mark a document, as those of `DocumentPacker` do.
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])[None]
    try:
        together = model(input_ids=torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
        alone = model(input_ids=second, position_ids=positions[:, _LENGTHS[0] :], use_cache=False).logits
        difference = _difference(together[0, _LENGTHS[0] :], alone[0])
        problem = None if difference <= _TOLERANCE else f"change its logits by {difference:.1e}"
    except Exception as error:  # a model may raise any error for unexpected inputs
        problem = f"cannot be marked by positions ({type(error).__name__}: {error})"
    if problem:
        raise UsageError(
            f'`task.packing` is "documents", but in {name} other documents of a row {problem}; use "none", or "joined",'
            " which lets documents see each other"
        )


@torch.no_grad()
def _require_plain_loss(model: Any, name: str, auto_class_name: str) -> None:
    """Compare the loss of transformers with the cross entropy of the same logits."""
    inputs = _inputs(model, _LENGTHS, auto_class_name)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, IGNORED_LABEL)
    try:
        output = model(**inputs, labels=labels)
    except Exception:  # some models take no labels, or others
        return
    if output.loss is None:
        return
    logits = output.logits
    if auto_class_name == "AutoModelForCausalLM":
        # transformers shifts labels of a causal model itself.
        logits, labels = logits[:, :-1], labels[:, 1:]
    plain = F.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=IGNORED_LABEL)
    if _difference(output.loss, plain) > _TOLERANCE:
        raise UsageError(
            f"{name} has a loss of its own, {output.loss:.4f} where the cross entropy of the tokens is {plain:.4f}, and"
            " its other terms cannot be trained here; turn them off in `model.config`, or use another model"
        )


def _difference(output: Tensor, expected: Tensor) -> float:
    # Without this bound, logits that are all 0 would divide 0 by 0.
    largest = expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
    return float((output - expected).abs().max() / largest)


def _logits(
    model: nn.Module, inputs: dict[str, Tensor], rows: Sequence[int], keys: DropoutKeys | None, name: str
) -> Tensor:
    """Return the logits `[rows, ...]` of one microbatch; the generator's seed is the number of rows."""
    keyed = keys.use(MicrobatchKey(0, torch.tensor(rows))) if keys else nullcontext()
    with torch.random.fork_rng(devices=[]):
        # Another seed for each number of rows: an unkeyed draw shows as a difference.
        torch.manual_seed(len(rows))
        with RefuseUnkeyedDropout(name) if keys else nullcontext(), keyed:
            return _scores(model(**inputs))


def _scores(output: Any) -> Tensor:
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], -1)
    scores: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return scores


def _inputs(model: Any, lengths: Sequence[int], auto_class_name: str = "") -> dict[str, Tensor]:
    """Return rows of tokens `[rows, sequence]`, padded on the right, or of other inputs.

    Rows of equal length have equal content in every call. The decoder that generates a text reads that of the encoder.
    """
    if samples := samples_of(model.main_input_name):
        return samples.drawn(model.config, lengths)
    config = model.config.get_text_config()
    padding = _padding_token(config) or 0
    end = getattr(config, "eos_token_id", None)
    end = end if isinstance(end, int) and end != padding and 0 <= end < config.vocab_size else None
    special = {padding, end, *(getattr(config, f"{name}_token_id", None) for name in ("bos", "cls", "sep", "mask"))}
    ordinary = [token for token in range(min(config.vocab_size, 200)) if token not in special]
    ids, mask = torch.full((len(lengths), max(lengths)), padding), torch.zeros(len(lengths), max(lengths)).long()
    for row, length in enumerate(lengths):
        # Special tokens are left out, because models treat them in their own ways.
        tokens = [ordinary[(length + 7 * place) % len(ordinary)] for place in range(length)]
        if end is not None:
            tokens[-1] = end  # encoder-decoders classify at this token
        ids[row, :length] = torch.tensor(tokens)
        mask[row, :length] = 1
    if auto_class_name == "AutoModelForMultipleChoice":  # [rows, choices, sequence]
        return {"input_ids": ids[:, None], "attention_mask": mask[:, None]}
    decoder = {"decoder_input_ids": ids} if auto_class_name == "AutoModelForSeq2SeqLM" else {}
    return {"input_ids": ids, "attention_mask": mask, **decoder}


@contextmanager
def _padding_decided(model: Any) -> Iterator[None]:
    """Set a padding token for a text model without one, because decoders read the last token before the padding."""
    config = model.config.get_text_config() if model.main_input_name == "input_ids" else None
    if config is None or _padding_token(config) is not None:
        yield
        return
    before = getattr(config, "pad_token_id", None)
    config.pad_token_id = 0
    try:
        yield
    finally:
        config.pad_token_id = before


def _padding_token(config: Any) -> int | None:
    token = getattr(config, "pad_token_id", None)
    return token if isinstance(token, int) and token >= 0 else None
