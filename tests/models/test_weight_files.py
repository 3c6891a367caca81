"""A folder is what transformers' own `save_pretrained` would write, bit for bit, though nobody holds the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForMaskedLM, BertForMaskedLM, PretrainedConfig, PreTrainedModel

from tests.helpers.families import CONFIGS, SHIPPED, VARIANTS, has_head
from tests.helpers.training import TINY_RESNET
from trainer.base.errors import UsageError
from trainer.models.statistics import persistent_buffers
from trainer.models.weight_files import UnknownModelError, described_model, plan_files, transformers_class

# Of which transformers keeps each expert apart in files and together in memory, under names that differ.
EXPERTS = {**CONFIGS["llama"], "num_local_experts": 4}
MODELS = {
    **{model_type: (model_type, keys) for model_type, keys in (CONFIGS | SHIPPED).items()},
    **{name: (model_type, CONFIGS[model_type] | keys) for name, (model_type, keys) in VARIANTS.items()},
    "mixtral": ("mixtral", EXPERTS),
    "resnet": ("resnet", TINY_RESNET),
}
HEADS = [
    "AutoModelForSequenceClassification",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForImageClassification",
]
CASES = [(name, head) for name, (model_type, _) in MODELS.items() for head in HEADS if has_head(model_type, head)]


def built(name: str, head: str) -> Any:
    model_type, keys = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, head).from_config(AutoConfig.for_model(**{**keys, "model_type": model_type}))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """As an engine has them: of tied ones the first."""
    return {name: p.detach() for name, p in model.named_parameters()} | persistent_buffers(model)


def described(model: Any) -> Any:
    return described_model({**model.config.to_diff_dict(), "architectures": [type(model).__name__]})


def write(model: Any, folder: Path, tensors: dict[str, Tensor] | None = None, **options: Any) -> list[Path]:
    folder.mkdir(exist_ok=True)
    tensors = tensors_of(model) if tensors is None else tensors
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return plan_files(described(model), shapes, **options).write(tensors.__getitem__, folder)


def loaded(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize(("name", "head"), CASES)
def test_files_equal_those_that_transformers_saves(tmp_path, name, head):
    model = built(name, head)
    write(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    assert_equal(loaded(tmp_path / "ours"), loaded(tmp_path / "theirs"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("bert", "AutoModelForMaskedLM"),
        ("t5", "AutoModelForSeq2SeqLM"),  # part of which stays in fp32 beside fp16
        ("mixtral", "AutoModelForCausalLM"),
        ("resnet", "AutoModelForImageClassification"),  # has buffers, and some are integers
    ],
)
def test_half_precision_files_equal_transformers(tmp_path, name, head, dtype):
    model = built(name, head)
    write(model, tmp_path / "ours", dtype=dtype)
    model.save_pretrained(tmp_path / "fp32")
    getattr(transformers, head).from_pretrained(tmp_path / "fp32", dtype=dtype).save_pretrained(tmp_path / "theirs")
    ours = loaded(tmp_path / "ours")
    assert_equal(ours, loaded(tmp_path / "theirs"))
    assert (torch.float32 in {tensor.dtype for tensor in ours.values()}) == (name == "t5" and dtype == torch.float16)


@pytest.mark.parametrize("name", ["bert", "mixtral"])
def test_several_files_and_index_equal_transformers(tmp_path, name):
    head = "AutoModelForMaskedLM" if name == "bert" else "AutoModelForCausalLM"
    model, limit = built(name, head), 20_000
    files = write(model, tmp_path / "ours", largest_file_bytes=limit)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=limit)
    ours, theirs = (
        json.loads((tmp_path / one / "model.safetensors.index.json").read_text()) for one in ("ours", "theirs")
    )
    assert ours["metadata"]["total_parameters"] == theirs["metadata"]["total_parameters"]
    assert ours["metadata"]["total_size"] == sum(tensor.nbytes for tensor in loaded(tmp_path / "ours").values())
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert sorted(files) == sorted((tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 2
    for file in files:
        content = load_file(file)
        assert {key for key, place in ours["weight_map"].items() if place == file.name} == content.keys()
        assert len(content) == 1 or sum(tensor.nbytes for tensor in content.values()) <= limit
    model.config.save_pretrained(tmp_path / "ours")
    reopened = getattr(transformers, head).from_pretrained(tmp_path / "ours")
    assert_equal(tensors_of(reopened), tensors_of(model))


def test_a_tensor_is_read_for_its_file_and_not_before(tmp_path):
    model = built("bert", "AutoModelForMaskedLM")
    tensors, files_at = tensors_of(model), []

    def read(name: str) -> Tensor:
        files_at.append(len(list(tmp_path.glob("*.safetensors"))))
        return tensors[name]

    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    files = plan_files(described(model), shapes, largest_file_bytes=20_000).write(read, tmp_path)
    assert len(files_at) == len(tensors), "each is read once"
    assert set(files_at) == set(range(len(files)))


def test_tied_weights_may_come_under_any_of_their_names(tmp_path):
    model = built("bert", "AutoModelForMaskedLM")
    tensors = tensors_of(model)
    tensors["cls.predictions.decoder.weight"] = tensors.pop("bert.embeddings.word_embeddings.weight")
    write(model, tmp_path / "ours", tensors)
    model.save_pretrained(tmp_path / "theirs")
    assert_equal(loaded(tmp_path / "ours"), loaded(tmp_path / "theirs"))


def test_weights_that_are_tied_only_by_the_configuration_stay_apart(tmp_path):
    model = built("bert", "AutoModelForMaskedLM")
    tensors = tensors_of(model)
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"] + 1
    write(model, tmp_path, tensors)
    model.config.save_pretrained(tmp_path)
    reopened, loading = AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(reopened.cls.predictions.decoder.weight, tensors["cls.predictions.decoder.weight"])
    assert torch.equal(reopened.get_input_embeddings().weight, tensors["bert.embeddings.word_embeddings.weight"])


def test_names_that_a_checkpoint_once_had_do_not_come_back(tmp_path):
    """A model that was loaded from an old file is written as one that never was."""
    model = built("bert", "AutoModelForMaskedLM")
    model.save_pretrained(tmp_path / "old", save_original_format=False)
    reopened = AutoModelForMaskedLM.from_pretrained(tmp_path / "old", key_mapping={"^cls": "cls"})
    write(reopened, tmp_path / "ours")
    write(model, tmp_path / "theirs")
    assert_equal(loaded(tmp_path / "ours"), loaded(tmp_path / "theirs"))


def test_a_value_that_fp16_cannot_hold_is_refused(tmp_path):
    model = built("bert", "AutoModelForMaskedLM")
    with torch.no_grad():
        model.cls.predictions.bias[3] = -1e5
    with pytest.raises(
        UsageError, match=r"cls\.predictions\.bias reaches 100000, which is more than the 65504 of float16; use bf16"
    ):
        write(model, tmp_path, dtype=torch.float16)
    write(model, tmp_path, dtype=torch.bfloat16)


def test_tensors_of_another_model_are_refused(tmp_path):
    model = built("bert", "AutoModelForMaskedLM")
    tensors = tensors_of(model)
    bias = tensors.pop("cls.predictions.bias")
    with pytest.raises(UnknownModelError, match=r"there is no cls\.predictions\.bias"):
        write(model, tmp_path, tensors)
    with pytest.raises(UnknownModelError, match=r"BertForMaskedLM has no extra"):
        write(model, tmp_path, {**tensors, "cls.predictions.bias": bias, "extra": bias})


class Outsider(PreTrainedModel):
    """A model of a user's own, under a name that transformers could have."""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "nothing"}, "its `model_type` is 'nothing', which transformers does not know"),
        ({"model_type": ["bert"]}, "its `model_type` is"),
        ({"architectures": None}, "must name one class, but are None"),
        ({"architectures": ["BertModel", "BertForMaskedLM"]}, "must name one class"),
        ({"architectures": [1]}, "must name one class"),
        ({"architectures": ["Nothing"]}, "name 'Nothing', which is no model of transformers"),
        ({"architectures": ["os.system"]}, "which is no model of transformers"),
        ({"architectures": ["tests.models.test_weight_files.Outsider"]}, "which is no model of transformers"),
        ({"architectures": ["Outsider"]}, "which is no model of transformers"),
        ({"architectures": ["Trainer"]}, "which is no model of transformers"),
        ({"architectures": ["PreTrainedModel"]}, "which is no model of transformers"),
        ({"architectures": ["BertConfig"]}, "which is no model of transformers"),
        ({"architectures": ["AutoModel"]}, "which is no model of transformers"),
        ({"architectures": ["RobertaForMaskedLM"]}, "RobertaForMaskedLM is not of its `model_type` 'bert'"),
        ({"hidden_size": "wide"}, "BertForMaskedLM cannot be built from it"),
        ({"hidden_size": 33}, "BertForMaskedLM cannot be built from it"),
    ],
)
def test_only_models_of_transformers_are_built(monkeypatch, changes, words):
    monkeypatch.setattr(transformers, "Outsider", Outsider, raising=False)
    keys = {"model_type": "bert", "architectures": ["BertForMaskedLM"], **CONFIGS["bert"]}
    assert isinstance(described_model(keys), BertForMaskedLM)
    with pytest.raises(UnknownModelError, match=words):
        described_model({**keys, **changes})


def test_a_configuration_cannot_bring_code(tmp_path, monkeypatch):
    """`auto_map` is what a hub repository names its own code by."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modeling.py").write_text("raise SystemExit('it ran')")
    keys = {"model_type": "bert", "architectures": ["BertForMaskedLM"], **CONFIGS["bert"]}
    model = described_model({**keys, "auto_map": {"AutoModelForMaskedLM": "modeling.Model"}})
    assert type(model) is BertForMaskedLM


def test_finds_the_class_below_wrappers():
    wrapped = type("FSDPBertForMaskedLM", (BertForMaskedLM,), {"__module__": "torch.distributed.fsdp"})
    model = wrapped(AutoConfig.for_model("bert", **CONFIGS["bert"]))
    assert transformers_class(model) is BertForMaskedLM
    assert issubclass(transformers_class(model).config_class, PretrainedConfig)
