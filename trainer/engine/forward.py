"""The forward pass of microbatches in every engine: dropout keys, the sum of losses and its denominator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.base.extensions import sole
from trainer.engine.precision import cast_forward, store_frozen, store_in_bf16, weights_dtype
from trainer.engine.results import EvalResult
from trainer.models.attention import FLAT, padding_known
from trainer.models.dropout import RefuseUnkeyedDropout
from trainer.models.families.table import CHECKPOINTING, COMPILE, in_table, layers_of
from trainer.models.place import PlacedModel
from trainer.parallel.copying import begin_to_host
from trainer.parallel.dropout import MicrobatchKey
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import IGNORED_LABEL, Microbatch, RankBatch, has_padding
from trainer.parallel.placement import EXPERT_AXIS
from trainer.parallel.random import seed_generator, stream_key
from trainer.recipe.plan import RunPlan
from trainer.recipe.registered import asked_for
from trainer.recipe.schema import Recipe
from trainer.tasks.task import Task

if TYPE_CHECKING:
    from trainer.engine.joint import InnerLoss, JointLosses
    from trainer.engine.rounded_weights import RoundedWeights

ModelCall = Callable[..., Any]


class RowWatcher(Protocol):
    """An observer of the scores of training rows, for rows that do not depend on each other."""

    def watch(self, step: int, microbatch: Microbatch, scores: Tensor) -> None:
        """Look at the scores of a microbatch, which may be on a GPU, before the optimizer step after `step` steps."""

    def store(self) -> None:
        """Store the results of all steps until now; a checkpoint of them follows."""


ModelChange = Callable[[PlacedModel, Recipe], None]
"""A registered function that changes a model before its first pass, for recipes with its key."""


def prepare_model(built: PlacedModel, mesh: ParallelMesh, plan: RunPlan) -> PlacedModel:
    """Apply the recipe's precision, recomputation and compilation to the model, before a strategy wraps it.

    Returns the description of the model, with its compiled layers.

    Raises:
        UsageError: the device does not support the precision; activation checkpointing or compilation does not find
            the layers of the model, or its compiler; or the layers cannot work without padding.
    """
    changes: list[ModelChange] = asked_for("model", plan.recipe)
    if (family := in_table(built.model)) and family.prepare:
        changes.append(family.prepare)
    for change in changes:
        change(built, plan.recipe)
    if plan.recipe.data.padding_free:
        from trainer.models.layer_hooks import flatten_layers

        flatten_layers(built.model)
    how = plan.recipe.activation_checkpointing
    if how != "none":
        from trainer.models.checkpointing import checkpoint_layers

        checkpoint_layers(layers_of(built.model, CHECKPOINTING).values(), how, built.dropout_keys)
    if plan.recipe.compile:
        from trainer.models.compiled import CompiledLayers

        layers = layers_of(built.model, COMPILE).values()
        # The layers run eagerly in the first pass; `_end_first_pass` starts the compiler.
        compiled = CompiledLayers(layers, built.dropout_keys, mesh.device)
        built = replace(built, compiled=compiled)
    if weights_dtype(plan.recipe) == torch.bfloat16:
        store_in_bf16(built)
    # A checkpoint of other recipes has the frozen weights too. Another engine cuts and gathers in one type.
    if plan.recipe.model.is_partly_frozen and not plan.strategy.package:
        store_frozen(built, plan.recipe.precision)
    # A recomputation would keep the copies.
    if plan.recipe.precision != "fp32" and _runs_once(plan.recipe):
        from trainer.engine.rounded_weights import registered_casts

        # Before `cast_forward`: in fp16 it replaces the classes of products.
        if (casts := registered_casts()) is not None:
            casts.share_inputs(built.model)
    cast_forward(built.model, plan.recipe.precision, mesh.device)
    return built


def _runs_once(recipe: Recipe) -> bool:
    """Return whether layers run as they are, once a pass; a compiler fuses operations itself."""
    return recipe.activation_checkpointing == "none" and not recipe.compile


def _cheap_rotation(model: nn.Module) -> AbstractContextManager[object]:
    cheap = sole("rotation") if any("rotary" in name for name, _ in model.named_modules()) else None
    return cheap(model) if cheap else nullcontext()


def origin_changed(problem: str) -> UsageError:
    return UsageError(
        "`model.name_or_path` must keep its files until the training ends, because frozen weights are held in 16 bits"
        f" and read again to be written, but {problem}; restore the files and resume"
    )


def without_cache(model: nn.Module) -> dict[str, bool]:
    """Return the model's arguments for a forward pass without a cache of keys and values.

    With a cache, a recomputation would add them twice, and transformers would not find the documents of packed rows.
    """
    # A head often passes `**kwargs` to its base model, so its signature alone does not show the argument.
    of_model, of_base = (
        inspect.signature(type(module).forward).parameters for module in (model, getattr(model, "base_model", model))
    )
    passes_on = any(parameter.kind == parameter.VAR_KEYWORD for parameter in of_model.values())
    return {"use_cache": False} if "use_cache" in of_model or (passes_on and "use_cache" in of_base) else {}


def denominator_of(task: Task, batch: RankBatch, device: torch.device, sum_: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the number of valid labels in the global batch, or the sum of their weights, a scalar.

    It is known before the first forward pass.

    Args:
        sum_: sums a tensor over the data-parallel ranks, in place, and returns it.
    """
    # Every rank knows this number, so no collective is needed.
    if task.rows_are_labels:
        return torch.full((), float(batch.num_rows), device=device)
    counts = [task.num_valid(m.labels) for m in batch.microbatches if not m.filler]
    # Unlike `torch.tensor`, `torch.full` does not let the host wait for a GPU.
    # Counts are exact in fp64, so the order of the sum does not matter; fp32 is exact below 2**24 only.
    total = sum_(torch.full((), sum(map(float, counts)), dtype=torch.float64, device=device)).float()
    # A batch with ignored labels only has a loss of 0, not 0 / 0.
    return total.masked_fill_(total <= 0, 1.0)


class ModelForward:
    """The forward pass of a task's model.

    Args:
        call: the model to call in training, perhaps wrapped by a strategy; None: the model itself.
        eval_call: the model to call in evaluations; None: the model itself.
        rounded: the weights of matrix products in 16 bits for all passes of a step; None: autocast rounds them in each
            pass, or nothing does.
    """

    def __init__(
        self,
        built: PlacedModel,
        task: Task,
        mesh: ParallelMesh,
        plan: RunPlan,
        call: ModelCall | None = None,
        eval_call: ModelCall | None = None,
        rounded: RoundedWeights | None = None,
    ) -> None:
        self.mesh, self.plan = mesh, plan
        self._model, self.models = built.model, [built.model]
        self._origins = [built.origin] if built.origin else []
        self._keys = built.dropout_keys
        self._compiled = [built.compiled] if built.compiled else []
        self._head = built.head
        self._added_loss = built.added_loss
        self.watchers: list[RowWatcher] = [begin(self) for begin in built.watchers]
        self.inner: InnerLoss | None = next((begin(self) for begin in built.inner), None)
        self._call = call or built.model
        self._eval_call = eval_call or built.model
        self._rounded = rounded
        self._task = task
        self.eval_task = task.for_evaluation()
        self._seed = plan.recipe.training.seed
        # Whether each forward pass is a collective of the data-parallel ranks.
        self._synced = (plan.strategy.cuts_parameters and mesh.size("dp_shard") > 1) or mesh.size(EXPERT_AXIS) > 1
        self._padding_free = plan.recipe.data.padding_free  # the layers of the model process tokens without padding
        self._constants = without_cache(built.model)
        self._step = 0
        self._num_rows = 0
        self._joint: JointLosses | None = None  # of the current step
        # A recomputation must repeat the operations of the first pass.
        self._rotation = _cheap_rotation(built.model) if _runs_once(plan.recipe) else nullcontext()
        # The first pass runs every dropout of the model, so the watch need not take time in later ones.
        self._watch: AbstractContextManager[object] = RefuseUnkeyedDropout() if built.dropout_keys else nullcontext()

    def call_model(self, rounded: RoundedWeights | None) -> None:
        """Call the model itself in later passes, inside of another context of rounded weights."""
        self._call, self._rounded = self._model, rounded

    def read_again(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Return this rank's part of a parameter from its origin; None if the origin has it in the type `dtype`.

        Raises:
            UsageError: its file can no longer be read.
        """
        origin = next(origin for origin in self._origins if name in origin.names)
        if origin.types.get(name) == dtype:
            return None
        try:
            return origin.read(name)
        except (OSError, SafetensorError, ValueError) as error:
            raise origin_changed(f"{name} cannot be read again: {error}") from error

    @contextmanager
    def step(self, step: int, batch: RankBatch, scale: Tensor | None = None) -> Iterator[None]:
        """Run the passes of the microbatches of the optimizer step after `step` steps in this context.

        If the rows of `batch` depend on each other, a first pass computes their losses. `scale` is that of the loss.
        """
        self._step, self._task = step, self._task.at_step(step)
        # Reset before the first pass: losses of the previous batch must not enter this one.
        self._num_rows, self._joint = batch.num_rows, None
        with self._rounded.use() if self._rounded else nullcontext():
            # An evaluation between two steps leaves the model in evaluation mode.
            self._set_training(True)
            self._seed_dropout()
            counts = self.inner is not None and self.inner.begin(batch, scale)
            if self._task.rows_depend:
                self._joint = self._joint_losses(batch)
            elif counts:
                self._first_scores(batch)
            if self._task.rows_depend or counts:
                if self.inner is not None:
                    self.inner.counted()
                self._seed_dropout()  # the second pass draws the same masks
            yield

    def dropout_table(self, device: torch.device) -> Tensor | None:
        """Return the keys of all calls of dropout sites in this step, on a device; None with torch's dropout."""
        return self._keys.known(self._step, device)[1] if self._keys else None

    def _seed_dropout(self) -> None:
        if self._keys is None:
            # Torch's own dropout must draw other masks on each data-parallel rank and in each stage, and the same masks
            # again after a resumption.
            # Tensor and context ranks are absent from the formula on purpose: they share rows and need equal masks.
            place = self.mesh.index("dp") + self.mesh.size("dp") * self.mesh.index("pp")
            seed_generator(self.mesh.device, stream_key(self._seed, self._step, place))

    @torch.no_grad()
    def _joint_losses(self, batch: RankBatch) -> JointLosses | None:
        """Return the losses of the global batch after a pass without gradients.

        With one microbatch on each rank, return None: `loss_sum` needs no second pass, because it has all scores.
        """
        if len(batch.microbatches) == 1:
            return None
        from trainer.engine.joint import joint_losses

        # A collective: every data rank has the same number of microbatches, fillers included.
        return joint_losses(self._task, self.mesh, batch.num_rows, batch.microbatches, self._first_scores(batch))

    @torch.no_grad()
    def _first_scores(self, batch: RankBatch) -> list[Tensor]:
        return [self._training_scores(self._eval_call, self._ready(m)) for m in batch.microbatches]

    def denominator(self, batch: RankBatch) -> Tensor:
        """Return the number of valid labels in the global batch, or the sum of their weights."""
        return denominator_of(self._task, batch, self.mesh.device, lambda local: self.mesh.sum_(local, "dp"))

    def loss_sum(self, microbatch: Microbatch) -> Tensor:
        """Return the sum of losses of a microbatch; a filler joins the collectives with a gradient of zero."""
        microbatch = self._ready(microbatch)
        logits = self._training_scores(self._call, microbatch)
        if not self._task.rows_depend:
            self._show(microbatch, logits)
            loss = self._row_losses(logits, microbatch.labels, self._taught(microbatch.inputs, microbatch.is_padded))
        else:
            from trainer.engine.joint import joint_losses

            joint = self._joint or joint_losses(self._task, self.mesh, self._num_rows, [microbatch], [logits])
            loss = joint.sum_of(microbatch.rows, logits)
        # A filler must run its backward pass too, because FSDP and DDP communicate inside of it.
        return loss * 0.0 if microbatch.filler else loss

    def _show(self, microbatch: Microbatch, scores: Tensor) -> None:
        for watcher in self.watchers if not microbatch.filler else ():
            watcher.watch(self._step, microbatch, scores.detach())

    def _taught(self, inputs: dict[str, Tensor], is_padded: bool | None) -> Tensor | None:
        """Return a second model's outputs for the inputs of rows on this rank's device; None: there is none."""
        if self._added_loss is None:
            return None
        with padding_known(is_padded):
            return self._added_loss.outputs(self._task.model_inputs(inputs))

    def _row_losses(self, logits: Tensor, labels: Tensor, taught: Tensor | None) -> Tensor:
        """Return the sum of the losses of rows, with that of the outputs `taught` of a second model, if any."""
        loss = self._task.loss_sum(logits, labels)
        if self._added_loss is None or taught is None:
            return loss
        return self._added_loss.mixed(loss, logits, taught, self._task.label_weights(labels))

    def _training_scores(self, call: ModelCall, microbatch: Microbatch) -> Tensor:
        """Return the scores of a microbatch, on this rank's device, with the dropout of its rows."""
        mask = microbatch.inputs.get("attention_mask")
        key = MicrobatchKey(self._step, microbatch.text_rows, microbatch.flat, mask)
        # The key belongs to this microbatch, and a recomputation captures it, whatever runs in between.
        keyed = self._keys.use(key) if self._keys else nullcontext()
        with self._watch, self._rotation, keyed, self.inner.running(microbatch) if self.inner else nullcontext():
            scores = self._scores(call, microbatch, microbatch.labels)
        self._end_first_pass()
        return scores

    def _end_first_pass(self) -> None:
        """End the watch of the first training pass, and compile the layers from the next one on."""
        self._watch = nullcontext()
        for layers in self._compiled:
            layers.start()

    @torch.no_grad()
    def begin_eval(self, microbatch: Microbatch) -> Callable[[], EvalResult]:
        """Begin a forward pass without dropout and gradients, and return a function that waits for its result."""
        self._set_training(False)
        # Counted before the copy to the device.
        num_valid = int(self.eval_task.num_valid(microbatch.labels))  # on the CPU, so the host need not wait
        # A filler runs the model as well: under FSDP its layers gather weights on all ranks.
        microbatch, logits = self._evaluated(microbatch, labelled=True)
        generated = self._generated(microbatch)
        if logits is None:
            return EvalResult.begin_read(None, 0, {})
        # The loss of rows that depend on each other is that of the whole split.
        loss_sum = None if self._task.rows_depend else self.eval_task.loss_sum(logits, microbatch.labels)
        predictions = {**self._task.predictions(logits, microbatch.labels), **generated}
        return EvalResult.begin_read(loss_sum, num_valid, predictions)

    @torch.no_grad()
    def begin_answer(self, microbatch: Microbatch) -> Callable[[], dict[str, Tensor]]:
        """Begin to compute the task's answers for rows without labels; empty for a filler."""
        self._set_training(False)
        if self._task.generates:
            generated = self._generated(self._ready(microbatch))
            return begin_to_host({} if microbatch.filler else generated)
        microbatch, logits = self._evaluated(microbatch, labelled=microbatch.labels.numel() > 0)
        return begin_to_host({} if logits is None else self._task.answers(logits, microbatch.inputs))

    def _evaluated(self, microbatch: Microbatch, labelled: bool) -> tuple[Microbatch, Tensor | None]:
        """Return a microbatch on this rank's device and its scores without dropout; None for a filler.

        Args:
            microbatch: the microbatch on the host.
            labelled: whether the rows have labels, which a head that works in chunks of tokens needs.
        """
        ready = self._ready(microbatch)
        scores = self._scores(self._eval_call, ready, ready.labels if labelled else None)
        return ready, None if microbatch.filler else scores

    def _generated(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """Return the generated tokens of the rows `[batch, tokens]`, if the task needs them."""
        # Ranks that share weights must call the model equally often, so fillers generate there too.
        if not self._task.generates or (microbatch.filler and not self._synced):
            return {}
        from trainer.tasks.generated import GENERATED, required_generator

        tokens = required_generator().tokens
        with padding_known(microbatch.is_padded):  # generated tokens add none
            return {GENERATED: tokens(self._model, microbatch.inputs, self._synced, self._seed, microbatch.rows)}

    def _ready(self, microbatch: Microbatch) -> Microbatch:
        """Copy a microbatch to this rank's device, and find its tokens if the layers process no padding."""
        # Read on the host, before the copy; on a GPU the question would make the host wait.
        is_padded = has_padding(microbatch.hidden) if microbatch.is_padded is None else microbatch.is_padded
        num_labels = self._num_labels(microbatch) if self._head else None
        ready = replace(microbatch.to(self.mesh.device), is_padded=is_padded, num_labels=num_labels)
        if not self._padding_free or ready.flat is not None:
            return ready
        from trainer.parallel.flat_rows import FlatRows

        mask = microbatch.inputs["attention_mask"]
        # The mask of the host is read for the same reason.
        flat = FlatRows.of(mask.sum(-1).flatten().tolist(), mask.shape[-1], self.mesh.device)
        return replace(ready, flat=flat)

    def _num_labels(self, microbatch: Microbatch) -> int | None:
        """Return the number of labelled tokens; None if they are on a GPU, for which the host would wait."""
        if microbatch.num_labels is not None or microbatch.labels.device.type != "cpu":
            return microbatch.num_labels
        return int((microbatch.labels != IGNORED_LABEL).sum())

    def _scores(self, call: ModelCall, microbatch: Microbatch, labels: Tensor | None = None) -> Tensor:
        inputs, flat = microbatch.inputs, {FLAT: microbatch.flat} if self._padding_free else {}
        # A head in chunks computes only labelled positions, so it must know the labels before the model runs.
        head = self._head.use(labels, microbatch.num_labels) if self._head and labels is not None else nullcontext()
        with head, padding_known(microbatch.is_padded):
            output = call(**self._task.model_inputs(inputs), **self._constants, **flat)
        return self._task.scores(output, inputs, labels)

    def _set_training(self, mode: bool) -> None:
        # `train` walks over all modules, which takes time in each microbatch.
        if self._model.training != mode:
            self._model.train(mode)
