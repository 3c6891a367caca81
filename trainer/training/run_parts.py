"""The parts of a run beside those of its training: the meter, evaluations, facts, notes and waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainer.models.attention import attention_notes
from trainer.models.dropout import dropout_notes
from trainer.models.sequence_axis import axis_notes
from trainer.observe.meter import Meter
from trainer.observe.observer import Observer
from trainer.observe.preview_records import Preview
from trainer.observe.records import Idling, RunInfo
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.drawing import layers_text
from trainer.training.assembly import Assembly
from trainer.training.best_evaluation import BestEvaluation
from trainer.training.run_info import model_size, run_info, total_peak_flops


def best_evaluation(parts: Assembly, observers: Observer, keep_best: Callable[[], None]) -> BestEvaluation:
    """Return the evaluations of the training; `keep_best` exports the model after the best one."""
    rows = None if parts.data.validation is None else parts.data.validation.content_hash
    return BestEvaluation(parts.recipe, parts.progress, parts.evaluator(observers), keep_best, rows)


def meter_of(parts: Assembly) -> Meter:
    """Return the meter of the training. All ranks must call it."""
    return Meter(model_size(parts.models, parts.placements, parts.mesh), total_peak_flops(parts.recipe, parts.mesh))


def notes_of(parts: Assembly) -> list[str]:
    """Return notes for the user on model, data and engine."""
    recipe, model, device = parts.recipe, parts.models[0], parts.mesh.device
    return [
        *([] if parts.progress.step else parts.built[0].notes),  # a checkpoint has replaced the weights
        *parts.data.notes(recipe.data.max_length),
        *axis_notes(model.config, parts.plan.layout),
        *attention_notes(model, device),
        *dropout_notes(model, device),
        *parts.engine.notes(),
    ]


def facts_of(parts: Assembly, environment: LaunchEnvironment, preview: Preview | None = None) -> RunInfo:
    """Return the facts for the start-up summary. All ranks must call it."""
    facts = run_info(parts.plan, environment, parts.data, parts.models, parts.placements, parts.mesh)
    groups = parts.built[0].groups.table
    resumed = parts.progress.step or None
    return replace(facts, resumed_from=resumed, stages=_stage_texts(parts), groups=groups, preview=preview)


def idling_of(parts: Assembly) -> Idling | None:
    """Return how long the pipeline ranks waited, on rank 0. All ranks must call it."""
    if parts.plan.pipeline is None:
        return None
    gathered = parts.mesh.gather((parts.mesh.index("pp"), parts.engine.idle_share()))
    measured: dict[int, list[float]] = {}
    for rank, share in gathered or []:
        if share is not None:
            # Data replicas of a pipeline rank wait for other ranks than its own, so the mean of all counts.
            measured.setdefault(rank, []).append(share)
    if not measured:
        return None
    means = tuple(sum(measured[rank]) / len(measured[rank]) for rank in sorted(measured))
    return Idling(means, parts.plan.pipeline.bubble)


def _stage_texts(parts: Assembly) -> tuple[str, ...]:
    """Return the schedule of the pipeline and the contents of each stage, on rank 0; empty without a pipeline."""
    pipeline = parts.plan.pipeline
    if pipeline is None:
        return ()
    stages = pipeline.stages_of(parts.mesh.index("pp"))
    sizes = [sum(p.numel() for p in model.parameters()) for model in parts.models]
    layers = [part.stage.layers if part.stage else () for part in parts.built]
    # One replica tells about a stage, but all ranks join the gather.
    contents = list(zip(stages, layers, sizes, strict=True)) if parts.mesh.is_first_replica else []
    gathered = parts.mesh.gather(contents)
    texts = [str(pipeline)]
    for stage, names, size in sorted(part for of_rank in gathered or [] for part in of_rank):
        rank = pipeline.rank_of(stage)
        texts.append(f"stage {stage} on pipeline rank {rank}: {layers_text(names)}; {size:,} parameters a rank")
    return tuple(texts)
