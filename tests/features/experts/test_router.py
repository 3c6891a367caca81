"""The losses of routers beside transformers' own, under every layout, and the correction of biases by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.features.experts.router_cases import LOSSES, MODELS, assert_equal, recipe_of, trained
from tests.helpers.training import TINY_TASKS, MemorySource, sgd_sections, tiny_training, whole_state
from trainer.base.errors import UsageError
from trainer.features.experts.balance import NORMALISED_SIGMOID, SOFTMAX, Scoring, z_gradient
from trainer.parallel.microbatch import IGNORED_LABEL, RankBatch


def plain_model(model: nn.Module) -> Any:
    """Return transformers' own model with the weights and buffers of a model in training."""
    config: Any = transformers.AutoConfig.for_model(model.config.model_type, **MODELS[model.config.model_type])
    plain = transformers.AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(model.state_dict())
    return plain.train()


def plain_loss(plain: Any, batch: RankBatch, keys: dict[str, float]) -> Tensor:
    """Return the loss of a batch of one microbatch by transformers' forward function with `output_router_logits`."""
    (rows,) = batch.microbatches
    mask = rows.inputs["attention_mask"]
    output = plain(**rows.inputs, output_router_logits=True)
    total = cross_entropy(
        output.logits.flatten(0, 1).float(), rows.labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    loss = total / (rows.labels != IGNORED_LABEL).sum()
    if coefficient := keys.get("router_loss"):
        loss = loss + coefficient * output.aux_loss
    if coefficient := keys.get("router_z_loss"):
        squares = torch.stack([logits.logsumexp(-1) ** 2 for logits in output.router_logits])
        loss = loss + coefficient * (squares * mask.flatten()).sum() / (mask.sum() * len(squares))
    return loss


@pytest.mark.parametrize(
    "kind",
    [
        "mixtral",
        pytest.param("gpt_oss", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("qwen2_moe", "qwen3_moe", "olmoe")),
    ],
)
def test_loss_and_weights_equal_transformers(kind: str) -> None:
    with tiny_training(recipe_of(kind, LOSSES)) as training:
        plain = plain_model(training.model)
        batch = next(iter(training.loader))
        expected = plain_loss(plain, batch, LOSSES)
        expected.backward()
        assert (batch.microbatches[0].inputs["attention_mask"] == 0).any()
        result = training.engine.train_step(batch)
        assert result.loss == pytest.approx(expected.item(), rel=1e-6)
        trained_parameters = dict(training.model.named_parameters())
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(trained_parameters[name], parameter - parameter.grad, rtol=0, atol=1e-5)
        norm = torch.stack([p.grad.double().square().sum() for p in plain.parameters()]).sum().sqrt()
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.slow
def test_a_mean_over_microbatches_grows() -> None:
    """The figures of the page: transformers' loss of 12 rows at once, and its mean over single rows."""
    with tiny_training(recipe_of("mixtral", {"router_loss": 0.1})) as training:
        plain = plain_model(training.model)
        (rows,) = next(iter(training.loader)).microbatches
        found = []
        for size in (12, 1):
            parts = [{name: t[at : at + size] for name, t in rows.inputs.items()} for at in range(0, 12, size)]
            with torch.no_grad():
                losses = [plain(**part, output_router_logits=True).aux_loss.item() for part in parts]
            found.append(sum(losses) / len(losses))
        assert found == pytest.approx([2.065, 2.365], abs=1e-3)
        (result,) = training.steps(1)
        assert result.more()["router_loss"] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 1e-2), ("fp16", 2e-3)])
def test_precisions_keep_the_scale(precision: str, tolerance: float) -> None:
    keys = {"router_loss": 3.0, "router_z_loss": 0.5}  # most of the gradient
    whole, found = (
        trained(recipe_of("qwen3_moe", keys, precision=kind, training={"micro_batch_size": 5}), 1)
        for kind in ("fp32", precision)
    )
    assert found[0] == pytest.approx(whole[0], rel=tolerance)
    assert found[1] == pytest.approx(whole[1], rel=tolerance)


@pytest.mark.parametrize("scoring", [SOFTMAX, NORMALISED_SIGMOID])
def test_gradients_of_probabilities_equal_autograd(scoring: Scoring) -> None:
    logits = torch.randn(7, 5, requires_grad=True)
    weights = torch.rand(5)
    (expected,) = torch.autograd.grad((scoring.probabilities(logits) @ weights).sum(), logits)
    torch.testing.assert_close(scoring.gradient(logits.detach(), weights), expected)
    (expected,) = torch.autograd.grad(logits.logsumexp(-1).square().sum(), logits)
    torch.testing.assert_close(z_gradient(logits.detach()), expected)


def test_accumulation_recomputation_and_flat_rows_change_nothing() -> None:
    whole = trained(recipe_of("mixtral", LOSSES))
    for sections in (
        {"training": {"micro_batch_size": 5}},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective", "training": {"micro_batch_size": 5}},
    ):
        assert_equal(trained(recipe_of("mixtral", LOSSES, **sections)), whole)


def of_pairs(size: int) -> tuple[Any, ...]:
    task = {**TINY_TASKS["embedding"].keys, "router_z_loss": 0.01}
    return trained(recipe_of("mixtral", {}, task=task, training={"micro_batch_size": size}), 1)


def test_a_first_pass_for_losses_of_rows_does_not_count() -> None:
    assert_equal(of_pairs(5), of_pairs(12))


@pytest.mark.slow
def test_padding_free_rows_change_nothing() -> None:
    whole = trained(recipe_of("qwen3_moe", LOSSES))
    for training in ({}, {"micro_batch_size": 5}, {"micro_batch_size": None, "micro_batch_tokens": 64}):
        keys = {"data": {"padding_free": True}, "training": training}
        assert_equal(trained(recipe_of("qwen3_moe", LOSSES, **keys)), whole)


def of_ranks(kind: str, keys: dict[str, float], sections: dict[str, Any], num_steps: int = 2) -> tuple[Any, ...]:
    return trained(recipe_of(kind, keys, **sections), num_steps)


_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"parallel": {"strategy": "ddp"}}),
    (3, {"parallel": {"strategy": "fsdp"}, "training": {"micro_batch_size": 2}, "activation_checkpointing": "full"}),
]
_FURTHER: list[tuple[int, dict[str, Any]]] = [
    (2, {"parallel": {"strategy": "fsdp"}, "training": {"micro_batch_size": 5}}),
    (3, {"parallel": {"strategy": "ddp"}, "training": {"micro_batch_size": 3}}),
    (4, {"parallel": {"strategy": "hsdp", "shard": 2}, "training": {"micro_batch_size": 2}}),
    (2, {"parallel": {"strategy": "ddp", "expert": 2}}),
    (3, {"parallel": {"strategy": "fsdp", "expert": 3}, "training": {"micro_batch_size": 2}}),
    (4, {"parallel": {"strategy": "fsdp", "expert": 2}, "training": {"micro_batch_size": 2}}),
    (2, {"parallel": {"strategy": "ddp", "tensor": 2}, "training": {"micro_batch_size": 5}}),
    (2, {"parallel": {"strategy": "ddp", "pipeline": {"stages": 2}}, "training": {"micro_batch_size": 3}}),
    (2, {"parallel": {"strategy": "ddp", "context": 2}, "training": {"micro_batch_size": 5}}),
]


@pytest.mark.parametrize(
    ("size", "sections"), [*_LAYOUTS, *(pytest.param(*row, marks=pytest.mark.slow) for row in _FURTHER)]
)
def test_ranks_equal_one_process(ranks: Any, size: int, sections: dict[str, Any]) -> None:
    whole = trained(recipe_of("mixtral", LOSSES))
    for found in ranks(size).run(of_ranks, "mixtral", LOSSES, sections):
        assert_equal(found, whole)


def staged(schedule: str, **parallel: Any) -> dict[str, Any]:
    return {"parallel": {"strategy": "ddp", **parallel, "pipeline": {"stages": 2, "schedule": schedule}}}


_STAGED: list[tuple[int, str, dict[str, Any]]] = [
    (2, "mixtral", {**staged("gpipe"), "activation_checkpointing": "full"}),
    (2, "mixtral", {**staged("interleaved_1f1b"), "training": {"micro_batch_size": 2}}),
    (2, "mixtral", {**staged("zero_bubble"), "training": {"micro_batch_size": 3}}),
    (4, "mixtral", {**staged("1f1b", strategy="fsdp", expert=2), "training": {"micro_batch_size": 2}}),
    (4, "mixtral", {**staged("1f1b", context=2), "training": {"micro_batch_size": 2}}),
    (4, "mixtral", {"parallel": {"strategy": "ddp", "expert": 2, "context": 2}, "data": {"padding_free": True}}),
    (4, "deepseek_v3", {**staged("1f1b"), "training": {"micro_batch_size": 1}}),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("size", "kind", "sections"), _STAGED)
def test_stages_equal_one_process(ranks: Any, size: int, kind: str, sections: dict[str, Any]) -> None:
    """Four layers, so that a rank has several stages; the first stage of DeepSeek has a layer without experts."""
    keys = LOSSES if kind == "mixtral" else {**_BALANCED, **LOSSES}
    model = {"config": {"model_type": kind, **MODELS[kind], "num_hidden_layers": 4}}
    whole = trained(recipe_of(kind, keys, model=model))
    for found in ranks(size).run(of_ranks, kind, keys, {**sections, "model": model}):
        assert_equal(found, whole)


def ragged(sections: dict[str, Any]) -> tuple[Any, ...]:
    return trained(recipe_of("mixtral", LOSSES, **sgd_sections(0.02), **sections), num_steps=5)


@pytest.mark.slow
def test_ranks_without_rows_add_nothing(ranks: Any) -> None:
    sections = {"parallel": {"strategy": "fsdp"}, "training": {"micro_batch_size": 2}}
    for found in ranks(3).run(ragged, sections):  # the last batch has two rows
        assert_equal(found, ragged({}))


def test_evaluations_leave_the_losses_out() -> None:
    losses = []
    for keys in ({}, LOSSES):
        with tiny_training(recipe_of("mixtral", keys)) as training:
            rows = next(iter(training.loader)).microbatches[0]
            losses.append(training.engine.eval_step(rows).loss_sum)
    assert losses[0] == losses[1]


def chosen_experts(plain: Any, batch: RankBatch) -> list[Tensor]:
    """Return the tokens of each expert in each layer, counted by a loop over the choices of transformers' routers."""
    (rows,) = batch.microbatches
    choices: list[Tensor] = []
    routers = [module for module in plain.modules() if hasattr(module, "e_score_correction_bias")]
    for router in routers:
        router.register_forward_hook(lambda module, args, output: choices.append(output[2]))
    with torch.no_grad():
        plain(**rows.inputs)
    counts = []
    for layer in choices:
        count = torch.zeros(routers[0].num_experts)
        for token, is_token in zip(layer.tolist(), rows.inputs["attention_mask"].flatten().tolist(), strict=True):
            for expert in token if is_token else ():
                count[expert] += 1
        counts.append(count)
    return counts


def biases_of(state: MemorySource) -> list[Tensor]:
    return [t for name, t in sorted(state.tensors.items()) if name.endswith("e_score_correction_bias")]


_BALANCED = {"router_bias_rate": 0.05, "router_loss": 0.1}


def test_biases_follow_the_counts_of_three_steps() -> None:
    with tiny_training(recipe_of("deepseek_v3", _BALANCED)) as training:
        expected = [torch.zeros(6), torch.zeros(6)]
        for batch in list(training.loader)[:3]:
            counts = chosen_experts(plain_model(training.model), batch)
            for bias, count in zip(expected, counts, strict=True):
                for expert in range(6):
                    bias[expert] += 0.05 * (
                        (count.mean() > count[expert]).float() - (count.mean() < count[expert]).float()
                    )
            training.engine.train_step(batch)
            found = biases_of(whole_state(training.engine, training.mesh))
            assert len(found) == 2
            for own, bias in zip(found, expected, strict=True):
                torch.testing.assert_close(own, bias)
        assert all(bias.abs().max() > 0.06 for bias in expected)


@pytest.mark.nightly
def test_biases_balance_the_load() -> None:
    """The figures of the page: the largest load in the last 10 of 100 steps."""
    largest = []
    for keys in ({}, {"router_bias_rate": 0.01}):
        sections: dict[str, Any] = {
            "optimizer": {"name": "adamw", "learning_rate": 3e-3},
            "training": {"max_steps": 100},
        }
        recipe = recipe_of("deepseek_v3", keys, **sections, schedule={"name": "constant"})
        with tiny_training(recipe, num_rows=240) as training:
            results = training.steps(100)[-10:]
        largest.append(sum(result.more()["expert_load_max"] for result in results) / 10)
    assert largest[0] > 1.7  # 1.97 and 1.35 on the machine of the page
    assert largest[1] < 1.5


def resumed(sections: dict[str, Any], source: MemorySource) -> tuple[float, list[Tensor]]:
    """Return the loss and the biases of the third step, from the state after two."""
    with tiny_training(recipe_of("deepseek_v3", _BALANCED, **sections), start_sample=24) as training:
        training.engine.load_state(source, 2)
        (result,) = training.steps(1)
        return result.loss, biases_of(whole_state(training.engine, training.mesh))


def test_biases_resume_under_another_layout(ranks: Any) -> None:
    with tiny_training(recipe_of("deepseek_v3", _BALANCED)) as training:
        batches = list(training.loader)[:3]
        for batch in batches[:2]:
            training.engine.train_step(batch)
        source = whole_state(training.engine, training.mesh)
        source = MemorySource({name: t.clone() for name, t in source.tensors.items()}, source.scalars)
        loss = training.engine.train_step(batches[2]).loss
        expected = biases_of(whole_state(training.engine, training.mesh))
        assert not torch.equal(expected[0], biases_of(source)[0])
    sections = {"parallel": {"strategy": "fsdp"}, "training": {"micro_batch_size": 2}}
    for other, biases in ranks(2).run(resumed, sections, source):
        assert other == pytest.approx(loss, rel=1e-6)
        for own, bias in zip(biases, expected, strict=True):
            torch.testing.assert_close(own, bias)


def test_a_bad_step_changes_no_bias() -> None:
    with tiny_training(recipe_of("deepseek_v3", _BALANCED)) as training:
        with torch.no_grad():
            next(training.model.parameters()).fill_(torch.nan)
        (result,) = training.steps(1)
        assert not result.is_finite
        assert not any(bias.any() for bias in biases_of(whole_state(training.engine, training.mesh)))


@pytest.mark.parametrize(
    ("kind", "keys", "text"),
    [
        (
            "mixtral",
            {"router_bias_rate": 0.1},
            "`task.router_bias_rate` needs routers with a bias .* use `task.router_loss`",
        ),
        (
            None,
            {"router_loss": 0.1},
            "`task.router_loss` needs a mixture of experts .* is of type llama; set it to null",
        ),
    ],
)
def test_models_without_the_part_are_refused(kind: str | None, keys: dict[str, float], text: str) -> None:
    recipe = recipe_of(kind or "mixtral", keys)
    if kind is None:
        from tests.helpers.training import TINY_DECODERS

        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"config": TINY_DECODERS["llama"]})})
    with pytest.raises(UsageError, match=text), tiny_training(recipe):
        pass
