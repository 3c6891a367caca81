"""Conversion of axolotl's YAML: the keys that depend on several others. Defaults are those of axolotl 0.19."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.tools.convert.draft import Draft, Outcome
from trainer.tools.convert.examples import folder_or_name
from trainer.tools.convert.foreign.values import Todo, router_loss
from trainer.tools.convert.programs.adapters import adapter, quantization, targets
from trainer.tools.convert.programs.axolotl_rows import rows
from trainer.tools.convert.programs.model import (
    bf16_weights,
    chat_template,
    loss_arguments,
    model_name,
    no_dropout,
    one_loss,
)
from trainer.tools.convert.sources import Item, Sources, Tool

_AX, _TA = Tool.AXOLOTL, Tool.TRAINING_ARGUMENTS
_LORA = {
    "rank": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "modules_to_save": "lora_modules_to_save",
    "rank_pattern": "lora_rank_pattern",
    "alpha_pattern": "lora_alpha_pattern",
    "rank_stabilised": "peft_use_rslora",
    "target_parameters": "lora_target_parameters",
    "trainable_tokens": "peft_trainable_token_indices",
}
_LOSSES = {"dpo": "dpo", "ipo": "ipo", "orpo": "orpo", "kto": "kto", "simpo": "simpo"}
_DPO_LOSSES = {"sigmoid": "dpo", "ipo": "ipo"}
_LOSS_ARGUMENTS = {
    "gamma": "simpo_gamma", "desirable_weight": "kto_desirable_weight", "undesirable_weight": "kto_undesirable_weight",
}  # fmt: skip
_OF_PREFERENCES = ("trl.beta", "rl_beta", "orpo_alpha", "dpo_loss_type", *_LOSS_ARGUMENTS.values())
_FAST_PLUGINS = ("liger", "cut_cross_entropy")
_TRACKERS = {"use_tensorboard": "tensorboard", "use_wandb": "wandb", "use_mlflow": "mlflow", "use_trackio": "trackio"}
_SHARE = 0.03  # of the steps, at most 100: the default warmup


def prepare(sources: Sources) -> None:
    """Set fields of TrainingArguments that follow from keys of axolotl."""
    _precision(sources)
    _warmup_steps(sources)
    micro = sources.get(_TA, "per_device_train_batch_size")
    if micro is not None and sources.written(_TA, "per_device_eval_batch_size") is None:
        sources.set_argument("per_device_eval_batch_size", micro.value)
    for key in ("save_steps", "eval_steps"):
        if sources.written(_TA, key) is not None and sources.written(_TA, f"{key[:4]}_strategy") is None:
            sources.set_argument(f"{key[:4]}_strategy", "steps")
    if sources.written(_TA, "fsdp") is None and (section := sources.inside(_TA, "fsdp_config")):
        sources.set_argument("fsdp", True, section[0])
    _trackers(sources)


def _warmup_steps(sources: Sources) -> None:
    steps, ratio = sources.get(_TA, "max_steps"), sources.given(_AX, "warmup_ratio")
    total = steps.value if steps is not None and isinstance(steps.value, int) and steps.value > 0 else None
    warmup = sources.written(_TA, "warmup_steps")
    if warmup is not None and warmup.value == 1:
        sources.set_argument("warmup_steps", 2, warmup)
    elif warmup is None and ratio is not None and isinstance(ratio.value, int | float):
        sources.set_argument("warmup_steps", int(ratio.value * total) if total else ratio.value, ratio)
    elif warmup is None:
        sources.set_argument("warmup_steps", min(int(_SHARE * total), 100) if total else _SHARE)


def _trackers(sources: Sources) -> None:
    trackers = [(item, name) for key, name in _TRACKERS.items() if (item := sources.given(_AX, key))]
    project = sources.given(_AX, "wandb_project")  # axolotl turns W&B on for a project
    if project is not None and sources.written(_AX, "use_wandb") is None:
        trackers.append((project, "wandb"))
    if trackers:
        sources.set_argument("report_to", [name for _, name in trackers], trackers[0][0], stays=True)
    named = sources.given(_AX, "wandb_name")
    if named is not None:
        sources.set_argument("run_name", named.value, named)


def _precision(sources: Sources) -> None:
    bf16, fp16 = sources.written(_TA, "bf16"), sources.written(_TA, "fp16")
    if bf16 is not None and bf16.value == "auto":
        sources.set_argument("bf16", not (fp16 is not None and fp16.value is True), bf16)
    elif bf16 is None and fp16 is not None and fp16.value is True:
        sources.set_argument("bf16", False)
    tf32 = sources.written(_TA, "tf32")
    if tf32 is not None and tf32.value == "auto":
        sources.set_argument("tf32", False, tf32)
    recompute = sources.written(_TA, "gradient_checkpointing")
    if recompute is not None and recompute.value in ("offload", "offload_disk", "unsloth"):
        sources.set_argument("gradient_checkpointing", True, recompute)


def convert(draft: Draft, folder: Path) -> None:
    """Convert the keys of axolotl.

    Args:
        folder: The folder of the recipe, the base of its paths.
    """
    _warmup(draft)
    _model(draft, folder)
    _adapter(draft)
    _schedule(draft)
    _groups(draft)
    _layout(draft)
    _running(draft)
    kind = _task(draft)
    rows(draft, folder, kind)
    bf16_weights(draft, has_adapter=draft.value("model.adapter.type") is not None)


def _warmup(draft: Draft) -> None:
    sources = draft.sources
    if (ratio := sources.given(_AX, "warmup_ratio")) is not None:
        if sources.written(_TA, "warmup_steps") is not None:
            draft.problem(ratio, "is written beside warmup_steps; keep one of them")
        draft.number(ratio)
    default = sources.arguments.get("warmup_steps")
    if default is not None and sources.written(_TA, "warmup_steps") is None and default.value == _SHARE:
        draft.say(default, Outcome.DIFFERS, f"`schedule.warmup` {_SHARE}; axolotl warms up over 100 steps at most")


def _model(draft: Draft, folder: Path) -> None:
    sources = draft.sources
    model_name(draft, "base_model", folder)
    if (tokenizer := sources.given(_AX, "tokenizer_config")) is not None:
        draft.take("model.tokenizer", folder_or_name(draft.text(tokenizer), folder), tokenizer)
    for key in ("bos_token", "eos_token", "unk_token", "additional_special_tokens"):
        if (token := sources.given(_AX, f"special_tokens.{key}")) is not None:
            text = f"the tokenizer with the {key} {token.value}: the model's own if it has it, else a folder"
            draft.refuse("model.tokenizer", text, token)
    if (config := sources.given(_AX, "overrides_of_model_config")) is not None:
        _configuration(draft, config)
    jinja = sources.given(_AX, "chat_template_jinja")
    if jinja is not None:
        draft.refuse("model.tokenizer", "a folder of the tokenizer with the template of chat_template_jinja", jinja)
    chat_template(draft, sources.given(_AX, "chat_template"), "axolotl", folder)


def _configuration(draft: Draft, item: Item) -> None:
    """Propose the changed configuration of the model, and the loss of its routers as a key of the task."""
    changes = dict(item.value) if isinstance(item.value, Mapping) else item.value
    if isinstance(changes, dict) and changes.pop("output_router_logits", False):
        text = "the coefficient router_aux_loss_coef in the configuration of the model, or null"
        loss = router_loss(changes.pop("router_aux_loss_coef")) if "router_aux_loss_coef" in changes else Todo(text)
        if isinstance(loss, Todo):
            draft.take("task.router_loss", loss, item)
        elif loss is not None:
            draft.take("task.router_loss", loss.value, item, note=loss.note, differs=loss.differs)
    if changes:
        draft.take("model.config", changes, item)


def _adapter(draft: Draft) -> None:
    get = draft.sources.get
    on = draft.sources.given(_AX, "adapter")
    items = {ours: get(_AX, theirs) for ours, theirs in _LORA.items()}
    dora, start = draft.sources.given(_AX, "peft_use_dora"), draft.sources.given(_AX, "peft_init_lora_weights")
    loftq = draft.sources.written(_AX, "peft.loftq_config.loftq_bits") or draft.sources.given(_AX, "peft.loftq_config")
    layers, linear = draft.sources.given(_AX, "lora_target_modules"), draft.sources.given(_AX, "lora_target_linear")
    bits = {number: item for number in (4, 8) if (item := draft.sources.given(_AX, f"load_in_{number}bit"))}
    if on is None:
        draft.unread("adapter is not set", *items.values(), dora, start, loftq, layers, linear)
    elif on.value not in ("lora", "qlora"):
        draft.refuse_file(on, "adapters are lora and qlora")
    else:
        adapter(draft, on, items, dora)
        targets(draft, layers, linear)
        _start(draft, start, loftq)
        if on.value == "qlora" and 4 not in bits:
            draft.refuse("model.quantization", 'axolotl\'s qlora needs load_in_4bit: write "nf4"', on)
    quantization(draft, bits, _double(draft), None, on is not None)


def _double(draft: Draft) -> Item | None:
    """Return the key of double quantisation in `bnb_config_kwargs`, which is on without it."""
    item = draft.sources.given(_AX, "bnb_config_kwargs")
    if item is None:
        return None
    if not isinstance(item.value, dict):
        draft.problem(item, "must be an object with keys of BitsAndBytesConfig")
        return None
    known: dict[str, tuple[Any, ...]] = {
        "bnb_4bit_use_double_quant": (True, False), "bnb_4bit_quant_type": ("nf4",),
        "bnb_4bit_quant_storage": ("uint8", "bfloat16"), "llm_int8_has_fp16_weight": (False,),
    }  # fmt: skip
    for key, value in item.value.items():
        if value not in known.get(key, ()):
            draft.refuse_file(item, f"{key} {value} is no form of model.quantization")
    double = item.value.get("bnb_4bit_use_double_quant", True)
    return Item(_AX, item.key, double, item.origin)


def _start(draft: Draft, start: Item | None, loftq: Item | None) -> None:
    path = "model.adapter.start"
    if loftq is not None:
        draft.take(path, "loftq", loftq, start)
    elif start is not None and start.value is not True:
        name = str(start.value)
        if name in ("pissa", "pissa_niter_16", "loftq"):
            draft.take(path, name, start)
        else:
            draft.refuse_file(start, f"{name} is no start of model.adapter.start")


def _schedule(draft: Draft) -> None:
    least, name = draft.sources.given(_AX, "cosine_min_lr_ratio"), draft.sources.get(_TA, "lr_scheduler_type")
    if least is None:
        return
    if name is not None and name.value == "cosine":
        draft.take("schedule.min_rate", draft.number(least), least)
    else:
        draft.unread("only the schedule cosine has it", least)


def _groups(draft: Draft) -> None:
    item = draft.sources.given(_AX, "lr_groups")
    if item is None:
        return
    groups = []
    for group in item.value if isinstance(item.value, list) else []:
        names = group.get("modules") if isinstance(group, dict) else None
        if not isinstance(names, list):
            break
        groups.append({"match": [f"*{name}*" for name in names], "learning_rate": group.get("lr")})
    if groups and len(groups) == len(item.value):
        draft.take("optimizer.groups", groups, item)
    else:
        draft.refuse("optimizer.groups", "a list of groups, each with modules and lr", item)


def _layout(draft: Draft) -> None:
    sources = draft.sources
    shard, copies = (sources.given(_AX, f"dp_{key}_size") for key in ("shard", "replicate"))
    sizes = [draft.positive(item) if item else 1 for item in (shard, copies)]
    items = [item for item in (shard, copies) if item]
    if sizes[0] > 1:
        draft.take("parallel.strategy", "hsdp" if sizes[1] > 1 else "fsdp", *items)
        if sizes[1] > 1:
            draft.take("parallel.shard", sizes[0], *items)
    elif sizes[1] > 1:
        draft.take("parallel.strategy", "ddp", *items)
    selective = sources.given(_AX, "selective_checkpointing")
    if selective is not None:
        note = "the matrix products are kept, not the layers of the list"
        draft.override("activation_checkpointing", "selective", selective, note=note)


def _running(draft: Draft) -> None:
    sources = draft.sources
    for key, path in (("evals_per_epoch", "evaluation.every"), ("saves_per_epoch", "checkpoint.every")):
        if (item := sources.given(_AX, key)) is not None:
            times = draft.number(item, 1)
            note = "" if times == 1 else f"there {times:g} times in an epoch; for that, write the number of steps"
            draft.override(path, "1 epoch", item, note=note)
            if note:
                draft.say(item, Outcome.DIFFERS, f"`{path}` 1 epoch ({note})")
    epochs, steps = sources.written(_TA, "num_train_epochs"), sources.given(_TA, "max_steps")
    if epochs is not None and steps is None and draft.value("training.epochs", 1) != 1:
        text = f"`training.epochs` {epochs.value}: each epoch ends with a smaller batch; axolotl takes"
        draft.say(epochs, Outcome.DIFFERS, f"{text} ceil(rows x epochs / batch) steps")
    resume = sources.given(_AX, "auto_resume_from_checkpoints")
    if draft.flag(resume):
        draft.take("checkpoint.resume", "auto", resume)
    _logging(draft)
    _plugins(draft, sources.given(_AX, "plugins"))


def _logging(draft: Draft) -> None:
    sources = draft.sources
    project, switch = sources.given(_AX, "wandb_project"), sources.written(_AX, "use_wandb")
    if project is not None and (switch is None or draft.flag(switch)):
        draft.take("logging.project", draft.text(project), project)
    else:
        draft.unread("nothing is logged to W&B", project)
    for key in _TRACKERS:
        if (item := sources.given(_AX, key)) is not None:
            draft.say(item, Outcome.CONVERTED, "counted in `logging.to`")


def _plugins(draft: Draft, item: Item | None) -> None:
    other = [name for name in draft.names(item) if not any(fast in name for fast in _FAST_PLUGINS)]
    if item is not None and other:
        draft.refuse_file(item, f"{', '.join(other)} may change the loss or the model")
    else:
        draft.say(item, Outcome.NONE, "the kernels are torch's own")


def _task(draft: Draft) -> str:
    """Propose type and loss of the task, and return the kind of its rows: chats, pairs, kto or rewards."""
    get = draft.sources.given
    method, reward, packing = get(_AX, "rl"), get(_AX, "reward_model"), get(_AX, "sample_packing")
    rewards = draft.flag(reward)
    if draft.flag(packing) and not (method or rewards):
        draft.take("task.packing", "documents", packing, note="another choice of documents for each row", differs=True)
    else:
        draft.unread("preferences are not packed", packing)
    if reward is not None and rewards:
        _rewards(draft, reward)
        return "rewards"
    draft.unread("reward_model is not set", get(_AX, "center_rewards_coefficient"))
    if method is not None:
        return _preferences(draft, method)
    draft.take("task.type", "causal_lm", Item(_AX, "rl", None, None))
    draft.unread("rl is not set", *(get(_AX, key) for key in _OF_PREFERENCES))
    return "chats"


def _rewards(draft: Draft, on: Item) -> None:
    get = draft.sources.given
    draft.take("task.type", "reward_model", on)
    no_dropout(draft, on, "TRL turns dropout off")
    if (centre := get(_AX, "center_rewards_coefficient")) is not None:
        draft.take("task.center_coefficient", draft.number(centre), centre)
    draft.unread("reward_model is set", *(get(_AX, key) for key in ("rl", *_OF_PREFERENCES)))


def _preferences(draft: Draft, method: Item) -> str:
    """Propose the loss of preferences, and return the kind of its rows."""
    get = draft.sources.given
    loss = _loss(draft, method)
    draft.take("task.type", "preference", method)
    beta, alpha = get(_AX, "trl.beta") or get(_AX, "rl_beta"), get(_AX, "orpo_alpha")
    strength = beta or alpha or Item(_AX, "rl_beta", 0.1, None)
    draft.take("task.loss.beta", draft.number(strength), strength)
    draft.unread("rl_beta has precedence", alpha if beta else None)
    loss_arguments(draft, loss, {ours: get(_AX, theirs) for ours, theirs in _LOSS_ARGUMENTS.items()})
    no_dropout(draft, method, "TRL turns dropout off")
    return "kto" if loss == "kto" else "pairs"


def _loss(draft: Draft, method: Item) -> str:
    name, kinds = draft.text(method), draft.sources.given(_AX, "dpo_loss_type")
    loss = _LOSSES.get(name)
    if loss is None:
        draft.refuse_file(method, f"losses are {', '.join(_LOSSES)}")
        return "dpo"
    if kinds is None or name != "dpo":
        draft.unread("only rl dpo has it", kinds)
        draft.take("task.loss.type", loss, method)
        return loss
    loss = one_loss(draft, kinds, _DPO_LOSSES) or "dpo"
    draft.take("task.loss.type", loss, method, kinds)
    return loss
