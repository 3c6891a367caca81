"""The generated DeepSpeed configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainer.base.errors import RecipeError
from trainer.features.deepspeed.keys import FREE_KEYS, FREE_ZERO_KEYS, refused_keys
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.strategies import STRATEGIES
from trainer.tools.convert.foreign.tables import DEEPSPEED

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}


def config_of(strategy: str, *overrides: str, processes: int = 2) -> dict[str, Any]:
    recipe = load_recipe("bert_base_mrpc", [f"parallel.strategy={strategy}", *overrides]).recipe
    return plan_run(recipe, processes).engine_keys()


def test_a_strategy_of_another_engine_has_none():
    assert config_of("fsdp") == config_of("ddp") == {}


def test_stages_shard_as_in_the_paper():
    rows = map(STRATEGIES.__getitem__, STAGES)
    cuts = [(row.cuts_optimizer, row.cuts_gradients, row.cuts_parameters) for row in rows]
    assert cuts == [(True, False, False), (True, True, False), (True, True, True)]


@pytest.mark.parametrize("strategy", STAGES)
class TestConfig:
    def test_every_key_that_averages_or_clips_is_written_out(self, strategy):
        config = config_of(strategy, "training.max_grad_norm=0.5")
        assert config["gradient_clipping"] == 0.5
        assert config["gradient_accumulation_steps"] == 1
        assert config["prescale_gradients"] is False
        assert config["gradient_predivide_factor"] == 1.0
        assert config["zero_optimization"]["stage"] == STAGES[strategy]
        assert config["fp16"] == config["bf16"] == {"enabled": False}

    def test_no_clipping_is_explicit(self, strategy):
        """DeepSpeed's default clips at 1.0."""
        assert config_of(strategy, "training.max_grad_norm=null")["gradient_clipping"] == 0.0

    def test_its_batch_is_the_recipes(self, strategy):
        config = config_of(strategy, processes=4)
        assert config["train_batch_size"] == 32
        product = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 4
        assert product == 32, "DeepSpeed checks this"

    def test_it_is_plain_json(self, strategy):
        config = config_of(strategy)
        assert json.loads(json.dumps(config)) == config

    def test_more_keys_are_merged_last(self, strategy):
        config = config_of(
            strategy,
            'parallel.deepspeed={"steps_per_print": 7, "zero_optimization": {"reduce_bucket_size": 1000,'
            ' "contiguous_gradients": false}}',
        )
        assert config["steps_per_print"] == 7
        zero = config["zero_optimization"]
        assert (zero["reduce_bucket_size"], zero["contiguous_gradients"]) == (1000, False)
        assert zero["stage"] == STAGES[strategy], "other keys stay"


@pytest.mark.parametrize(
    ("strategy", "offload", "optimizer", "parameters"),
    [
        ("zero2", "none", "none", None),
        ("zero2", "optimizer", "cpu", None),
        ("zero3", "none", "none", "none"),
        ("zero3", "optimizer", "cpu", "none"),
        ("zero3", "parameters", "cpu", "cpu"),
    ],
)
def test_offload(strategy, offload, optimizer, parameters):
    zero = config_of(strategy, f"parallel.offload={offload}")["zero_optimization"]
    assert zero["offload_optimizer"]["device"] == optimizer
    assert zero.get("offload_param", {}).get("device") == parameters


def nested(name: str) -> dict[str, Any]:
    first, _, rest = name.partition(".")
    return {first: nested(rest) if rest else {}}


class TestRefusedKeys:
    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("gradient_clipping", "is set from `training.max_grad_norm`; change it there"),
            ("fp16", "is set from `precision`; change it there"),
            ("zero_optimization.offload_param", "is set from `parallel.offload`; change it there"),
            ("gradient_accumulation_steps", "is refused: accumulation follows from"),
            ("aio", "is refused: offload uses CPU memory only"),
            ("zero_optimization.round_robin_gradients", "mixes up the tensors of checkpoints; remove it"),
            ("zero_optimization.zero_hpz_partition_size", "is refused: ZeRO++ is not supported"),
        ],
    )
    def test_a_reason_names_the_key_of_the_recipe_or_its_absence(self, name, words):
        ((_, reason),) = refused_keys(nested(name))
        assert words in reason

    def test_other_keys_of_deepspeed_are_refused(self):
        """A key that the trainer sets itself, or one that would give wrong numbers or nothing."""
        names = [name for name in DEEPSPEED if name.count(".") == name.startswith("zero_optimization.")]
        free = {*FREE_KEYS, *(f"zero_optimization.{key}" for key in FREE_ZERO_KEYS)}
        assert len(names) > len(free) + 50
        for name in names:
            assert [".".join(path) for path, _ in refused_keys(nested(name))] == ([] if name in free else [name])

    def test_keys_that_are_free_pass(self):
        extra = {key: 1 for key in FREE_KEYS if key != "zero_optimization"}
        assert not list(refused_keys({**extra, "zero_optimization": dict.fromkeys(FREE_ZERO_KEYS, 1)}))

    @pytest.mark.parametrize(
        ("extra", "path", "words"),
        [
            ({"steps_per_prnt": 1}, ("steps_per_prnt",), "did you mean `steps_per_print`?"),
            (
                {"zero_optimization": {"reduce_bucket": 1}},
                ("zero_optimization", "reduce_bucket"),
                "did you mean `reduce_bucket_size`?",
            ),
            ({"xyzzy": 1}, ("xyzzy",), "valid keys are comms_logger, dump_state"),
            ({"zero_optimization": 3}, ("zero_optimization",), "must be an object"),
        ],
    )
    def test_a_misspelt_key_is_found(self, extra, path, words):
        ((found, reason),) = refused_keys(extra)
        assert found == path
        assert words in reason

    def test_in_a_recipe_all_are_reported_at_once_with_their_paths(self):
        extra = json.dumps({"gradient_clipping": 1.0, "bf61": {}, "zero_optimization": {"stage": "auto"}})
        with pytest.raises(RecipeError) as caught:
            load_recipe("bert_base_mrpc", ["parallel.strategy=zero2", f"parallel.deepspeed={extra}"])
        report = str(caught.value)
        assert "`parallel.deepspeed.gradient_clipping` is set from `training.max_grad_norm`; change it there" in report
        assert "`parallel.deepspeed.bf61` is not a DeepSpeed key" in report
        assert "`parallel.deepspeed.zero_optimization.stage` is set from `parallel.strategy`; change it there" in report

    def test_free_keys_are_known_to_deepspeed(self):
        """A renamed key of DeepSpeed would be refused, or ignored without an error."""
        pytest.importorskip("deepspeed")
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        fields = DeepSpeedZeroConfig.model_fields
        names = {*fields, *(field.alias for field in fields.values())}
        assert set(FREE_ZERO_KEYS) <= names
