"""Models from a configuration and from a folder; what cannot be built is refused in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, BertForMaskedLM, BertModel

from tests.helpers.families import CONFIGS
from tests.helpers.ranks import RankPools
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import TINY_BERT
from trainer.base.errors import UsageError
from trainer.models.attention import KEYED_ATTENTION
from trainer.models.configuration import checkpoint_labels, load_config, max_positions
from trainer.models.describe import ModelUse, describe
from trainer.models.fill import build_model
from trainer.models.save import save_configuration
from trainer.models.tokenizer import load_tokenizer
from trainer.parallel.dropout import KeyedDropout
from trainer.recipe.schema import Model, Training

HEAD = "AutoModelForSequenceClassification"
OPTIONS = {"num_labels": 3, "problem_type": "single_label_classification"}


def build(recipe: dict[str, Any], options: dict[str, Any] = OPTIONS, head: str = HEAD, **training: Any):
    return build_model(
        describe(Model.model_validate(recipe), Training.model_validate(training), ModelUse(head, options))
    )


def weights(recipe: dict[str, Any], seed: int = 42) -> dict[str, torch.Tensor]:
    return dict(build(recipe, seed=seed).model.state_dict())


def weights_of_a_rank(recipe: dict[str, Any]) -> dict[str, torch.Tensor]:
    """After a draw that leaves the generator of each rank in another state."""
    torch.manual_seed(dist.get_rank())
    return weights(recipe)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT without a classifier, as on the hub."""
    folder = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(7)
    BertModel(AutoConfig.for_model(**TINY_BERT)).save_pretrained(folder)
    return folder


class TestFromConfig:
    def test_random_weights_are_drawn_from_the_seed_alone(self):
        recipe = {"config": TINY_BERT}
        one = weights(recipe)
        torch.manual_seed(99)
        assert equal(one, weights(recipe))
        assert not equal(one, weights(recipe, seed=43))

    def test_and_are_the_same_on_every_rank(self, ranks: RankPools):
        first, second = ranks(2).run(weights_of_a_rank, {"config": TINY_BERT})
        assert equal(first, second)
        assert equal(first, weights({"config": TINY_BERT}))

    def test_leaves_torchs_generator_alone(self):
        state = torch.get_rng_state()
        build({"config": TINY_BERT})
        assert torch.equal(state, torch.get_rng_state())

    def test_options_of_the_task_and_the_recipes_dropout_reach_the_model(self):
        model = build({"config": TINY_BERT, "dropout": 0.25}).model
        assert model.config.num_labels == model.classifier.out_features == 3
        assert {module.p for module in model.modules() if isinstance(module, KeyedDropout)} == {0.25}

    def test_is_in_fp32_under_every_configuration(self):
        model = build({"config": {**TINY_BERT, "dtype": "bfloat16"}}).model
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    @pytest.mark.parametrize(
        ("keys", "words"),
        [
            ({"hiden_size": 16}, r"`model.config.hiden_size` is not a key of a bert configuration; did you mean"),
            ({"xyzzy": 1}, r"`model.config.xyzzy` is not a key .* remove it"),
            ({"model_type": "brt"}, r"`model.config.model_type` .* 'brt'; did you mean \"bert\"\?"),
            ({"model_type": 3}, r"`model.config.model_type` must be a model type"),
            ({"hidden_size": "wide"}, r"`model.config` does not describe .*hidden_size.*expected int"),
            (
                {"hidden_size": 30},
                r"`model.config` does not describe an AutoModel.*multiple of the number of attention",
            ),
            (
                {"model_type": "modernbert", "vocab_size": 300},
                r"`model.config.pad_token_id` must be below `vocab_size` 300, but is 50,283; write the id",
            ),
            ({"num_labels": 5}, r"`model.config.num_labels` is set by `task`; remove it"),
            ({"problem_type": "regression"}, r"`model.config.problem_type` is set by `task`"),
            (
                {"model_type": "vit_mae"},
                r"`model.config.model_type` must .* \(AutoModelForSequenceClassification\), but is \"vit_mae\", which",
            ),
        ],
    )
    def test_a_configuration_without_a_model_is_refused(self, keys, words):
        config = keys if "model_type" in keys else {**TINY_BERT, **keys}
        with pytest.raises(UsageError, match=words) as error:
            build({"config": config})
        assert len(str(error.value)) < 600, "transformers' own page of words is cut"

    def test_a_type_without_the_head_of_the_task_is_refused(self, tmp_path):
        words = r"\(AutoModelForMaskedLM\), but is \".*which has none; use one that has, such as .*bert, .*another task"
        with pytest.raises(UsageError, match=rf"`model.config.model_type` must .*{words}"):
            build({"config": {"model_type": "gpt2", **CONFIGS["gpt2"]}}, {}, "AutoModelForMaskedLM")
        AutoConfig.for_model("gpt2", **CONFIGS["gpt2"]).save_pretrained(tmp_path)
        with pytest.raises(UsageError, match=rf"`model.name_or_path` must .*{words}"):
            build({"name_or_path": str(tmp_path)}, {}, "AutoModelForMaskedLM")

    def test_a_missing_model_type_is_refused(self):
        with pytest.raises(UsageError, match="model_type"):
            build({"config": {"hidden_size": 16}})

    def test_a_key_that_the_model_alone_reads_is_taken(self):
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = {"model_type": "qwen3_moe", **sizes, "vocab_size": 50, "num_experts": 8, "head_dim": 12}
        model = build({"config": config}).model
        assert model.model.layers[0].self_attn.q_proj.weight.shape == (24, 16)

    def test_an_older_name_of_a_key_that_transformers_knows_is_taken(self):
        config = {"model_type": "gpt2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        assert build({"config": {**config, "vocab_size": 50, "pad_token_id": 0}}).model.config.n_embd == 16
        llama = {**config, "model_type": "llama", "intermediate_size": 32, "rope_theta": 500.0, "vocab_size": 50}
        assert build({"config": llama}).model.config.rope_parameters["rope_theta"] == 500.0

    def test_a_type_of_which_transformers_has_two_classes(self):
        """For DeiT, one with a teacher too."""
        config = {"model_type": "deit", "image_size": 16, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 1}
        config |= {"num_attention_heads": 4, "intermediate_size": 64}
        recipe = Model.model_validate({"config": config, "tokenizer": "none"})
        built = build_model(
            describe(recipe, Training(), ModelUse("AutoModelForImageClassification", {"num_labels": 3}))
        )
        assert type(built.model).__name__ == "DeiTForImageClassification"


class TestFromFolder:
    def test_loads_the_weights_and_draws_the_head_from_the_seed_alone(self, pretrained):
        recipe = {"name_or_path": str(pretrained)}
        one = weights(recipe)
        torch.manual_seed(7)
        saved = BertModel(AutoConfig.for_model(**TINY_BERT)).state_dict()
        assert all(torch.equal(one[f"bert.{name}"], tensor) for name, tensor in saved.items())
        torch.manual_seed(99)
        assert equal(one, weights(recipe))
        other = weights(recipe, seed=43)
        assert {name for name in one if not torch.equal(one[name], other[name])} == {"classifier.weight"}

    def test_and_gives_the_same_on_every_rank(self, ranks: RankPools, pretrained):
        first, second = ranks(2).run(weights_of_a_rank, {"name_or_path": str(pretrained)})
        assert equal(first, second)

    def test_keys_of_the_recipe_replace_those_of_its_configuration(self, pretrained, tmp_path):
        keys = {"classifier_dropout": 0.25, "hidden_dropout_prob": 0.5, "pad_token_id": 3}
        built = build({"name_or_path": str(pretrained), "config": keys})
        assert built.model.dropout.p == 0.25
        assert built.model.bert.embeddings.dropout.p == 0.5
        assert equal(dict(built.model.state_dict()), weights({"name_or_path": str(pretrained)}))
        save_configuration(built.model, tmp_path)
        assert json.loads((tmp_path / "config.json").read_text()).items() >= keys.items()

    @pytest.mark.parametrize(
        ("keys", "words"),
        [
            ({"hiden_dropout_prob": 0.1}, r"is not a key of a bert configuration; did you mean `hidden_dropout_prob`"),
            ({"num_labels": 5}, "`model.config.num_labels` is set by the trainer or the task"),
            ({"dtype": "bfloat16"}, "`model.config.dtype` is set by the trainer or the task"),
            ({"intermediate_size": 48}, r"\(intermediate_size\) would change the shapes of the weights"),
            ({"num_hidden_layers": 1}, r"\(num_hidden_layers\) would change the shapes of the weights"),
            ({"num_attention_heads": 1}, "or how heads share them"),
            ({"hidden_act": "gleu"}, "must be an activation of transformers"),
            ({"hidden_dropout_prob": "much"}, "`model.config` does not fit the model"),
        ],
    )
    def test_keys_that_do_not_fit_its_weights_are_refused(self, pretrained, keys, words):
        with pytest.raises(UsageError, match=words):
            build({"name_or_path": str(pretrained), "config": keys})

    def test_two_probabilities_of_dropout_are_refused(self, pretrained):
        keys = {"name_or_path": str(pretrained), "dropout": 0.3}
        assert build({**keys, "config": {"hidden_dropout_prob": 0.3}}).model.bert.embeddings.dropout.p == 0.3
        with pytest.raises(UsageError, match=r"to 0.3, but `model.config.hidden_dropout_prob` is 0.5; remove one of"):
            build({**keys, "config": {"hidden_dropout_prob": 0.5}})

    def test_notes_name_drawn_and_unused_weights(self, pretrained, tmp_path):
        assert build({"name_or_path": str(pretrained)}).notes == [
            "not in the checkpoint, initialised at random: classifier.bias, classifier.weight"
        ]
        BertForMaskedLM(AutoConfig.for_model(**TINY_BERT)).save_pretrained(tmp_path)
        drawn, left = build({"name_or_path": str(tmp_path)}).notes
        assert "bert.pooler.dense.weight" in drawn
        assert left.startswith("in the checkpoint, not in this model: cls.predictions")

    def test_transformers_shows_no_bar_and_no_report(self, pretrained, capfd):
        build({"name_or_path": str(pretrained)})
        assert "Loading" not in "".join(capfd.readouterr())
        assert transformers.utils.logging.is_progress_bar_enabled()

    def test_padding_at_the_end_of_packed_rows_brings_no_warning(self, monkeypatch):
        config = {"model_type": "gpt2", **CONFIGS["gpt2"], "pad_token_id": 0}
        model = build({"config": config}, {}, "AutoModelForCausalLM").model.eval()
        monkeypatch.setattr(transformers.modeling_utils.logger, "warning_once", pytest.fail)
        model(input_ids=torch.tensor([[5, 0]]), use_cache=False)

    def test_a_checkpoint_in_half_precision_is_loaded_as_fp32(self, tmp_path):
        BertModel(AutoConfig.for_model(**TINY_BERT)).bfloat16().save_pretrained(tmp_path)
        model = build({"name_or_path": str(tmp_path)}).model
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    def test_a_folder_that_is_not_there(self, tmp_path):
        with pytest.raises(UsageError, match=r"`model.name_or_path` is '.*nowhere', which could not be opened.*give a"):
            build({"name_or_path": str(tmp_path / "nowhere")})

    def test_a_revision_that_cannot_be_reached(self, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the variable is read at import
        with pytest.raises(UsageError, match=r"`model.name_or_path` is 'nobody/no-model', which could not be opened"):
            build({"name_or_path": "nobody/no-model", "revision": "v9"})

    def test_a_pickle_is_refused(self, pretrained, tmp_path):
        shutil.copy(pretrained / "config.json", tmp_path)
        torch.save(BertModel(AutoConfig.for_model(**TINY_BERT)).state_dict(), tmp_path / "pytorch_model.bin")
        with pytest.raises(UsageError, match=r"`model.name_or_path` is .*safetensors"):
            build({"name_or_path": str(tmp_path)})

    def test_a_configuration_that_is_not_json(self, pretrained, tmp_path):
        shutil.copytree(pretrained, tmp_path, dirs_exist_ok=True)
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(UsageError, match=r"could not be opened.*not a valid JSON"):
            build({"name_or_path": str(tmp_path)})

    def test_an_unknown_model_type(self, pretrained, tmp_path):
        shutil.copytree(pretrained, tmp_path, dirs_exist_ok=True)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "brt"}))
        with pytest.raises(UsageError, match=r"could not be opened.*brt"):
            build({"name_or_path": str(tmp_path)})

    def test_weights_that_are_cut_short(self, pretrained, tmp_path):
        shutil.copytree(pretrained, tmp_path, dirs_exist_ok=True)
        whole = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(UsageError, match="could not be opened"):
            build({"name_or_path": str(tmp_path)})

    def test_weights_of_another_shape(self, pretrained, tmp_path):
        shutil.copytree(pretrained, tmp_path, dirs_exist_ok=True)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
        with pytest.raises(UsageError, match=r"6 weights \(bert.* have another size.*; use a checkpoint"):
            build({"name_or_path": str(tmp_path)})


class TestDropout:
    def test_layout_invariant(self):
        built = build({"config": TINY_BERT}, seed=5)
        assert built.dropout_keys.seed == 5
        assert built.model.config._attn_implementation == KEYED_ATTENTION

    def test_torchs_own(self):
        built = build({"config": TINY_BERT}, layout_invariant_dropout=False)
        assert built.dropout_keys is None
        assert any(isinstance(module, nn.Dropout) for module in built.model.modules())
        assert built.model.config._attn_implementation == "sdpa"


class TestTokenizer:
    def test_from_a_folder_of_its_own_the_models_revision_does_not_apply(self, tmp_path, monkeypatch):
        write_tiny_run(tmp_path)
        asked, tokenizer = [], load_tokenizer(Model(config=TINY_BERT, tokenizer=str(tmp_path / "tokenizer")))
        from_pretrained = "trainer.models.tokenizer.AutoTokenizer.from_pretrained"
        monkeypatch.setattr(from_pretrained, lambda name, revision, **_: asked.append((name, revision)) or tokenizer)
        load_tokenizer(Model(name_or_path="a/model", revision="v1", tokenizer="a/tokenizer"))
        load_tokenizer(Model(name_or_path="a/model", revision="v1"))
        assert asked == [("a/tokenizer", "main"), ("a/model", "v1")]

    def test_reads_a_folder(self, tmp_path):
        write_tiny_run(tmp_path)
        tokenizer = load_tokenizer(Model(config=TINY_BERT, tokenizer=str(tmp_path / "tokenizer")))
        assert tokenizer("word0")["input_ids"] == [2, 5, 3]

    @pytest.mark.parametrize("key", ["tokenizer", "name_or_path"])
    def test_a_folder_without_one_is_refused(self, tmp_path, key):
        with pytest.raises(UsageError, match=rf"`model.{key}` is .* could not be opened"):
            load_tokenizer(Model.model_validate({key: str(tmp_path / "nowhere")}))


class TestKeysThatAClassTakesWithoutDeclaringThem:
    def test_of_t5(self):
        config = {"model_type": "t5", "vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1}
        built = build({"config": {**config, "num_heads": 2, "tie_word_embeddings": False}})
        assert built.model.config.scale_decoder_outputs is False

    def test_of_modernbert(self):
        config = {"model_type": "modernbert", "num_hidden_layers": 4, "global_attn_every_n_layers": 2}
        assert load_config(Model(config=config), {}).layer_types == ["full_attention", "sliding_attention"] * 2


class TestPaddingToken:
    GPT2 = MappingProxyType({
        "model_type": "gpt2", "vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1,
        "eos_token_id": 1,
    })  # fmt: skip

    def build(self, **keys):
        recipe = Model.model_validate({"config": {**self.GPT2, **keys}})
        return build_model(describe(recipe, Training(), ModelUse(HEAD, {"num_labels": 2}, padding_token=1)))

    @pytest.mark.parametrize("keys", [{}, {"pad_token_id": -1}])
    def test_a_decoder_without_one_classifies_batches(self, keys):
        built = self.build(**keys)
        assert built.notes == ["the model names no padding token, so it takes the tokenizer's, of id 1"]
        ids = torch.tensor([[5, 6, 7, 8], [5, 6, 1, 1]])
        model = built.model.eval()
        together = model(input_ids=ids, attention_mask=(ids != 1).long()).logits
        torch.testing.assert_close(together[1:], model(input_ids=ids[1:, :2]).logits)

    def test_the_models_own_stays(self):
        built = self.build(pad_token_id=3)
        assert (built.notes, built.model.config.pad_token_id) == ([], 3)


class TestCheckpointLabels:
    def labels(self, folder, **keys):
        AutoConfig.for_model(**TINY_BERT, **keys).save_pretrained(folder)
        recipe = Model(name_or_path=str(folder))
        return checkpoint_labels(recipe, load_config(recipe, {}))

    def test_in_the_order_of_the_head(self, tmp_path):
        names = {index: f"class {index}" for index in range(12)}
        assert self.labels(tmp_path, id2label=names) == tuple(names.values())

    def test_default_names_are_none(self, tmp_path):
        assert self.labels(tmp_path, num_labels=3) is None

    def test_a_model_with_random_weights_has_none(self):
        recipe = Model(config={**TINY_BERT, "id2label": {0: "a", 1: "b"}})
        assert checkpoint_labels(recipe, load_config(recipe, {})) is None


def test_positions_from_a_padding_token_that_is_missing_are_refused():
    config = load_config(Model(config={"model_type": "roberta", **CONFIGS["roberta"], "pad_token_id": None}), {})
    with pytest.raises(UsageError, match="must be a token for a model of type roberta"):
        max_positions(config)


@pytest.mark.parametrize("model_type", ["bert", *(name for name in CONFIGS if name not in ("t5", "bart", "vit"))])
def test_the_number_of_positions_is_that_of_the_model(model_type: str):
    described = {"model_type": model_type, **(TINY_BERT if model_type == "bert" else CONFIGS[model_type])}
    config = load_config(Model(config=described), {})
    model, longest = AutoModel.from_config(config).eval(), max_positions(config)
    row = torch.full((1, (longest or 600) + 1), 7)
    model(input_ids=row[:, :-1])
    if longest is None:
        model(input_ids=row)
    else:
        with pytest.raises((RuntimeError, IndexError)):
            model(input_ids=row)
