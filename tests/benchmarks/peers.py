"""Peers: other tools' loops that train the recipe's model on the same batches.

All have the recipe's task, optimizer, learning rates, clipping and precision, and torch's dropout. They neither check
nor save.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from trainer.engine.forward import denominator_of, without_cache
from trainer.engine.optimizers.parameters import RATE, TrainedParameters, matrix_names, no_decay_names
from trainer.engine.optimizers.table import build_optimizer
from trainer.features.deepspeed.package import ready_deepspeed
from trainer.models.families.table import layers_of
from trainer.models.place import PlacedModel
from trainer.parallel.microbatch import Microbatch, RankBatch
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.plan import RunPlan
from trainer.recipe.schema import Recipe
from trainer.tasks.task import Task

if TYPE_CHECKING:
    from accelerate import FullyShardedDataParallelPlugin

OnStep = Callable[[RankBatch, float, float], None]
"""A function that gets each batch after its step, with the loss of the global batch and the gradient norm."""


@dataclass(frozen=True)
class PeerTraining:
    """The parts of a training that the loops share."""

    recipe: Recipe
    plan: RunPlan  # its plan, with data-parallel ranks only
    task: Task  # its task, which computes the loss
    built: PlacedModel  # a new whole model on the device of this rank, the same on all ranks
    num_steps: int  # the steps to take
    total_steps: int  # the steps of the schedule

    @property
    def model(self) -> nn.Module:
        return self.built.model

    @property
    def ranks(self) -> int:
        return self.plan.layout.world_size

    @property
    def is_bf16(self) -> bool:
        return self.recipe.precision == "bf16"

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    @cached_property
    def _constants(self) -> dict[str, bool]:
        return without_cache(self.model)

    def num_labels(self, batch: RankBatch) -> Tensor:
        """Return the number of valid labels in the global batch, by which its sum of losses is divided."""

        def sum_(local: Tensor) -> Tensor:
            if self.ranks > 1:
                dist.all_reduce(local)
            return local

        return denominator_of(self.task, batch, self.device, sum_)

    def inputs(self, rows: Microbatch) -> dict[str, Any]:
        """Return the model's keyword arguments for rows."""
        return {**self.task.model_inputs(rows.inputs), **self._constants}

    def loss_sum(self, output: Any, rows: Microbatch) -> Tensor:
        """Return the loss of rows, summed over their valid labels, from the output of the model."""
        loss = self.task.loss_sum(self.task.scores(output, rows.inputs, rows.labels), rows.labels)
        return loss * 0.0 if rows.filler else loss

    def optimizer(self) -> tuple[Optimizer, LRScheduler]:
        """Return the recipe's optimizer and its learning rates."""
        named, no_decay = dict(self.model.named_parameters()), no_decay_names(self.model)
        rules = self.built.groups.rules
        trained = TrainedParameters(named, no_decay, lambda: matrix_names(self.model), rules=rules)
        made = build_optimizer(self.recipe.optimizer, trained)
        for group in made.param_groups:
            group["lr"] = self.recipe.optimizer.learning_rate * group[RATE]
        return made, LambdaLR(made, lambda step: self.recipe.schedule.factor(step, self.total_steps))


class _PyTorch:
    """The shortest loop of PyTorch and DistributedDataParallel that takes the same steps.

    The other loops replace its parts. All tools average gradients over the ranks.
    """

    autocasts = True
    """Whether the loop enters autocast; a tool may do so itself."""

    def __init__(self, training: PeerTraining) -> None:
        self._most_norm = training.recipe.training.max_grad_norm or math.inf
        self._optimizer, self._schedule = training.optimizer()
        self.model: Any = training.model.train()
        self._is_parallel = training.ranks > 1
        if self._is_parallel:
            self.model = DistributedDataParallel(training.model, gradient_as_bucket_view=True)

    def passes(self, is_last: bool) -> AbstractContextManager[Any]:
        return self.model.no_sync() if self._is_parallel and not is_last else nullcontext()

    def loss_sum(self, training: PeerTraining, rows: Microbatch) -> Tensor:
        return training.loss_sum(self.model(**training.inputs(rows)), rows)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> Any:
        norm = self._clip()
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        return norm

    def _clip(self) -> Any:
        return clip_grad_norm_(self.model.parameters(), self._most_norm)


class _Compiled(_PyTorch):
    """The loop with a compiled model, one graph for each of its passes."""

    mode: str | None = None

    def __init__(self, training: PeerTraining) -> None:
        super().__init__(training)
        self.model = torch.compile(self.model, mode=self.mode)


class _Captured(_Compiled):
    """The loop with a compiled model that a GPU runs as CUDA graphs; a step has one microbatch."""

    mode = "reduce-overhead"

    def passes(self, is_last: bool) -> AbstractContextManager[Any]:
        torch.compiler.cudagraph_mark_step_begin()
        return super().passes(is_last)


class _Sparse(_Compiled):
    """The compiled loop with logits of masked tokens only, as in the repository of ModernBERT.

    That trains by StableAdamW, without clipping, on packed rows in flash-attn, and compiles parts of layers. Here are
    torch's AdamW, rows of the whole length, torch's attention, and graphs of the model around the choice of tokens.
    """

    def __init__(self, training: PeerTraining) -> None:
        cast(Any, training.model).sparse_prediction = True
        super().__init__(training)

    def loss_sum(self, training: PeerTraining, rows: Microbatch) -> Tensor:
        inputs = {key: value for key, value in training.inputs(rows).items() if key != "attention_mask"}
        loss: Tensor = self.model(**inputs, labels=rows.labels, num_items_in_batch=1).loss  # a sum over the labels
        return loss


class _Accelerate(_PyTorch):
    """The loop that accelerate's documentation shows, and DistributedDataParallel."""

    autocasts = False

    def __init__(self, training: PeerTraining) -> None:
        from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType

        plugin = self._plugin(training)
        self._accelerator = accelerator = Accelerator(
            cpu=training.device.type == "cpu",
            mixed_precision="bf16" if training.is_bf16 else "no",
            fsdp_plugin=plugin,
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
        )
        os.environ.pop("ACCELERATE_USE_FSDP", None)  # the plugin set it, for all later trainings in this process
        if plugin is not None and not accelerator.is_fsdp2:  # accelerate shards on CPUs too, but asks for GPUs here
            # Objects of this type share their attributes; those of a copy leave other trainings alone.
            accelerator.state = copy.copy(accelerator.state)
            vars(accelerator.state).update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
        self._most_norm = training.recipe.training.max_grad_norm or math.inf
        made, self._schedule = training.optimizer()
        self.model, self._optimizer = accelerator.prepare(training.model.train(), made)
        assert (plugin is None) != isinstance(self.model, FSDPModule), "accelerate ignored the plugin"

    def _plugin(self, training: PeerTraining) -> FullyShardedDataParallelPlugin | None:
        return None

    def passes(self, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if is_last else self._accelerator.no_sync(self.model)

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def _clip(self) -> Any:
        return self._accelerator.clip_grad_norm_(self.model.parameters(), self._most_norm)


class _AccelerateFSDP2(_Accelerate):
    """The loop of accelerate, and FSDP2 of each layer."""

    def _plugin(self, training: PeerTraining) -> FullyShardedDataParallelPlugin:
        from accelerate import FullyShardedDataParallelPlugin

        # By default it also takes BERT's embeddings as a layer, and then fails because it shards their table twice.
        layers = {type(layer).__name__ for layer in layers_of(training.model).values()}
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=sorted(layers)
        )
        if training.is_bf16:
            plugin.set_mixed_precision("bf16")
        return plugin


class _DeepSpeed(_PyTorch):
    """The loop that DeepSpeed's documentation shows, under ZeRO-1."""

    autocasts = False  # on GPUs, DeepSpeed's engine leaves an autocast around it

    def __init__(self, training: PeerTraining) -> None:
        made, self._schedule = training.optimizer()
        self.model, *_ = ready_deepspeed(training.device.index).initialize(
            model=training.model.train(),
            optimizer=made,
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": training.plan.batch.micro_batch_size,
                "gradient_accumulation_steps": 1,  # the loop marks the last microbatch
                "gradient_clipping": training.recipe.training.max_grad_norm or 0.0,
                "zero_optimization": {"stage": 1},
                "torch_autocast": {"enabled": training.is_bf16, "dtype": "bfloat16"},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
        )

    def passes(self, is_last: bool) -> AbstractContextManager[Any]:
        self.model.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)
        self.model.step()

    def update(self) -> Any:
        self._schedule.step()
        return self.model.get_global_grad_norm()


def _train_in_loop(
    tool: type[_PyTorch], training: PeerTraining, batches: Iterable[RankBatch], on_step: OnStep | None = None
) -> None:
    device, loop = training.device, tool(training)
    for batch in islice(batches, training.num_steps):
        total, labels = torch.zeros((), device=device), training.num_labels(batch)
        for microbatch in batch.microbatches:
            rows = microbatch.to(device)
            with loop.passes(microbatch is batch.microbatches[-1]):
                with torch.autocast(device.type, torch.bfloat16, enabled=loop.autocasts and training.is_bf16):
                    loss = loop.loss_sum(training, rows) / labels
                loop.backward(loss * training.ranks)
                total += loss.detach()
        norm = loop.update()
        if on_step is not None:
            if training.ranks > 1:
                dist.all_reduce(total)
            on_step(batch, total.item(), float(norm))


def _train_in_trainer(training: PeerTraining, batches: Iterable[RankBatch], on_step: OnStep | None = None) -> None:
    """Train with transformers' Trainer. It neither evaluates nor saves, and logs each step for `on_step`."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    flat = FlatBatches(batches, training)

    class OnOurBatches(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return flat

        def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
            labels = inputs.pop("labels")
            rows = Microbatch(inputs, labels, torch.empty(0))
            # Trainer divides by the microbatches, and DistributedDataParallel by the ranks.
            factor = self.current_gradient_accumulation_steps * training.ranks
            loss = training.loss_sum(model(**training.inputs(rows)), rows)
            return torch.mul(loss, factor / flat.num_labels)

    class Log(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if on_step is not None and "loss" in logs:
                on_step(flat.taken[state.global_step - 1], logs["loss"], logs["grad_norm"])

    recipe, batch = training.recipe, training.plan.batch
    on_cpu = training.device.type == "cpu"
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=training.num_steps,
            per_device_train_batch_size=batch.micro_batch_size,
            gradient_accumulation_steps=batch.num_microbatches,
            max_grad_norm=recipe.training.max_grad_norm or math.inf,
            bf16=training.is_bf16,
            logging_strategy="no" if on_step is None else "steps",
            logging_steps=1,
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=on_cpu,
            ddp_backend="gloo" if on_cpu else "nccl",
            ddp_find_unused_parameters=False,
            ddp_broadcast_buffers=False,
        )
        trainer = OnOurBatches(training.model, arguments, optimizers=training.optimizer(), callbacks=[Log()])
        trainer.model_accepts_loss_kwargs = False  # Trainer need not count labels; `flat` did
        trainer.remove_callback(PrinterCallback)
        trainer.train()


class FlatBatches:
    """The microbatches of rank batches as dictionaries for transformers' Trainer, without a length.

    Raises:
        ValueError: a batch has fewer microbatches than others, or a filler; Trainer would add those of the next batch.
    """

    def __init__(self, batches: Iterable[RankBatch], training: PeerTraining) -> None:
        self._batches, self._training = batches, training
        self.taken: list[RankBatch] = []
        self.num_labels: Tensor | int = 0
        """The valid labels of the last batch that was taken."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        number = self._training.plan.batch.num_microbatches
        for batch in self._batches:
            if len(batch.microbatches) != number or any(rows.filler for rows in batch.microbatches):
                raise ValueError(f"Trainer needs {number} full microbatches, but step {len(self.taken) + 1} has fewer")
            self.taken.append(batch)
            self.num_labels = self._training.num_labels(batch)
            for microbatch in batch.microbatches:
                yield {**microbatch.inputs, "labels": microbatch.labels}


PEERS: Mapping[str, Callable[[PeerTraining, Iterable[RankBatch], OnStep | None], None]] = {
    "pytorch": partial(_train_in_loop, _PyTorch),
    "compiled": partial(_train_in_loop, _Compiled),
    "captured": partial(_train_in_loop, _Captured),
    "sparse": partial(_train_in_loop, _Sparse),
    "transformers": _train_in_trainer,
    "accelerate": partial(_train_in_loop, _Accelerate),
    "accelerate_fsdp2": partial(_train_in_loop, _AccelerateFSDP2),
    "deepspeed": partial(_train_in_loop, _DeepSpeed),
}


def name_ranks(environment: LaunchEnvironment) -> None:
    """Set the variables by which accelerate, which transformers' Trainer uses, finds the existing process group."""
    if environment.world_size > 1:
        names = ("rank", "local_rank", "world_size", "local_world_size")
        os.environ |= {name.upper(): str(getattr(environment, name)) for name in names}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def with_torchs_dropout(recipe: Recipe) -> Recipe:
    """Return the recipe with torch's dropout, as a peer computes it."""
    training = recipe.training.model_copy(update={"layout_invariant_dropout": False})
    return recipe.model_copy(update={"training": training})
