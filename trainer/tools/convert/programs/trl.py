"""Conversion of the arguments of TRL's scripts: the keys that depend on several others. Defaults are those of 1.16."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from trainer.tools.convert.draft import Draft, Outcome
from trainer.tools.convert.programs.adapters import adapter, quantization, targets
from trainer.tools.convert.programs.model import chat_template, model_name, no_dropout, one_loss
from trainer.tools.convert.programs.rows import Columns, RowSet, entries, is_table, row_set, take_rows
from trainer.tools.convert.sources import Item, Sources, Tool

_TA = Tool.TRAINING_ARGUMENTS
_LORA = {
    "rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "modules_to_save": "lora_modules_to_save",
    "rank_stabilised": "use_rslora", "target_parameters": "lora_target_parameters",
}  # fmt: skip
_TYPES = {
    Tool.TRL_SFT: "causal_lm", Tool.TRL_DPO: "preference", Tool.TRL_KTO: "preference", Tool.TRL_REWARD: "reward_model",
}  # fmt: skip
_COLUMNS = {
    Tool.TRL_DPO: ("prompt", "chosen", "rejected"), Tool.TRL_KTO: ("prompt", "completion", "label"),
    Tool.TRL_REWARD: ("prompt", "chosen", "rejected"),
}  # fmt: skip
_LOSSES = {"sigmoid": "dpo", "ipo": "ipo"}
_PACKINGS = {"bfd": "documents", "wrapped": "joined"}
_SET = ("path", "name", "data_files", "split", "columns")


def prepare(sources: Sources) -> None:
    """Set fields of TrainingArguments that follow from others."""
    fp16 = sources.written(_TA, "fp16")
    if fp16 is not None and fp16.value is True and sources.written(_TA, "bf16") is None:
        sources.set_argument("bf16", False)


def convert(draft: Draft, folder: Path) -> None:
    """Convert the arguments of one of TRL's scripts.

    Args:
        folder: The folder of the recipe, the base of its paths.
    """
    tool = draft.sources.program
    assert tool is not None
    draft.take("task.type", _TYPES[tool], Item(tool, "method", tool.value, None))
    _model(draft, tool, folder)
    _adapter(draft, tool)
    if tool is Tool.TRL_SFT:
        columns = _sft(draft)
    else:
        columns = {name: name for name in _COLUMNS[tool]}
        _preferences(draft, tool)
    _rows(draft, tool, columns, folder)


def _model(draft: Draft, tool: Tool, folder: Path) -> None:
    model_name(draft, "model_name_or_path", folder)
    template = draft.sources.given(tool, "chat_template_path")
    if template is not None and not os.path.isdir(draft.text(template)):
        text = f"a folder of the tokenizer with the template of {template.value}"
        draft.refuse("model.tokenizer", text, template)
    else:
        chat_template(draft, template, "TRL", folder)
    for key in ("dtype", "torch_dtype"):
        item = draft.sources.written(tool, key)
        if item is not None and not item.is_default:
            text = f"trained weights are fp32, not {item.value}; see `weights`, and `precision` for products"
            draft.say(item, Outcome.DIFFERS, text)


def _adapter(draft: Draft, tool: Tool) -> None:
    get, given = draft.sources.get, draft.sources.given
    on, dora = given(tool, "use_peft"), given(tool, "use_dora")
    layers = draft.sources.written(tool, "lora_target_modules")
    items = {ours: get(tool, theirs) for ours, theirs in _LORA.items()}
    has_adapter = draft.flag(on)
    if has_adapter and on is not None:
        adapter(draft, on, items, dora)
        targets(draft, layers)
    else:
        draft.unread("use_peft is not set", *items.values(), dora, layers)
    bits = {number: item for number in (4, 8) if (item := given(tool, f"load_in_{number}bit"))}
    double, kind = get(tool, "use_bnb_nested_quant"), get(tool, "bnb_4bit_quant_type")
    quantization(draft, bits, double, kind, has_adapter)


def _sft(draft: Draft) -> Columns:
    """Propose the packing, and return the columns of the rows."""
    tool = Tool.TRL_SFT
    get, written = draft.sources.get, draft.sources.written
    packing, strategy = written(tool, "packing"), get(tool, "packing_strategy")
    if packing is not None and draft.flag(packing) and strategy is not None:
        ours = _PACKINGS.get(draft.text(strategy))
        items = (packing, strategy if strategy.origin else None)
        if ours is None:
            draft.refuse("task.packing", f"{strategy.value} has no counterpart; write documents or joined", *items)
        else:
            note = "another choice of documents for each row"
            draft.take("task.packing", ours, *items, note=note, differs=True)
    else:
        draft.unread("nothing is packed", packing, written(tool, "packing_strategy"))
    turns, completions = written(tool, "assistant_only_loss"), written(tool, "completion_only_loss")
    text = written(tool, "dataset_text_field")
    if turns is not None and draft.flag(turns):
        draft.unread("assistant_only_loss is set", completions, text)
        draft.say(turns, Outcome.CONVERTED, '`task.messages` "messages" (the assistant\'s turns are trained)')
        return {"messages": "messages"}
    if completions is not None and draft.flag(completions):
        draft.unread("completion_only_loss is set", text)
        draft.say(completions, Outcome.CONVERTED, '`task.prompt` "prompt"; `task.completion` "completion"')
        return {"prompt": "prompt", "completion": "completion"}
    if completions is not None and completions.value is False:
        draft.refuse_file(completions, "prompts are not trained; for texts without a prompt, write one column")
    if text is not None:
        draft.say(text, Outcome.CONVERTED, f"`task.text` {text.value}")
        return {"text": draft.text(text, "text")}
    choice = (
        'the columns, which TRL finds in the rows: write "text": "text" instead of this key, or "prompt" with'
        ' "completion"; of chats, TRL trains all tokens without assistant_only_loss, "messages": "messages" the'
        " assistant's turns"
    )
    draft.refuse("task.messages", choice)
    return {}


def _preferences(draft: Draft, tool: Tool) -> None:
    get, written = draft.sources.get, draft.sources.written
    dropout = get(tool, "disable_dropout")
    if dropout is not None and draft.flag(dropout):
        no_dropout(draft, dropout, "disable_dropout")
    if tool is Tool.TRL_REWARD:
        return
    beta = get(tool, "beta")
    if beta is not None:
        draft.take("task.loss.beta", draft.number(beta, 0.1), beta)
    kind = get(tool, "loss_type")
    if tool is Tool.TRL_KTO:
        draft.take("task.loss.type", "kto", Item(tool, "method", tool.value, None))
        return
    if kind is None:
        return
    if ours := one_loss(draft, kind, _LOSSES):
        draft.take("task.loss.type", ours, kind)
    draft.unread("TRL 1.16 ignores it for this loss", written(tool, "label_smoothing"))


def _rows(draft: Draft, tool: Tool, columns: Columns, folder: Path) -> None:
    sources = draft.sources
    name, mixture, config = (sources.given(tool, key) for key in ("dataset_name", "datasets", "dataset_config"))
    train = sources.get(tool, "dataset_train_split")
    validation, held = _validation(draft, tool)
    if mixture is not None:
        draft.unread("datasets has precedence", name, config, train)
        sets = _mixture(draft, mixture, columns)
        if sets:
            take_rows(draft, folder, sets, validation, mixture, held)
    elif name is not None and train is not None:
        _one_set(draft, RowSet((), draft.text(name), {}, draft.text(train), columns), validation, held, folder)
    else:
        draft.missing["data"] = "the rows: `dataset_name` is missing"
        draft.unread("dataset_name is missing", config, train)
        for key, column in columns.items():
            draft.take(f"task.{key}", column, Item(tool, "method", tool.value, None))


def _validation(draft: Draft, tool: Tool) -> tuple[float | str | None, Item | None]:
    """Return the share or the split of the validation rows, and its key."""
    sources = draft.sources
    test, share = sources.get(tool, "dataset_test_split"), sources.given(tool, "test_split_size")
    strategy = sources.get(_TA, "eval_strategy")
    if strategy is None or strategy.value in ("no", None):
        draft.unread("eval_strategy is no", test, share)
    elif share is not None:
        draft.unread("test_split_size has precedence", test)
        return draft.number(share), share
    elif test is not None and not sources.given(tool, "datasets"):
        return draft.text(test), test
    else:
        draft.unread("datasets has precedence", test)
    return None, None


def _one_set(draft: Draft, rows: RowSet, validation: float | str | None, held: Item | None, folder: Path) -> None:
    tool = draft.sources.program
    assert tool is not None
    name, config, train = (
        draft.sources.get(tool, key) for key in ("dataset_name", "dataset_config", "dataset_train_split")
    )
    assert name is not None
    if config is not None and config.value:
        rows = replace(rows, keys={"subset": draft.text(config)})
        draft.say(config, Outcome.CONVERTED, f"`data.subset` {config.value}")
    if is_table(rows.name):
        rows = replace(rows, files=(rows.name,))
        if isinstance(validation, str):
            draft.refuse("data.validation", "a file of validation rows, or a share such as 0.05", held)
            validation = 0.0
    take_rows(draft, folder, [rows], validation or None, name, held)
    draft.say(train, Outcome.CONVERTED, f"`data.train` {rows.split}")


def _mixture(draft: Draft, item: Item, columns: Columns) -> list[RowSet]:
    """Return the data sets of `datasets`; an empty list after a problem."""
    found = []
    for place, entry in entries(draft, item):
        strange = [key for key, value in entry.items() if key not in _SET and value is not None]
        if strange:
            draft.problem(item, f"has `{strange[0]}`, which decides what is learned; remove it in {place}")
            return []
        rows = row_set(draft, item, entry, place)
        if rows is None:
            return []
        found.append(replace(rows, columns=columns))
    return found
