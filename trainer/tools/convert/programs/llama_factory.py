"""Conversion of LLaMA-Factory's YAML or JSON: the keys that depend on several others. Defaults are those of 0.9."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainer.tools.convert.draft import Draft, Outcome
from trainer.tools.convert.foreign.values import Todo
from trainer.tools.convert.programs.adapters import adapter, quantization, targets
from trainer.tools.convert.programs.dataset_info import rows
from trainer.tools.convert.programs.model import bf16_weights, chat_template, loss_arguments, model_name, no_dropout
from trainer.tools.convert.sources import Item, Sources, Tool

_LF, _TA = Tool.LLAMA_FACTORY, Tool.TRAINING_ARGUMENTS
_LORA = {
    "rank": "lora_rank", "dropout": "lora_dropout", "rank_stabilised": "use_rslora",
}  # fmt: skip
_TYPES = {"pt": "causal_lm", "sft": "causal_lm", "dpo": "preference", "kto": "preference", "rm": "reward_model"}
_LOSS_ARGUMENTS = {
    "gamma": "simpo_gamma", "desirable_weight": "kto_chosen_weight", "undesirable_weight": "kto_rejected_weight",
    "label_smoothing": "dpo_label_smoothing",
}  # fmt: skip
_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}


def prepare(sources: Sources) -> None:
    """Set fields of TrainingArguments that follow from keys of LLaMA-Factory."""
    off = sources.written(_LF, "disable_gradient_checkpointing")
    sources.set_argument("gradient_checkpointing", off is None or off.value is not True, off)
    plot = sources.written(_LF, "plot_loss")
    reports = sources.written(_TA, "report_to")
    if plot is not None and plot.value is True:
        given = reports.value if reports is not None else []
        names = given if isinstance(given, list) else [given]
        sources.set_argument("report_to", [*(name for name in names if name != "none"), "html"], reports or plot)


def convert(draft: Draft, folder: Path) -> None:
    """Convert the keys of LLaMA-Factory.

    Args:
        folder: The folder of the recipe, the base of its paths.
    """
    sources = draft.sources
    _model(draft, folder)
    has_adapter = _adapter(draft)
    stage = _task(draft)
    rows(draft, folder, stage)
    chat_template(draft, sources.given(_LF, "template"), "LLaMA-Factory", folder)
    if sources.given(_LF, "template") is None and stage != "pt":
        note = "LLaMA-Factory takes the template of the tokenizer"
        draft.say(Item(_LF, "template", None, None), Outcome.SAME, note)
    off, plot = sources.written(_LF, "disable_gradient_checkpointing"), sources.given(_LF, "plot_loss")
    if off is not None:
        draft.say(off, Outcome.CONVERTED, f"`activation_checkpointing` {'none' if draft.flag(off) else 'full'}")
    if plot is not None and draft.flag(plot):
        draft.say(plot, Outcome.CONVERTED, "counted in `logging.to`")
    if has_adapter:
        bf16_weights(draft, has_adapter)


def _model(draft: Draft, folder: Path) -> None:
    model_name(draft, "model_name_or_path", folder)
    tokens = draft.sources.all_given(_LF, "add_tokens", "add_special_tokens")
    if tokens:
        draft.take("model.new_tokens", [word for item in tokens for word in draft.names(item)], *tokens)


def _adapter(draft: Draft) -> bool:
    """Propose the adapter, and return whether there is one."""
    get, given = draft.sources.get, draft.sources.given
    kind = get(_LF, "finetuning_type")
    assert kind is not None
    items = {ours: get(_LF, theirs) for ours, theirs in _LORA.items()}
    alpha, saved, dora, layers = (
        get(_LF, key) for key in ("lora_alpha", "additional_target", "use_dora", "lora_target")
    )
    start, iterations = given(_LF, "pissa_init"), draft.sources.written(_LF, "pissa_iter")
    on = bool(kind.value == "lora")
    if kind.value not in ("lora", "full"):
        draft.refuse_file(kind, "write lora or full; for others, see model.freeze")
    if on:
        adapter(draft, kind, items, dora if dora is not None and dora.value else None)
        targets(draft, layers)
        _alpha(draft, alpha, items["rank"])
        if saved is not None and saved.value:
            draft.take("model.adapter.modules_to_save", draft.names(saved), saved)
        _pissa(draft, start, iterations)
    else:
        draft.unread(f"finetuning_type is {kind.value}", *items.values(), alpha, saved, dora, layers, start, iterations)
        if kind.origin is not None:
            draft.say(kind, Outcome.CONVERTED, "no `model.adapter`: all weights are trained")
    _quantization(draft, on)
    return on


def _quantization(draft: Draft, on: bool) -> None:
    get, bit = draft.sources.get, draft.sources.given(_LF, "quantization_bit")
    bits = {draft.whole(bit): bit} if bit is not None else {}
    method = draft.sources.written(_LF, "quantization_method")
    draft.unread("it is bitsandbytes, or no weight is quantised", method)
    if method is not None and not method.is_default and bits:
        draft.refuse_file(method, "model.quantization is of the form of bitsandbytes")
    quantization(draft, bits, get(_LF, "double_quantization"), get(_LF, "quantization_type"), on)


def _alpha(draft: Draft, alpha: Item | None, rank: Item | None) -> None:
    if alpha is not None and alpha.value:
        draft.take("model.adapter.alpha", draft.number(alpha), alpha)
    elif rank is not None:
        draft.take("model.adapter.alpha", 2 * draft.positive(rank), rank, note="alpha is twice the rank by default")


def _pissa(draft: Draft, start: Item | None, iterations: Item | None) -> None:
    if start is None or not draft.flag(start):
        draft.unread("pissa_init is not set", iterations)
        return
    number = 16 if iterations is None else draft.whole(iterations, 16)
    path = "model.adapter.start"
    if number in (-1, 16):
        draft.take(path, "pissa" if number == -1 else "pissa_niter_16", start, iterations)
    else:
        draft.refuse(path, f"{number} iterations; write 16, or -1 for the exact values", start, iterations)


def _task(draft: Draft) -> str:
    """Propose type and loss of the task, and return the stage."""
    get = draft.sources.get
    stage = get(_LF, "stage")
    assert stage is not None
    name = draft.text(stage, "sft")
    if name not in _TYPES:
        draft.refuse_file(stage, f"stages are {', '.join(_TYPES)}")
        return "sft"
    draft.take("task.type", _TYPES[name], stage)
    _packing(draft, name)
    history, accuracy = draft.sources.given(_LF, "mask_history"), draft.sources.given(_LF, "compute_accuracy")
    if name == "sft" and history is not None and draft.flag(history):
        draft.take("task.train_on", "last", history)
    if name in ("pt", "sft") and accuracy is not None and draft.flag(accuracy):
        draft.take("task.metrics", ["perplexity", "accuracy"], accuracy)
    else:
        draft.unread("the metrics are those of the task", accuracy)
    arguments = {ours: get(_LF, theirs) for ours, theirs in _LOSS_ARGUMENTS.items()}
    if name in ("dpo", "kto"):
        _loss(draft, stage, arguments)
    else:
        draft.unread(f"stage is {name}", get(_LF, "pref_loss"), get(_LF, "pref_beta"), *arguments.values())
    return name


def _loss(draft: Draft, stage: Item, arguments: Mapping[str, Item | None]) -> None:
    kind, beta = draft.sources.get(_LF, "pref_loss"), draft.sources.get(_LF, "pref_beta")
    assert kind is not None
    if stage.value == "kto":
        ours: str | None = "kto"
        draft.take("task.loss.type", ours, stage)
        draft.unread("stage is kto", kind)
    else:
        ours = _LOSSES.get(draft.text(kind))
        unknown = Todo(f"{kind.value} has no counterpart: {', '.join(_LOSSES)}")
        draft.take("task.loss.type", ours or unknown, kind)
    draft.take("task.loss.beta", draft.number(beta, 0.1), beta)
    loss_arguments(draft, ours, arguments)
    no_dropout(draft, stage, "dropout is off there too")


def _packing(draft: Draft, stage: str) -> None:
    packing, neat = draft.sources.written(_LF, "packing"), draft.sources.given(_LF, "neat_packing")
    path = "task.packing"
    if stage == "pt" and (packing is None or packing.value is None or draft.flag(packing)):
        default = packing or Item(_LF, "packing", True, None)
        draft.take(path, "joined", default, note="the texts of a stage pt are joined by default")
    elif stage == "sft" and neat is not None and draft.flag(neat):
        draft.take(path, "documents", neat, packing)
    elif stage == "sft" and packing is not None and packing.value is not None and draft.flag(packing):
        text = 'chats see each other without neat_packing; "documents" keeps them apart, "none" packs nothing'
        draft.refuse(path, text, packing)
    else:
        draft.unread("nothing is packed", packing, neat)
