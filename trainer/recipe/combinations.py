"""The table of pairs of keys that exclude each other, with reasons; read by `trainer check` and the documentation.

Rows about a strategy or a schedule derive from the tables in `strategies.py` and `schedules.py`. Rules with more than
two conditions are in `recipe/reading/rules.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from trainer.recipe.schedules import SCHEDULES, PipelineSchedule
from trainer.recipe.strategies import STRATEGIES, Strategy

_DOES_NOT_COMBINE = "is {value}, which {other} does not combine with: {reason}; {remedy}"
_NO_PIPELINE = "is {value}, which a pipeline does not combine with: {reason}; {remedy}"
_STRATEGY, _STAGES, _TENSOR = "parallel.strategy", "parallel.pipeline.stages", "parallel.tensor"
_CONTEXT, _LOAD = "parallel.context", "parallel.load"


@dataclass(frozen=True)
class Condition:
    """A condition on the value of one key."""

    key: str  # dotted
    values: str  # as the documentation shows them
    holds: Callable[[Any], bool]

    @property
    def section(self) -> str:
        """The top-level section of the key."""
        return self.key.partition(".")[0]

    def value(self, sections: Mapping[str, Any]) -> Any:
        value: Any = sections[self.section]
        for name in self.key.split(".")[1:]:
            value = getattr(value, name)
        return value


@dataclass(frozen=True)
class Exclusion:
    """Two conditions that must not hold together; reported at the first key."""

    first: Condition
    second: Condition
    reason: str
    remedy: str
    form: str = _DOES_NOT_COMBINE  # of the message after the first key

    @property
    def sections(self) -> frozenset[str]:
        """The sections that `message` needs."""
        return frozenset((self.first.section, self.second.section))

    def message(self, sections: Mapping[str, Any]) -> str | None:
        """Return the error message after the first key, or None if the conditions do not both hold."""
        value, other = self.first.value(sections), self.second.value(sections)
        if not (self.first.holds(value) and self.second.holds(other)):
            return None
        other = other if isinstance(other, str) else json.dumps(other)
        return self.form.format(value=json.dumps(value), other=other, reason=self.reason, remedy=self.remedy)


def _is(key: str, *values: Any) -> Condition:
    return Condition(key, ", ".join(f"`{json.dumps(value)}`" for value in values), lambda value: value in values)


def _above_one(key: str) -> Condition:
    return Condition(key, "above 1", lambda value: value is not None and value > 1)


def _strategies(test: Callable[[Strategy], bool]) -> tuple[str, ...]:
    return tuple(name for name, row in STRATEGIES.items() if test(row))


def _strategy_not_in(able: tuple[str, ...]) -> Condition:
    return _is(_STRATEGY, *(name for name in STRATEGIES if name not in able))


def _schedules(test: Callable[[PipelineSchedule], bool]) -> tuple[str, ...]:
    return tuple(name for name, row in SCHEDULES.items() if test(row))


def _of_strategies(first: Condition, reason_of: Callable[[Strategy], str]) -> Iterator[Exclusion]:
    """Yield a row for each reason against a condition under some strategies."""
    able = _strategies(lambda row: not reason_of(row))
    for reason in dict.fromkeys(filter(None, map(reason_of, STRATEGIES.values()))):
        unable = _strategies(lambda row, reason=reason: reason_of(row) == reason)  # type: ignore[misc]
        yield Exclusion(first, _is(_STRATEGY, *unable), reason, f"use {', '.join(able)}")


def _of_offloads() -> Iterator[Exclusion]:
    for offload in ("optimizer", "parameters"):
        able = _strategies(lambda row, offload=offload: offload in row.offloads)  # type: ignore[misc]
        yield Exclusion(
            _is("parallel.offload", offload),
            _strategy_not_in(able),
            "the strategy does not support this offload",
            f'use {", ".join(able)}, or "none"',
            form="is {value}, which {other} does not support; {remedy}",
        )


def _of_old_torch(torch: str) -> Iterator[tuple[Condition, str, str]]:
    """Yield the strategies that cannot shard quantised weights with a version of torch."""
    if Version(torch) < Version("2.12"):
        reason = f"FSDP of torch {torch} asks for gradients of every tensor, and codes are integers"
        yield _is(_STRATEGY, "fsdp", "hsdp"), reason, "install torch 2.12 or newer, or use ddp"


def _of_others(first: Condition, able: tuple[str, ...]) -> Exclusion:
    names = f"{', '.join(able[:-1])} and {able[-1]}" if len(able) > 1 else able[0]
    return Exclusion(
        first,
        _strategy_not_in(able),
        f"the key applies only to {names}",
        f"remove it, or use {' or '.join(able)}",
        form=f"applies only to {names}, but `{_STRATEGY}` is {{other}}; {{remedy}}",
    )


def _of_schedules() -> Iterator[Exclusion]:
    single = _schedules(lambda row: not row.several_stages)
    several = _schedules(lambda row: row.several_stages)
    key, schedule = "parallel.pipeline.stages_per_rank", "parallel.pipeline.schedule"
    form = "must be {reason} for the schedule {other}, but is {value}"
    yield Exclusion(_above_one(key), _is(schedule, *single), "1", f"remove it, or use {' or '.join(several)}", form)
    yield Exclusion(
        _is(key, 1), _is(schedule, *several), "at least 2", f"remove it, or use {' or '.join(single)}", form
    )
    splitting = _schedules(lambda row: row.splits_backward)
    yield Exclusion(
        _is(schedule, *splitting),
        _is(_STRATEGY, *_strategies(lambda row: not row.no_pipeline and row.cuts_parameters)),
        "torch's split backward pass loses gradients of sharded parameters (measured)",
        "use ddp, or another schedule",
    )
    yield Exclusion(
        _is("activation_checkpointing", "selective"),
        _is(schedule, *splitting),
        "the split backward pass recomputes twice, but the kept activations can be read only once",
        "use none or full",
        form="is {value}, which the schedule {other} does not combine with: {reason}; {remedy}",
    )


def _excludes(first: Condition, *others: tuple[Condition, str, str], form: str = "") -> Iterator[Exclusion]:
    for second, reason, remedy in others:
        usual = _NO_PIPELINE if second.key == _STAGES else _DOES_NOT_COMBINE
        yield Exclusion(first, second, reason, remedy, form.replace("{key}", second.key) or usual)


_GROUPS = _strategies(lambda row: row.groups)
_ZERO = _is(_STRATEGY, *_strategies(lambda row: bool(row.zero_stage)))
_DP = _is(_STRATEGY, "dp")
_TOKENS = Condition("training.micro_batch_tokens", "a number", lambda value: value is not None)
_USE_DDP = "use ddp, which runs on any number of processes"
_ONE_FALSE = "set it to false, or set the other to false"
_FLATTENS = "DeepSpeed flattens and cuts weights, but"
_OFFLOADED = _is("parallel.offload", "parameters")

EXCLUSIONS: tuple[Exclusion, ...] = (
    *_of_strategies(_above_one(_STAGES), lambda row: row.no_pipeline),
    *_excludes(
        _is("parallel.offload", "optimizer", "parameters"),
        (_above_one(_STAGES), "the combination is not tested", 'set it to "none"'),
    ),
    *_of_schedules(),
    *_of_strategies(_above_one(_TENSOR), lambda row: row.no_tensor),
    *_of_strategies(_above_one(_CONTEXT), lambda row: row.no_tensor),
    *(
        Exclusion(
            _above_one(key),
            _is("training.layout_invariant_dropout", False),
            f"torch's own dropout would draw the same mask on every {rank} rank",
            "leave it true",
            form="is {value}, which needs `training.layout_invariant_dropout`: {reason}; {remedy}",
        )
        for key, rank in ((_TENSOR, "tensor"), (_CONTEXT, "context"))
    ),
    *_excludes(
        _above_one(_CONTEXT),
        (_above_one(_TENSOR), "both cut the attention heads", "use one of them"),
        (
            _is("compile", True),
            "the exchange of heads has not been compiled in a test",
            "set one of them to 1 or false",
        ),
    ),
    Exclusion(
        _is("parallel.sequence", True),
        _is(_TENSOR, 1),
        "sequence parallelism shards positions over tensor ranks",
        f"set `{_TENSOR}` above 1, or leave it false",
        form=f"is {{value}}, but `{_TENSOR}` is {{other}}: {{reason}}; {{remedy}}",
    ),
    *_of_offloads(),
    *_of_strategies(_is(_LOAD, "broadcast"), lambda row: row.no_broadcast),
    *_of_strategies(_is("compile", True), lambda row: row.no_compile),
    _of_others(Condition("parallel.shard", "a number", lambda value: value != "auto"), _GROUPS),
    _of_others(_is("parallel.elastic", "shards"), _GROUPS),
    *_excludes(_is("parallel.elastic", "data"), (_DP, "one process has no ranks", "use ddp")),
    _of_others(
        _is("parallel.reshard_after_forward", False),
        _strategies(lambda row: row.cuts_parameters and not row.zero_stage),
    ),
    *_excludes(
        _is("optimizer.name", "muon", "adafactor"),
        (_ZERO, f"{_FLATTENS} the update of a matrix needs all of it", "use adamw or sgd, or fsdp"),
        (_OFFLOADED, "matrices cannot be gathered from CPU memory", 'use adamw or sgd, or "none"'),
    ),
    *_excludes(
        _is("optimizer.name", "adamw_8bit"),
        (_ZERO, f"{_FLATTENS} a scale belongs to a block of a whole weight", "use adamw, or fsdp"),
        (_OFFLOADED, "ranks cannot exchange scales from CPU memory", 'use adamw, or "none"'),
    ),
    *_excludes(
        _is("optimizer.name", "schedule_free_adamw"),
        (
            _is(
                "schedule.name",
                "linear",
                "cosine",
                "cosine_with_restarts",
                "polynomial",
                "inverse_sqrt",
                "warmup_stable_decay",
            ),
            "the average of the weights takes the place of a decaying rate",
            "set `schedule.name` to constant; `schedule.warmup` may stay",
        ),
        (
            _is(_STRATEGY, "zero3"),
            "DeepSpeed steps each group of weights apart, but the average counts the steps of all",
            "use zero2 or fsdp",
        ),
    ),
    *_excludes(
        _is("model.quantization", "nf4", "nf4_single", "int8"),
        (_is(_STRATEGY, "zero3"), f"{_FLATTENS} a scale belongs to a block of a whole weight", "use fsdp"),
        (_above_one(_TENSOR), "a scale belongs to elements of several tensor ranks", f"set `{_TENSOR}` to 1"),
        (_is("cuda_graphs", True), "bitsandbytes has not been captured in a test", "set it to false"),
        (_is("compile", True), "bitsandbytes has not been compiled in a test", "set it to false"),
        *_of_old_torch(version("torch")),
        form="is {value}, which does not combine with `{key}` {other}: {reason}; {remedy}",
    ),
    *_excludes(
        Condition("model.neftune_alpha", "a number", lambda value: value is not None),
        (
            _is("training.layout_invariant_dropout", False),
            "the noise is drawn as layout-invariant dropout is",
            "leave it true",
        ),
        form="is {value}, which does not combine with `{key}` {other}: {reason}; {remedy}",
    ),
    *_excludes(
        Condition("model.unfreeze_at_step", "a number", lambda value: value is not None),
        (
            _ZERO,
            "DeepSpeed updates all weights of a flat buffer at once",
            "use ddp, fsdp or hsdp",
        ),
        (_is("cuda_graphs", True), "a graph writes all gradients in place", "set it to false"),
        form="is {value}, which does not combine with `{key}` {other}: {reason}; {remedy}",
    ),
    *_excludes(
        Condition("training.ema_decay", "a share", lambda value: value is not None),
        (_is("optimizer.name", "schedule_free_adamw"), "it averages the weights itself", "set the decay to null"),
        (
            _is(_STRATEGY, "zero3"),
            "DeepSpeed would gather the trained weights in evaluations",
            "use zero2 or fsdp",
        ),
        (
            _is("weights", "bf16_compensated", "bf16_stochastic"),
            "averages in bf16 would lose small changes",
            "use weights fp32",
        ),
    ),
    *_excludes(
        _is("weights", "bf16_compensated", "bf16_stochastic"),
        (
            _is("precision", "fp32", "fp16"),
            "weights are stored in the type of the matrix products",
            "use precision bf16, or weights fp32",
        ),
        (
            _is("optimizer.name", "adamw_8bit", "sgd", "muon", "adafactor", "schedule_free_adamw"),
            "only the update of adamw keeps small changes of such weights",
            "use adamw, or weights fp32",
        ),
        (
            _ZERO,
            "DeepSpeed keeps fp32 master weights, or rounds updates to the nearest bf16, which loses small ones",
            "use fsdp, or weights fp32",
        ),
        (_DP, "its copies on the GPUs have gradients in the type of the weights", _USE_DDP),
    ),
    *_excludes(
        _is("parallel.communication.gradients", "fp16"),
        (
            _is("precision", "fp32", "bf16"),
            "small gradients become 0 without the loss scale of fp16",
            "use bf16 or fp32",
        ),
    ),
    *_excludes(
        _is("parallel.communication.gradients", "bf16", "fp16"), (_DP, "one process sends no gradients", "use fp32")
    ),
    _of_others(Condition("parallel.deepspeed", "any keys", bool), _strategies(lambda row: bool(row.zero_stage))),
    *_excludes(
        _is("compile", True),
        (
            _is("data.packing", True),
            "a graph would hold the lengths of all rows, so each microbatch would need a compilation",
            "set one of them to false",
        ),
    ),
    *_excludes(
        _is("cuda_graphs", True),
        (
            _strategy_not_in(("ddp",)),
            "its collectives and copies in the passes have not been captured in a test",
            "set it to false, or use ddp",
        ),
        (_above_one(_STAGES), "a schedule of stages is not captured", "set it to false, or use 1 stage"),
        *(
            (
                _above_one(key),
                "collectives in the passes have not been captured in a test",
                "set it to false, or use 1",
            )
            for key in (_TENSOR, _CONTEXT)
        ),
        (_is("compile", True), "compiled layers have not been captured in a test", _ONE_FALSE),
        (_is("data.packing", True), "a graph would hold the lengths of all rows", _ONE_FALSE),
        (
            _is("activation_checkpointing", "selective", "full"),
            "a recomputation has not been captured in a test",
            "set it to false, or use none",
        ),
        form="is {value}, which does not combine with `{key}` {other}: {reason}; {remedy}",
    ),
    *_excludes(
        _above_one("data.pad_to"),
        (_is("data.packing", True), "packed layers have no padding", "set it to 1, or the other to false"),
        (
            _TOKENS,
            "microbatches by tokens are padded to their longest row only",
            "set it to 1, or use `training.micro_batch_size`",
        ),
    ),
    *_excludes(
        _is("data.packing", True),
        (_above_one(_STAGES), "stages exchange padded rows of one shape", "set it to false, or use 1 stage"),
        (_DP, "it splits padded rows over its GPUs", _USE_DDP),
    ),
    *_excludes(
        _TOKENS,
        (
            _above_one(_STAGES),
            "a schedule has a fixed number of microbatches of one shape",
            "use `training.micro_batch_size`",
        ),
    ),
)
"""Every pair that is refused for any model, data and number of ranks."""
