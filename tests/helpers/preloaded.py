"""Imports of the fork server, which its forks share: `trainer`, and the packages that most runs and ranks need.

It also fills the caches that each of them would fill again. It computes nothing: a fork has no threads of torch.
"""

from contextlib import suppress
from importlib import import_module

from trainer.base.collector import importing
from trainer.base.digests import source_digest
from trainer.features.deepspeed.package import import_deepspeed

with importing():
    for name in (
        "tests.helpers.faulty_run",
        "tests.helpers.training",
        "trainer.base.templates",
        "trainer.cli.run",
        "trainer.data.formats.json_lines",
        "trainer.engine.ddp",
        "trainer.engine.optimizers.adamw",
        "trainer.engine.optimizers.sgd",
        "trainer.engine.sharded",
        "trainer.launch.local",
        "trainer.models.families.bert",
        "trainer.recipe.reading.loading",
        "trainer.tasks.sequence_classification",
        "trainer.tools.memory",
        "trainer.tools.certify.run_end",
        "trainer.tools.preview_rows",
        "trainer.training.run",
        "datasets",
        "hypothesis",
        "optuna",
        "peft",
        "pytest",
        "rich.live",
        "scipy.io",
        "sentence_transformers",
        "sklearn.metrics",
        "torch.utils.cpp_extension",
        "transformers.models.bert.modeling_bert",
    ):
        with suppress(Exception):  # the tests that import it report the error
            import_module(name)
    with suppress(ImportError):
        import_deepspeed()
        for name in (
            "deepspeed.module_inject.auto_ep_layer",
            "deepspeed.ops.op_builder.all_ops",
            "deepspeed.runtime.superoffload.superoffload_stage3",
            "deepspeed.runtime.zero.muon.muon_optimizer",
            "torch._inductor.compile_fx",  # which DeepSpeed's engine imports
        ):
            import_module(name)
    import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("bert")  # a thousand patterns
source_digest()
