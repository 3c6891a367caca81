"""A model that is built in parts holds, bit for bit, the parts of the model that is built whole."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    BertForPreTraining,
    BertModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter

from tests.helpers.families import CONFIGS, HEADS, LABELS, NEAR_FAMILIES, build, has_head
from tests.helpers.ranks import RankPools
from tests.helpers.training import Curve, tiny_recipe, train_tiny
from trainer.base.errors import UsageError
from trainer.models import fill
from trainer.models.describe import ModelUse, describe
from trainer.models.fill import build_model
from trainer.models.hub_files import CannotLoadPartsError, pretrained_files
from trainer.models.place import ModelCut, PlacedModel, ShardChoice
from trainer.models.whole_model import load_whole, place_whole
from trainer.parallel.dropout import DropoutKeys
from trainer.parallel.row_groups import RowGroups
from trainer.parallel.shards.slices import part_of
from trainer.recipe.schema import Model, Training

CLASSIFICATION = "AutoModelForSequenceClassification"
QUICK = (
    ("bert", "SequenceClassification"),
    ("bert", "MaskedLM"),
    ("albert", "MaskedLM"),
    ("gpt2", "CausalLM"),
    ("llama", "SequenceClassification"),
    ("t5", "Seq2SeqLM"),
    ("vit", "ImageClassification"),
)
CASES = [
    pytest.param(
        model_type,
        head,
        marks=pytest.mark.nightly
        if model_type in NEAR_FAMILIES
        else ()
        if (model_type, head.removeprefix("AutoModelFor")) in QUICK
        else pytest.mark.slow,
    )
    for model_type in CONFIGS
    for head in HEADS
    if has_head(model_type, head) and not head.endswith(("QuestionAnswering", "TokenClassification"))
]
IDS = [f"{model_type}-{head.removeprefix('AutoModelFor')}" for model_type, head in (case.values for case in CASES)]
MAYBE_LABELS = {CLASSIFICATION: {"num_labels": LABELS}, "AutoModelForImageClassification": {"num_labels": LABELS}}


def built(
    recipe: Mapping[str, Any], head: str, cut: bool, shard: ShardChoice | None = None, **training: Any
) -> PlacedModel:
    """Without a cut, transformers loads the model whole."""
    use = ModelUse(head, MAYBE_LABELS.get(head, {}))
    described = describe(Model.model_validate(recipe), Training.model_validate(training), use)
    if cut:
        return build_model(described, ModelCut(RowGroups(dist.group.WORLD), shard=shard))
    return place_whole(described, ModelCut(), CannotLoadPartsError())


def differences(recipe: Mapping[str, Any], head: str, ignored_notes: int = 0) -> list[str]:
    """On one rank: how the model that is built in parts differs from the parts of the whole one."""
    whole, parts = built(recipe, head, cut=False), built(recipe, head, cut=True)
    rank, size = dist.get_rank(), dist.get_world_size()
    placements = parts.placements or {}
    found = []
    held, expected = (dict(one.model.named_parameters(remove_duplicate=False)) for one in (parts, whole))
    if held.keys() != expected.keys():
        found.append(f"names {held.keys() ^ expected.keys()}")
    first_names = {id(parameter): name for name, parameter in whole.model.named_parameters()}
    for name, parameter in expected.items():
        tensor, first = parameter.detach(), first_names[id(parameter)]
        for split in placements[first].splits:
            tensor = part_of(tensor, split, rank, size)
        if not torch.equal(held[name], tensor) or held[name].requires_grad != parameter.requires_grad:
            found.append(name)
        if held[name] is not held[first]:
            found.append(f"{name} is not tied to {first}")
    buffers = dict(parts.model.named_buffers())
    for name, buffer in whole.model.named_buffers():
        if not torch.equal(buffers[name], buffer) or buffers[name].dtype != buffer.dtype:
            found.append(f"buffer {name}")
    if parts.model.training != whole.model.training:
        found.append("training")
    if parts.model.config.to_dict() != whole.model.config.to_dict():
        found.append("config")
    if whole.model.can_generate() and parts.model.generation_config != whole.model.generation_config:
        found.append("generation_config")
    if sum(bool(placement.splits) for placement in placements.values()) <= 8:
        found.append("hardly anything is cut")
    if parts.notes != whole.notes:
        return [*found, f"notes {parts.notes}, not {whole.notes}"]  # perhaps of a model that was not built in parts
    return found + [f"shard of {name}" for name in other_shards(recipe, head, held)]


def other_shards(recipe: Mapping[str, Any], head: str, held: Mapping[str, Tensor]) -> list[str]:
    """On one rank: the shards over three data ranks that are no rows of its parts; torch's `chunk` is the reference."""
    index = dist.get_rank() + 1
    shards = built(recipe, head, cut=True, shard=ShardChoice(index, 3)).shards or {}
    rows = {name: dict(enumerate(part.detach().chunk(3))).get(index, part[:0]) for name, part in held.items()}
    return [name for name in held if name not in shards or not torch.equal(shards[name], rows[name])]


def save(folder: Path, model: nn.Module, **options: Any) -> dict[str, Any]:
    model.save_pretrained(folder, **options)
    return {"name_or_path": str(folder)}


def rewrite(folder: Path, change: Any) -> None:
    """Changes the tensors of a folder's one file."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize(("model_type", "head"), CASES, ids=IDS)
def test_a_folder_is_loaded_in_parts(ranks: RankPools, tmp_path, model_type, head):
    recipe = save(tmp_path, build(model_type, head, 0.0, DropoutKeys(0)))
    if model_type == "bart" and (tmp_path / "generation_config.json").exists():  # an older folder has one file for both
        (tmp_path / "generation_config.json").unlink()
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"bad_words_ids": [[3]], "num_beams": 4}))
    assert ranks(2).run(differences, recipe, head) == [[], []]


def test_an_adapter_trains_drawn_modules_whole_in_parts_too(ranks: RankPools, tmp_path):
    """The base has neither the pooler nor the classifier. A list of modules takes precedence, and a note says so."""
    base = save(tmp_path, build("bert", "AutoModelForMaskedLM", 0.0, DropoutKeys(0)))
    for saved, notes in (
        (None, ["initialised at random and trained whole, beside frozen weights: bert.pooler.dense, classifier"]),
        (
            ["classifier"],
            [
                "initialised at random and trained whole, beside frozen weights: classifier",
                "initialised at random and never trained, because they are frozen: bert.pooler.dense;"
                " `model.adapter.modules_to_save` names modules to train",
            ],
        ),
    ):
        recipe = {**base, "adapter": {"type": "lora", "rank": 2, "modules_to_save": saved}}
        whole = built(recipe, CLASSIFICATION, cut=False)
        assert whole.notes[-len(notes) :] == notes
        trained = {name for name, p in whole.model.named_parameters() if p.requires_grad and ".lora." not in name}
        pooler = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"} if saved is None else set()
        assert trained == {"classifier.weight", "classifier.bias"} | pooler
        assert ranks(2).run(differences, recipe, CLASSIFICATION) == [[], []]


@pytest.mark.parametrize(("model_type", "head"), CASES, ids=IDS)
def test_random_weights_are_parts_of_the_weights_of_one_process(ranks: RankPools, model_type, head):
    keys = {key: value for key, value in CONFIGS[model_type].items() if (model_type, key) != ("vit", "vocab_size")}
    recipe = {"config": {"model_type": model_type, **keys}, "tokenizer": "none"}
    assert ranks(2).run(differences, recipe, head) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("head", [CLASSIFICATION, "AutoModelForMaskedLM"])
def test_over_four_ranks(ranks: RankPools, tmp_path, head):
    recipe = save(tmp_path, build("bert", head, 0.0, DropoutKeys(0)))
    assert ranks(4).run(differences, recipe, head) == [[]] * 4


def bert(**keys: Any) -> Any:
    return AutoConfig.for_model("bert", **{**CONFIGS["bert"], **keys})


@pytest.mark.parametrize("shard", ["1GB", "20KB"], ids=["one file", "several files"])
def test_a_repository_of_the_hub_that_is_in_the_cache(ranks: RankPools, tmp_path, shard):
    cached, commit = tmp_path / "models--somebody--some-model", "0" * 40
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    save(cached / "snapshots" / commit, build("bert", CLASSIFICATION, 0.0, DropoutKeys(0)), max_shard_size=shard)
    recipe = {"name_or_path": "somebody/some-model"}
    assert ranks(2).run(differences_with_cache, str(tmp_path), recipe, CLASSIFICATION) == [[], []]


def differences_with_cache(folder: str, recipe: dict[str, Any], head: str) -> list[str]:
    from huggingface_hub import constants

    before, constants.HF_HUB_CACHE = constants.HF_HUB_CACHE, folder
    try:
        return differences(recipe, head)
    finally:
        constants.HF_HUB_CACHE = before


class TestNamesOfTheCheckpoint:
    """They are those of the model that was saved, and of the time when it was."""

    @pytest.mark.parametrize("saved", [BertModel, BertForPreTraining])
    def test_of_another_head(self, ranks: RankPools, tmp_path, saved):
        recipe = save(tmp_path, saved(bert()))
        assert ranks(2).run(differences, recipe, CLASSIFICATION) == [[], []]
        assert ranks(2).run(differences, recipe, "AutoModelForMaskedLM") == [[], []]

    def test_in_several_files(self, ranks: RankPools, tmp_path):
        recipe = save(tmp_path, build("gpt2", "AutoModelForCausalLM", 0.0, DropoutKeys(0)), max_shard_size="20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        assert ranks(2).run(differences, recipe, "AutoModelForCausalLM") == [[], []]

    def test_of_long_ago_and_in_half_precision(self, ranks: RankPools, tmp_path):
        recipe = save(tmp_path, BertModel(bert()).bfloat16())
        rewrite(
            tmp_path,
            lambda tensors: {
                name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
                for name, tensor in tensors.items()
            },
        )
        assert ranks(2).run(differences, recipe, CLASSIFICATION) == [[], []]

    def test_that_transformers_renames_for_a_family(self, ranks: RankPools, tmp_path):
        recipe = save(tmp_path, build("vit", "AutoModelForImageClassification", 0.0, DropoutKeys(0)))
        with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
            assert "vit.encoder.layer.0.attention.attention.query.weight" in file.keys()  # noqa: SIM118
        assert ranks(2).run(differences, recipe, "AutoModelForImageClassification") == [[], []]

    def test_tensors_that_must_be_taken_apart_are_read_whole(self, ranks: RankPools, tmp_path):
        recipe = save(tmp_path, build("bert", CLASSIFICATION, 0.0, DropoutKeys(0)))
        rewrite(tmp_path, fuse)
        assert ranks(2).run(with_fused_bert, recipe) == [[], []]


PROJECTIONS = ("query", "key", "value")


def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for kind in ("weight", "bias"):
        for layer in range(CONFIGS["bert"]["num_hidden_layers"]):
            path = f"bert.encoder.layer.{layer}.attention.self."
            fused = [tensors.pop(f"{path}{name}.{kind}") for name in PROJECTIONS]
            tensors[f"{path}qkv.{kind}"] = torch.cat(fused)
    return tensors


def with_fused_bert(recipe: dict[str, Any]) -> list[str]:
    before = get_checkpoint_conversion_mapping("bert") or []
    rules = [
        WeightConverter(f"self.qkv.{kind}", [f"self.{name}.{kind}" for name in PROJECTIONS], [Chunk(dim=0)])
        for kind in ("weight", "bias")
    ]
    register_checkpoint_conversion_mapping("bert", [*before, *rules], overwrite=True)
    try:
        return differences(recipe, CLASSIFICATION)
    finally:
        register_checkpoint_conversion_mapping("bert", before, overwrite=True)


class TestTiedWeights:
    def test_that_are_in_the_checkpoint_twice(self, ranks: RankPools, tmp_path):
        recipe = save(tmp_path, build("bert", "AutoModelForMaskedLM", 0.0, DropoutKeys(0)))
        embeddings, decoder = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
        rewrite(tmp_path, lambda tensors: {**tensors, decoder: tensors[embeddings].clone()})
        assert ranks(2).run(differences, recipe, "AutoModelForMaskedLM") == [[], []]
        rewrite(tmp_path, lambda tensors: {**tensors, decoder: tensors[embeddings] + 1})
        for found in ranks(2).run(differences, recipe, "AutoModelForMaskedLM"):
            assert found == [
                f"notes ['differ in the checkpoint, so they are not tied: {embeddings}, {decoder}'], not []"
            ]

    def test_of_which_the_checkpoint_has_the_other_name(self, ranks: RankPools, tmp_path):
        recipe = save(tmp_path, build("gpt2", "AutoModelForCausalLM", 0.0, DropoutKeys(0)))
        embeddings = "transformer.wte.weight"
        rewrite(tmp_path, lambda tensors: {"lm_head.weight": tensors.pop(embeddings), **tensors})
        assert ranks(2).run(differences, recipe, "AutoModelForCausalLM") == [[], []]


def refusal(recipe: dict[str, Any]) -> str:
    try:
        built(recipe, CLASSIFICATION, cut=True)
    except UsageError as error:
        return str(error)
    return "no error"


class TestWhatDoesNotFit:
    def test_weights_of_another_shape(self, ranks: RankPools, tmp_path):
        recipe = save(tmp_path, BertModel(bert()))
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
        for words in ranks(2).run(refusal, recipe):
            assert "`model.name_or_path` is " in words
            assert "in which 6 weights (bert." in words
            assert "have another size than in this task's model" in words
            assert "bert.encoder.layer.0.intermediate.dense.weight is [64, 32] and not [48, 32]" in words

    def test_a_head_of_other_classes_is_drawn_anew(self, ranks: RankPools, tmp_path):
        head = "AutoModelForImageClassification"
        config = AutoConfig.for_model("vit", **CONFIGS["vit"], num_labels=LABELS + 2)
        stored = transformers.ViTForImageClassification(config)
        recipe = save(tmp_path, stored)
        use = ModelUse(head, MAYBE_LABELS[head])
        described = describe(Model.model_validate(recipe), Training.model_validate({}), use)
        with pytest.raises(UsageError, match=r"set `model\.new_head` to true, or use one without a head"):
            build_model(described, ModelCut())
        recipe["new_head"] = True
        assert ranks(2).run(differences, recipe, head) == [[], []]
        whole = built(recipe, head, cut=False)
        assert whole.notes[0] == "not in the checkpoint, initialised at random: classifier.bias, classifier.weight"
        of_base = whole.model.vit.state_dict()
        assert all(torch.equal(of_base[name], value) for name, value in stored.vit.state_dict().items())
        assert whole.model.classifier.weight.shape[0] == LABELS

    def test_a_head_of_the_same_classes_is_drawn_anew_too(self, tmp_path):
        recipe = save(tmp_path, build("roberta", CLASSIFICATION, 0.0, DropoutKeys(0)))
        kept, drawn = (built({**recipe, "new_head": new}, CLASSIFICATION, cut=False).model for new in (False, True))
        other = {name for name, value in kept.state_dict().items() if not torch.equal(value, drawn.state_dict()[name])}
        assert {name.rpartition(".")[0] for name in other} >= {"classifier.dense", "classifier.out_proj"}
        assert all(name.startswith("classifier.") for name in other)

    def test_a_base_has_no_head_to_replace(self, tmp_path):
        recipe = save(tmp_path, BertModel(bert())) | {"new_head": True}
        with pytest.raises(UsageError, match="has no head for this task that could be replaced; set it to false"):
            built(recipe, CLASSIFICATION, cut=False)

    def test_a_file_that_is_cut_short(self, ranks: RankPools, tmp_path):
        recipe = save(tmp_path, BertModel(bert()))
        file = tmp_path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        assert all("could not be opened" in words for words in ranks(2).run(refusal, recipe))

    def test_a_folder_without_weights(self, ranks: RankPools, tmp_path):
        recipe = save(tmp_path, BertModel(bert()))
        (tmp_path / "model.safetensors").unlink()
        assert all("safetensors" in words for words in ranks(2).run(refusal, recipe))

    def test_a_model_without_parts_is_loaded_whole_with_a_note(self, ranks: RankPools, tmp_path):
        recipe = save(tmp_path, BertModel(bert()))
        for found in ranks(2).run(with_a_parameter_that_nobody_misses, recipe):
            (difference,) = found
            assert "every rank held the whole model for a moment while it was built, because it is not" in difference
            assert "because it is not clear where classifier.weight comes from'], not []" in difference

    def test_a_buffer_without_a_rule_is_seen(self, ranks: RankPools, tmp_path):
        recipe = save(tmp_path, build("bert", CLASSIFICATION, 0.0, DropoutKeys(0)))
        for notes in ranks(2).run(notes_without_rules, recipe):
            assert "because BertModel has no rule for the buffer bert.embeddings.position_ids" in notes[-1]


def with_a_parameter_that_nobody_misses(recipe: dict[str, Any]) -> list[str]:
    head = transformers.BertForSequenceClassification
    head._keys_to_ignore_on_load_missing = ["classifier"]
    try:
        return differences(recipe, CLASSIFICATION)
    finally:
        del head._keys_to_ignore_on_load_missing


def notes_without_rules(recipe: dict[str, Any]) -> list[str]:
    rules = transformers.BertPreTrainedModel._init_weights
    transformers.BertPreTrainedModel._init_weights = lambda self, module: None
    try:
        return built(recipe, CLASSIFICATION, cut=True).notes
    finally:
        transformers.BertPreTrainedModel._init_weights = rules


@pytest.mark.parametrize(
    "file", ["pytorch_model.bin", "../outside.safetensors", "/outside.safetensors", "a\\\\b.safetensors"]
)
class TestAnIndexThatNamesAnotherFile:
    """transformers would unpickle it, or read it from outside of the folder."""

    @pytest.fixture
    def recipe(self, tmp_path, file):
        config = AutoConfig.for_model("bert", **CONFIGS["bert"])
        config.save_pretrained(tmp_path / "model")
        index = {"metadata": {}, "weight_map": {"bert.pooler.dense.weight": file}}
        (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
        return Model(name_or_path=str(tmp_path / "model"))

    def test_is_refused_where_the_model_is_built_whole(self, recipe, file):
        with pytest.raises(UsageError, match=r"index.json names the file .*, and only safetensors files"):
            load_whole(describe(recipe, Training(), ModelUse(CLASSIFICATION, {"num_labels": 2})))

    def test_is_refused_where_it_is_built_in_parts(self, recipe, file):
        described = describe(recipe, Training(), ModelUse(CLASSIFICATION))
        with pytest.raises(UsageError, match=re.escape(repr(file))):
            pretrained_files(described.recipe, described.config)


def train_under_zero3(whole: bool) -> Curve:
    error, moved = CannotLoadPartsError("the test asks for it"), AssertionError("the device holds the whole model")
    with (
        patch.object(fill, "_fill_parts", side_effect=error) if whole else nullcontext(),
        patch.object(transformers.PreTrainedModel, "to", side_effect=moved),
    ):
        return train_tiny(tiny_recipe(training={"max_steps": 2}, parallel={"strategy": "zero3"}))


def test_zero3_partitions_a_model_that_was_built_whole(ranks: RankPools):
    """One parameter after the other, so that no device holds the whole model."""
    in_parts, whole = (ranks(2).run(train_under_zero3, kind) for kind in (False, True))
    for curve, expected in zip(whole, in_parts, strict=True):
        assert (curve.losses, curve.digests) == (expected.losses, expected.digests)
