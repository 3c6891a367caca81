"""The teacher of a distillation: checks against the student, loading, and its place over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainer.base.errors import Problems, RecipeError, UsageError
from trainer.engine.forward import without_cache
from trainer.engine.precision import cast_forward
from trainer.engine.sharded import Sharding, shard
from trainer.features.distillation.section import keys_of
from trainer.features.distillation.teacher import Teacher
from trainer.models.configuration import vocabulary_size
from trainer.models.describe import ModelDescription, ModelUse, describe
from trainer.models.fill import build_model
from trainer.models.matching import check_weights
from trainer.models.place import PlacedModel, tensor_cut
from trainer.models.statistics import persistent_buffers
from trainer.models.tensor_split import require_split
from trainer.models.tokenizer import load_tokenizer
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import PIPELINE_AXIS, Placements
from trainer.parallel.shards.boxes import tensor_part, whole_part
from trainer.parallel.shards.digest import joined, own_digest
from trainer.recipe.plan import RunPlan
from trainer.recipe.schema import Model, Recipe
from trainer.tasks.classes import places_of
from trainer.tasks.task import Task
from trainer.tasks.text.columns import shown
from trainer.training.preparation import Preparation
from trainer.training.row_encoding import require_fitting_rotations, require_positions
from trainer.training.second_model import LoadedModel, SecondModel

_SEGMENTS = "token_type_ids"


class TeacherFeature(SecondModel):
    """The teacher of `distillation`."""

    def describe(self, recipe: Recipe, task: Task, padding_token: int | None = None) -> ModelDescription:
        keys = keys_of(recipe)
        use = ModelUse(task.auto_class_name, {}, padding_token, packed=task.packs_documents, is_trained=False)
        with _naming_the_teacher():
            return describe(Model(name_or_path=keys.teacher, revision=keys.revision), recipe.training, use)

    def class_names(self, recipe: Recipe, task: Task) -> tuple[str, ...]:
        return _classes(self.describe(recipe, task).config)

    def check(self, plan: RunPlan, task: Task, preparation: Preparation | None) -> ModelDescription:
        recipe, problems = plan.recipe, Problems()
        described = self.describe(recipe, task, None if preparation is None else preparation.padding_token)
        with _naming_the_teacher():
            model = described.on_meta()
        with problems.collect(), _naming_the_teacher():
            _require_all(recipe, check_weights(described))
        with problems.collect():
            _columns(recipe, task, described.config)
        if plan.layout.ranks_per_row > 1:
            with problems.collect(), _naming_the_teacher():
                require_split(model, plan.layout.tp, plan.layout.cp, recipe.parallel.sequence)
        if preparation is not None:
            with problems.collect(), _naming_the_teacher():
                _require_same_inputs(recipe, task, preparation, described)
        problems.raise_all()
        return described

    def load(self, plan: RunPlan, mesh: ParallelMesh, task: Task, described: ModelDescription) -> LoadedModel:
        """See `SecondModel`. The digest of the weights stands for the place of the teacher."""
        # Ranks without the teacher add 0 to the digest, and join the gathering all the same.
        teacher, own = None, 0
        if self.is_needed(plan, mesh):
            with _naming_the_teacher():
                built = build_model(described, tensor_cut(plan, mesh))
                _require_all(plan.recipe, built.lacking)
                teacher, placements = _placed(built, plan, mesh, task)
            parts = [
                tensor_part(f"teacher.{name}", p.detach(), placements[name], mesh)
                for name, p in teacher.model.named_parameters()
            ]
            buffers = persistent_buffers(teacher.model).items()
            own = own_digest([*parts, *(whole_part(f"teacher.{name}", b.detach(), mesh) for name, b in buffers)])
        digest = joined(mesh.all_gather(own))
        return LoadedModel(teacher, {"distillation": {"teacher": digest, "revision": None}})

    def is_needed(self, plan: RunPlan, mesh: ParallelMesh) -> bool:
        """Return whether this rank has the last pipeline stage, or there is no pipeline."""
        pipeline = plan.pipeline
        return pipeline is None or pipeline.num_stages - 1 in pipeline.stages_of(mesh.index(PIPELINE_AXIS))

    def place(self, built: PlacedModel, plan: RunPlan, mesh: ParallelMesh, task: Task) -> Teacher:
        return _placed(built, plan, mesh, task)[0]


def _placed(built: PlacedModel, plan: RunPlan, mesh: ParallelMesh, task: Task) -> tuple[Teacher, Placements]:
    """Place a built teacher on the device, sharded under fsdp and hsdp; return it with its placements."""
    recipe = plan.recipe
    model = built.model.requires_grad_(False)
    placements = built.placements
    cast_forward(model, recipe.precision, mesh.device)
    model.to(mesh.device)
    # Under ZeRO, every rank has the whole teacher.
    if plan.strategy.cuts_parameters and not plan.strategy.package:
        placements = shard(model, placements, mesh, Sharding(recipe.precision))
    columns = _columns(recipe, task, model.config)
    return Teacher(model, keys_of(recipe), without_cache(model), columns, built.vocabulary), placements


@contextmanager
def _naming_the_teacher() -> Iterator[None]:
    """Let errors of the functions that load and check models name the teacher."""
    key, problems = "`distillation.teacher`", Problems()
    with problems.collect():
        yield
    if problems.messages:
        own = [text.replace("`model.name_or_path`", key) for text in problems.messages]
        raise RecipeError(*(text if key in text else f"{key}: {text}" for text in own))


def _classes(config: Any) -> tuple[str, ...]:
    """Return the class names of a teacher's configuration, in the order of its head."""
    return tuple(str(config.id2label[index]) for index in sorted(config.id2label))


def _columns(recipe: Recipe, task: Task, config: Any) -> list[int] | None:
    """Return the teacher's class for each class of the student; None if they have the same order, or are tokens."""
    if not task.class_names:
        return None
    names = _classes(config)
    columns = places_of(task.class_names, names)
    if columns is None:
        raise UsageError(
            f"`distillation.teacher` must have the classes of the task, {shown(task.class_names)}, but"
            f" {keys_of(recipe).teacher!r} has {shown(names)}; use a teacher of these classes, or correct"
            " `id2label` in its config.json, or `task.labels`"
        )
    return None if columns == list(range(len(columns))) else columns


def _require_all(recipe: Recipe, lacking: Any) -> None:
    """Refuse a teacher that lacks weights, such as the head of the task."""
    if lacking:
        raise UsageError(
            f"`distillation.teacher` must be trained for `task.type` {recipe.task.type}, but"
            f" {keys_of(recipe).teacher!r} has no weights for {shown(list(lacking))}; use a model that was trained"
            " for this task"
        )


def _require_same_inputs(recipe: Recipe, task: Task, preparation: Preparation, described: ModelDescription) -> None:
    config, name = described.config, described.recipe.name_or_path
    if (other := recipe.task.other_inputs) is not None:
        if not preparation.prepares_for(described.recipe, config):
            raise UsageError(
                f"`distillation.teacher` must read the inputs of the student, but the {other.part} of {name!r} makes"
                " others (size, channels or normalisation); use a teacher with the same one"
            )
        return
    require_positions(recipe, config, "`distillation.teacher`")
    require_fitting_rotations(recipe, config, task)
    student, teacher = preparation.text_tokenizer, load_tokenizer(described.recipe)
    assert student is not None
    if student.get_vocab() != teacher.get_vocab():
        raise UsageError(
            f"`distillation.teacher` must have the student's tokenizer, since both read the same tokens, but that of"
            f" {name!r} has other tokens ({len(teacher):,}, not {len(student):,}, or other ids); use a teacher with the"
            " same tokenizer, or name its tokenizer in `model.tokenizer` if the student has none of its own"
        )
    pairs = len(getattr(task, "text_columns", ())) > 1
    if pairs and _SEGMENTS in teacher.model_input_names and _SEGMENTS not in student.model_input_names:
        raise UsageError(
            f"`distillation.teacher` is {name!r}, which reads the segments of a pair ({_SEGMENTS}), but the student's"
            " tokenizer makes none; use a teacher without them, or a student with them"
        )
    sizes = [vocabulary_size(of) for of in (preparation.config, config)]
    if task.labels_are_tokens and sizes[0] != sizes[1]:
        raise UsageError(
            f"`distillation.teacher` must have the student's `vocab_size` {sizes[0]}, but {name!r} has {sizes[1]}; use"
            " a model with as many tokens"
        )
    task.for_configuration(config)
