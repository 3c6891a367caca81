"""Conversion of LLaMA-Factory's YAML or JSON: the keys that depend on several others. Defaults are those of 0.9."""

from __future__ import annotations

from pathlib import Path

from trainer.tools.convert.draft import Draft, Outcome
from trainer.tools.convert.examples import folder_or_name
from trainer.tools.convert.foreign.values import Todo
from trainer.tools.convert.programs.adapters import adapter, quantization, targets
from trainer.tools.convert.programs.dataset_info import rows
from trainer.tools.convert.programs.model import bf16_weights, chat_template, no_dropout
from trainer.tools.convert.sources import Item, Sources, Tool

_LF, _TA = Tool.LLAMA_FACTORY, Tool.TRAINING_ARGUMENTS
_LORA = {
    "rank": "lora_rank", "dropout": "lora_dropout", "rank_stabilised": "use_rslora",
}  # fmt: skip
_TYPES = {"pt": "causal_lm", "sft": "causal_lm", "dpo": "preference", "kto": "preference", "rm": "reward_model"}
_LOSS_KEYS = ("pref_loss", "pref_beta", "simpo_gamma", "kto_chosen_weight", "kto_rejected_weight")
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
    sources = draft.sources
    name = sources.given(_LF, "model_name_or_path")
    if name is not None:
        draft.take("model.name_or_path", folder_or_name(draft.text(name), folder), name)
    else:
        draft.refuse("model.name_or_path", "`model_name_or_path` is missing")
    tokens = sources.all_given(_LF, "add_tokens", "add_special_tokens")
    words = [word.strip() for item in tokens for word in draft.text(item).split(",") if word.strip()]
    if tokens:
        draft.take("model.new_tokens", words, *tokens)


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
    bit = given(_LF, "quantization_bit")
    on = bool(kind.value == "lora")
    if kind.value not in ("lora", "full"):
        draft.refuse_file(kind, "write lora or full; for others, see model.freeze")
    if on:
        adapter(draft, kind, items, dora if dora is not None and dora.value else None)
        targets(draft, layers)
        _alpha(draft, alpha, items["rank"])
        if saved is not None and saved.value:
            draft.take("model.adapter.modules_to_save", [name.strip() for name in draft.text(saved).split(",")], saved)
        _pissa(draft, start, iterations)
    else:
        draft.unread(f"finetuning_type is {kind.value}", *items.values(), alpha, saved, dora, layers, start, iterations)
        if kind.origin is not None:
            draft.say(kind, Outcome.CONVERTED, "no `model.adapter`: all weights are trained")
    bits = {draft.whole(bit): bit} if bit is not None else {}
    method = draft.sources.written(_LF, "quantization_method")
    draft.unread("it is bitsandbytes, or no weight is quantised", method)
    if method is not None and not method.is_default and bits:
        draft.refuse_file(method, "model.quantization is of the form of bitsandbytes")
    quantization(draft, bits, get(_LF, "double_quantization"), get(_LF, "quantization_type"), on)
    return on


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
    path, items = "model.adapter.start", [start, *([iterations] if iterations else [])]
    if number in (-1, 16):
        draft.take(path, "pissa" if number == -1 else "pissa_niter_16", *items)
    else:
        draft.refuse(path, f"{number} iterations; write 16, or -1 for the exact values", *items)


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
    loss = {
        key: get(_LF, key)
        for key in ("pref_loss", "pref_beta", "simpo_gamma", "kto_chosen_weight", "kto_rejected_weight")
    }
    smoothing = draft.sources.written(_LF, "dpo_label_smoothing")
    if name not in ("dpo", "kto"):
        draft.unread(f"stage is {name}", *loss.values(), smoothing)
        return name
    _loss(draft, name, loss, smoothing)
    return name


def _loss(draft: Draft, stage: str, keys: dict[str, Item | None], smoothing: Item | None) -> None:
    kind, beta, gamma, chosen, rejected = keys.values()
    assert kind is not None
    assert beta is not None
    ours = "kto" if stage == "kto" else _LOSSES.get(draft.text(kind))
    unknown = Todo(f"{kind.value} has no counterpart: {', '.join(_LOSSES)}")
    if stage == "kto":
        draft.take("task.loss.type", "kto", draft.sources.get(_LF, "stage") or kind)
        draft.unread("stage is kto", kind)
    else:
        draft.take("task.loss.type", ours or unknown, kind)
    draft.take("task.loss.beta", draft.number(beta, 0.1), beta)
    for item, path, loss in (
        (gamma, "gamma", "simpo"),
        (chosen, "desirable_weight", "kto"),
        (rejected, "undesirable_weight", "kto"),
        (smoothing, "label_smoothing", "dpo"),
    ):
        if item is None:
            continue
        if ours == loss:
            draft.take(f"task.loss.{path}", draft.number(item), item)
        else:
            draft.unread(f"the loss is {ours}", item)
    stage_item = draft.sources.get(_LF, "stage")
    assert stage_item is not None
    no_dropout(draft, stage_item, "dropout is off there too")


def _packing(draft: Draft, stage: str) -> None:
    packing, neat = draft.sources.written(_LF, "packing"), draft.sources.given(_LF, "neat_packing")
    path = "task.packing"
    if stage == "pt" and (packing is None or packing.value is None or draft.flag(packing)):
        default = packing or Item(_LF, "packing", True, None)
        draft.take(path, "joined", default, note="the texts of a stage pt are joined by default")
    elif stage == "sft" and neat is not None and draft.flag(neat):
        draft.take(path, "documents", neat, *([packing] if packing else []))
    elif stage == "sft" and packing is not None and packing.value is not None and draft.flag(packing):
        text = 'chats see each other without neat_packing; "documents" keeps them apart, "none" packs nothing'
        draft.refuse(path, text, packing)
    else:
        draft.unread("nothing is packed", packing, neat)
