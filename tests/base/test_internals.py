"""Private members of other packages: each is there, and a version without one is refused by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

import trainer
from trainer.base.errors import UsageError
from trainer.base.internals import Internals
from trainer.engine import ddp, fsdp_internals
from trainer.features.deepspeed import internals as deepspeed_internals
from trainer.features.deepspeed.package import import_deepspeed
from trainer.features.numa import binding
from trainer.parallel.pipeline import torch_stage
from trainer.tools.plan import simulated_deepspeed, simulated_offload

PLANS = {
    owner: [*names]
    for table in (simulated_deepspeed._STATE, simulated_deepspeed._ANSWERS, simulated_deepspeed._CREATORS)
    for owner, names in table.items()
}
MOVES = {owner: [name] for owner, name in simulated_offload._TO_DEVICE["deepspeed"].items()}

MOVES_OF_FSDP = (simulated_offload._TO_DEVICE["native"], simulated_offload._TO_HOST["native"])

TORCH = Internals(
    "torch",
    "",
    {
        "torch": [
            "_C", "_amp_update_scale_", "_foreach_add_", "_foreach_copy_", "_foreach_mul_", "_foreach_norm",
            "_foreach_sub_",
        ],
        "torch._subclasses": ["FakeTensor"],
        "torch._C": ["_len_torch_dispatch_stack"],
        "torch._C._distributed_c10d": ["_DEFAULT_FIRST_BUCKET_BYTES", "_compute_bucket_assignment_by_size"],
        "torch.autograd": ["_profiler_enabled"],
        "torch.distributed:Work": ["_source_rank"],
        "torch.distributed.device_mesh:DeviceMesh": ["_flatten"],
        "torch.distributed.tensor._utils": ["compute_local_shape_and_global_offset"],
        "torch.nn:Conv2d": ["_conv_forward", "_reversed_padding_repeated_twice"],
        "torch.nn:Module": ["_forward_hooks"],
        "torch.nn.modules.batchnorm": ["_NormBase"],
        "torch.optim._muon": [
            "DEFAULT_A", "DEFAULT_B", "DEFAULT_C", "EPS", "_adjust_lr", "_zeropower_via_newtonschulz",
        ],
        "torch.utils._python_dispatch": ["_disable_current_modes", "_get_current_dispatch_mode_stack"],
        "torch.utils.checkpoint": ["_CachedTorchDispatchMode", "_CachingTorchDispatchMode"],
        "torch._C:TensorBase": ["_version"],
        **{owner: [name] for table in MOVES_OF_FSDP for owner, name in table.items()},
    },
)  # fmt: skip
"""Members beside those that a module of `TABLES` requires; a version without them fails at once."""

TRANSFORMERS = Internals(
    "transformers",
    "",
    {
        "transformers:GenerationConfig": ["_from_model_config"],
        "transformers:PretrainedConfig": ["_attn_implementation", "_experts_implementation"],
        "transformers.models.mixtral.modeling_mixtral:MixtralExperts": ["_apply_gate"],
        "transformers.utils.chat_template_utils": ["_compile_jinja_template"],
    },
)

TABLES = {
    ddp: [ddp.INTERNALS],
    fsdp_internals: [fsdp_internals.INTERNALS],
    torch_stage: [torch_stage.INTERNALS, torch_stage.VOTES],
    deepspeed_internals: [deepspeed_internals.INTERNALS],
    binding: [binding.INTERNALS],
}

PACKAGE = Path(trainer.__file__).parent


def private_members() -> Iterator[tuple[Path, str]]:
    """Yield the private members of other packages that a file of the engines, the layouts or the features names."""
    files = {file: ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}
    nodes = [node for tree in files.values() for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"}
    for file, tree in files.items():
        if file.relative_to(PACKAGE).parts[0] not in ("engine", "parallel", "features"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr not in own:
                if not node.attr.startswith("__") and ast.unparse(node.value) not in ("os", "sys"):
                    yield file, node.attr
            elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith(("trainer", "__future__")):
                hidden = "._" in str(node.module)
                yield from ((file, name.name) for name in node.names if hidden or name.name.startswith("_"))


class Kept:
    declared: int

    def set(self) -> None:
        self.assigned = [one.inner for one in ()]


def members_of(*names: str) -> Internals:
    return Internals("torch", "2.11 to 2.13", {f"{__name__}:Kept": names})


@pytest.mark.parametrize(
    "internals",
    [
        pytest.param(ddp.INTERNALS, id="ddp"),
        pytest.param(fsdp_internals.INTERNALS, id="fsdp"),
        pytest.param(torch_stage.INTERNALS, id="stages"),
        pytest.param(torch_stage.VOTES, id="votes"),
        pytest.param(binding.INTERNALS, id="numa"),
        pytest.param(TORCH, id="others"),
        pytest.param(TRANSFORMERS, id="transformers"),
    ],
)
def test_torch_has_each(internals: Internals):
    assert not internals.lacking()


def test_deepspeed_has_each():
    pytest.importorskip("deepspeed")
    import_deepspeed()
    assert not deepspeed_internals.INTERNALS.lacking()
    assert not Internals("deepspeed", "", PLANS).lacking()
    assert not Internals("deepspeed", "", MOVES).lacking()


def test_each_private_member_has_its_row_and_its_file():
    def names(*tables: Internals) -> set[str]:
        return {name for table in tables for members in table.members.values() for name in members}

    found = {*private_members()}
    known = names(TORCH, TRANSFORMERS, *chain.from_iterable(TABLES.values()))
    assert {name for _, name in found} - known == {"_next_step"}  # of Trackio, which `test_trackio.py` tests
    for module, tables in TABLES.items():
        assert {file for file, name in found if name in names(*tables)} <= {Path(module.__file__)}


def test_a_class_has_its_attributes_and_those_its_methods_set():
    assert not members_of("declared", "set", "assigned", "inner").lacking()
    assert members_of("declared", "gone").lacking() == [f"{__name__}.Kept.gone"]


def test_of_a_missing_module_are_all_missing():
    assert Internals("torch", "", {"torch.gone:Kept": ["a", "b"]}).lacking() == [
        "torch.gone.Kept.a",
        "torch.gone.Kept.b",
    ]


def test_a_version_without_one_is_refused():
    torch = r"which torch 2\.\S+ lacks; install torch 2\.11 to 2\.13, or use ddp$"
    with pytest.raises(
        UsageError, match=rf"^`parallel.strategy` fsdp needs {re.escape(__name__)}\.Kept\.gone, {torch}"
    ):
        members_of("set", "gone").require("`parallel.strategy` fsdp", "use ddp")
