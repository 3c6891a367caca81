"""Write `schemas.json`: the names of all keys of the programs around the Trainer, from their installed packages.

The packages need not be importable: the classes of their schemas are parsed. Run it with the folder of the packages::

    pip install --no-deps --target FOLDER axolotl llamafactory trl sentence-transformers setfit
    python -m tests.tools.convert.foreign.list_keys FOLDER
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

FILE = Path(__file__).parent / "schemas.json"
_AXOLOTL, _FACTORY, _TRL = "axolotl/utils/schemas", "llamafactory/hparams", "trl/trainer"
SCHEMAS: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "axolotl": (
        "axolotl",
        {
            f"{_AXOLOTL}/config.py": ("AxolotlInputConfig",),
            f"{_AXOLOTL}/deprecated.py": ("DeprecatedParameters", "RemappedParameters"),
            f"{_AXOLOTL}/model.py": ("ModelInputConfig", "ModelOutputConfig"),
            f"{_AXOLOTL}/peft.py": ("LoraConfig", "ReLoRAConfig"),
            f"{_AXOLOTL}/training.py": ("HyperparametersConfig", "JaggedLRConfig"),
            f"{_AXOLOTL}/multimodal.py": ("MultiModalConfig",),
            f"{_AXOLOTL}/integrations.py": (),
        },
    ),
    "llama-factory": (
        "llamafactory",
        {
            f"{_FACTORY}/data_args.py": (),
            f"{_FACTORY}/finetuning_args.py": (),
            f"{_FACTORY}/model_args.py": (),
            f"{_FACTORY}/training_args.py": (),
            f"{_FACTORY}/generating_args.py": (),
        },
    ),
    **{
        f"trl-{name}": (
            "trl",
            {
                f"{_TRL}/base_config.py": (),
                f"{_TRL}/{name}_config.py": (),
                f"{_TRL}/model_config.py": (),
                "trl/scripts/utils.py": ("ScriptArguments", "DatasetMixtureConfig"),
            },
        )
        for name in ("sft", "dpo", "kto", "reward")
    },
    **dict.fromkeys(
        ("sentence-transformer", "cross-encoder"),
        ("sentence_transformers", {"sentence_transformers/base/training_args.py": ("BaseTrainingArguments",)}),
    ),
    "setfit": ("setfit", {"setfit/training_args.py": ("TrainingArguments",)}),
}
"""From tools to their packages, with the files of their schemas and the classes in them; no names: all classes."""


def keys_of(folder: Path, file: str, classes: tuple[str, ...]) -> Iterator[str]:
    """Yield the fields of the classes of a file; those that only Python code can set are left out."""
    for node in ast.parse((folder / file).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef) or (classes and node.name not in classes):
            continue
        for field in node.body:
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if not field.target.id.startswith("_") and "ClassVar" not in ast.unparse(field.annotation):
                yield field.target.id


def version_of(folder: Path, package: str) -> str:
    (info,) = folder.glob(f"{package}-*.dist-info")
    return info.name.removesuffix(".dist-info").split("-")[1]


def schemas(folder: Path, tools: Iterable[str] = SCHEMAS) -> dict[str, dict[str, object]]:
    """Return package, version and sorted keys of each tool."""
    return {
        tool: {
            "package": package,
            "version": version_of(folder, package),
            "keys": sorted({key for file, classes in files.items() for key in keys_of(folder, file, classes)}),
        }
        for tool in tools
        for package, files in [SCHEMAS[tool]]
    }


def _lines(found: dict[str, dict[str, object]]) -> str:
    """Return JSON with a line for each tool."""
    return "{\n" + ",\n".join(f" {json.dumps(tool)}: {json.dumps(row)}" for tool, row in found.items()) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(_lines(schemas(Path(sys.argv[1]))), encoding="utf-8")
