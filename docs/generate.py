"""Generator of the blocks in `README.md`, `CONTRIBUTING.md` and the pages that contain facts from the code.

A block lies between `<!-- generated: NAME -->` and `<!-- end -->`. Run `python -m docs.generate` after a change of the
schema, the command line, the strategies, the schedules, the checks or the shipped recipes. A test fails if a block is
out of date. The measured figures come from `docs/parity.json`, which `python -m tests.parity.measure` writes, from
`docs/throughput.json` of `python -m tests.benchmarks.throughput --store`, from `docs/operations.json` of
`python -m tests.benchmarks.operations --store`, from `docs/compiled_kernels.json` of
`python -m tests.benchmarks.compiled_kernels --store`, from `docs/compiled_layers.json` of
`python -m tests.benchmarks.compiled_layers --store`, from `docs/house.json` of `python -m tests.house --store`, and
from the results of `make gpu` in `docs/gpu/DEVICE.json`.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import getdoc
from itertools import groupby
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

import trainer.recipe.registered  # noqa: F401  # puts the keys of features into the schema
from docs import costs, sizes
from tests.benchmarks.budget import budget
from trainer.cli.program import command
from trainer.models.families.family import ModelFamily, TensorPlan
from trainer.models.families.table import FAMILIES
from trainer.recipe.combinations import EXCLUSIONS, Condition
from trainer.recipe.reading.files import read_file
from trainer.recipe.reading.keys import default_tag, is_named, kinds, section_models
from trainer.recipe.reading.shipped import is_base, shipped_recipes
from trainer.recipe.registered import task_sections
from trainer.recipe.schedules import SCHEDULES, PipelineSchedule
from trainer.recipe.schema import Recipe, Section
from trainer.recipe.schema.fields import NOT_BLANK
from trainer.recipe.strategies import STRATEGIES, Strategy
from trainer.tasks.metrics.table import METRICS
from trainer.tasks.token_labels import TOKEN_METRICS
from trainer.tools.convert.foreign.tables import (
    ACCELERATE,
    DEEPSPEED,
    MEGATRON,
    PROGRAMS,
    TRAINING_ARGUMENTS,
    Counterpart,
)
from trainer.tools.doctor.table import CHECKS, Check
from trainer.tools.expected import SEEDS, SOURCE
from trainer.tools.plan.hardware import known_devices

ROOT = Path(__file__).resolve().parents[1]
PARITY = ROOT / "docs" / "parity.json"
OPERATIONS = ROOT / "docs" / "operations.json"
COMPILED_LAYERS = ROOT / "docs" / "compiled_layers.json"
COMPILED_KERNELS = ROOT / "docs" / "compiled_kernels.json"
THROUGHPUT = ROOT / "docs" / "throughput.json"
GPUS = ROOT / "docs" / "gpu"
FAULTS = ROOT / "docs" / "faults.json"
HOUSE = ROOT / "docs" / "house.json"
_BLOCK = re.compile(r"(?P<begin><!-- generated: (?P<name>\w+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
# Notes that repeat the reference of the key.
_STATED = re.compile(
    r'one of .*|("\w+"(, | or |$)){2,}|with a unit: .*|a time with its unit: .*|one interval .*|an integer is .*'
    r"|a number below .*|a list: .*|ranks share .*|null, not 0, .*|one seed .*|all dropout .*|letters, .*|adamw, .*"
)
_BY_DEFAULT = "default_ratio"


def pages() -> list[Path]:
    """Return the pages that may contain generated blocks: those of `docs/`, then those of features."""
    of_features = sorted(ROOT.glob("trainer/features/*/page.md"))
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *of_features]


def with_blocks(text: str) -> str:
    """Return `text` with its generated blocks updated.

    Raises:
        KeyError: A block has an unknown name.
    """
    return _BLOCK.sub(lambda block: f"{block['begin']}{BLOCKS[block['name']]()}\n{block['end']}", text)


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _strategies() -> str:
    header = (
        "`parallel.strategy`",
        "what lies where",
        "parameters",
        "gradients",
        "optimizer",
        "sent by a rank in a step",
    )
    return _table(header, [_strategy(row) for row in STRATEGIES.values()])


def _strategy(row: Strategy) -> tuple[str, ...]:
    """Return formulas for P fp32 parameters with AdamW on N ranks: bytes that a rank holds, and its communication."""
    master = " + 4P/N" if row.package else ""  # DeepSpeed's master copy of the rank's shard
    return (
        f"`{row.name}`",
        row.summary,
        "4P/N" if row.cuts_parameters else "4P",
        "4P/N" if row.cuts_gradients else "4P",
        ("8P/N" if row.cuts_optimizer else "8P") + master,
        row.communication,
    )


def _shipped() -> str:
    return ", ".join(f"`{name}`" for name, path in shipped_recipes().items() if not is_base(path))


def _expectations() -> str:
    """Return the expected metrics of the shipped recipes."""
    found = {name: read_file(path)[0].plain().get("expects") for name, path in shipped_recipes().items()}
    rows = [
        (f"`{name}`", "<br>".join(f"{key} {low:g} to {high:g}" for key, (low, high) in _intervals(expects)), source)
        for name, expects in found.items()
        if expects is not None and (source := expects["source"])
    ]
    return _table(("recipe", "expected", "source"), rows)


def _intervals(expects: Mapping[str, Any]) -> list[tuple[str, tuple[float, float]]]:
    return [(key, value) for key, value in expects.items() if key not in (SOURCE, SEEDS)]


def _keys() -> str:
    """Return lists of the plain keys of a recipe, then of each section, its subsections and its kinds."""
    return "\n\n".join(_section_keys("", Recipe, "###"))


def _section_keys(prefix: str, model: type[Section], heading: str) -> Iterator[str]:
    """Iterate over the list of the plain keys of a section, then the texts of its subsections."""
    sections = {name: field for name, field in model.model_fields.items() if section_models(field.annotation)}
    yield "\n".join(_key_lines(prefix, model, sections))
    for name, field in sections.items():
        yield from _section(f"{prefix}{name}", field, heading)


def _section(name: str, field: FieldInfo, heading: str) -> Iterator[str]:
    of_kind = kinds(field)
    if not of_kind:
        (model,) = section_models(field.annotation)
        yield f"{heading} `{name}`\n\n{getdoc(model)}"
        yield "\n".join(_key_lines(f"{name}.", model))
        return
    default = default_tag(field)
    note = "" if default is None else f"The default is `{json.dumps(default)}`."
    yield "\n\n".join(filter(None, [f"{heading} `{name}`", field.description, note]))
    lines_of = {tag: list(_key_lines(f"{name}.", model, (field.discriminator,))) for tag, model in of_kind.items()}
    first, *others = lines_of.values()
    shared = [line for line in first if all(line in lines for lines in others)]
    if shared:
        yield "\n".join(shared)
    shown: dict[str, str] = {}
    for tag, model in of_kind.items():
        lines = [line for line in lines_of[tag] if line not in shared]
        yield f"{heading}# `{name}.{field.discriminator}`: `{json.dumps(tag)}`\n\n{getdoc(model)}"
        yield "\n".join([line for line in lines if line not in shown] + list(_as_before(lines, shown)))
        shown = dict.fromkeys(lines, tag) | shown


def _as_before(lines: Sequence[str], shown: Mapping[str, str]) -> Iterator[str]:
    """Iterate over the names of the keys that earlier kinds have in the same form."""
    for tag in dict.fromkeys(shown[line] for line in lines if line in shown):
        names = [line.split()[1] for line in lines if shown.get(line) == tag]
        below = dict.fromkeys(f"{name.rpartition('.')[0]}.*`" if name.count(".") > 1 else name for name in names)
        yield f"- as under `{json.dumps(tag)}`: {', '.join(below)}"


def _key_lines(prefix: str, model: type[Section], without: Collection[str | None] = ()) -> Iterator[str]:
    properties = model.model_json_schema()["properties"]
    listed: set[type[Section]] = set()  # another key with the same keys in it needs no list of them
    for key, field in model.model_fields.items():
        inner = section_models(field.annotation)
        if key in without:
            continue
        if inner and is_named(field):
            yield f"- `{prefix}{key}` (object of names, **`null`**): {properties[key].get('description', '')}"
            for value in inner:
                item = "[]" if _is_listed(field.annotation, value) else ""
                yield from _key_lines(f"{prefix}{key}.NAME{item}.", value)
        elif inner and _is_list(properties[key]):
            yield f"- `{prefix}{key}` (list of objects, **`null`**): {properties[key].get('description', '')}"
            if inner[0] not in listed:
                yield from _key_lines(f"{prefix}{key}[].", inner[0])
        elif inner:  # a nested section: its keys are listed among the others
            yield from _key_lines(f"{prefix}{key}.", inner[0])
            listed.add(inner[0])
        else:
            values = _with_default(_values(properties[key]), field)
            yield f"- `{prefix}{key}` ({values}): {properties[key].get('description', '')}"


def _is_listed(annotation: Any, model: type[Section]) -> bool:
    """Return whether a type has lists of a section."""
    parts = get_args(annotation)
    return (get_origin(annotation) is list and model in parts) or any(_is_listed(part, model) for part in parts)


def _is_list(schema: Mapping[str, Any]) -> bool:
    return any(choice.get("type") == "array" for choice in schema.get("anyOf", [schema]))


def _with_default(values: str, field: FieldInfo) -> str:
    """Return the values of a key with its default in bold."""
    if field.is_required():
        return f"{values}, required"
    default = f"`{json.dumps(field.get_default(call_default_factory=True), default=str)}`"
    if default in values:
        return values.replace(default, f"**{default}**")
    return f"{values}, **{default}**"


def _values(schema: Mapping[str, Any]) -> str:
    """Return the allowed values of a key, in words."""
    if "anyOf" in schema:
        values = list(dict.fromkeys(_values(choice) for choice in schema["anyOf"]))
        last = ", `null`" if values[-1] == "`null`" and values.pop() else ""
        return " or ".join(values) + last
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema["type"]
    if kind == "null":
        return "`null`"
    if kind == "string":
        rule = "path" if schema.get("format") == "path" else "text"
        if rule == "text" and schema.get("pattern") != NOT_BLANK:
            rule = str(schema.get("patternErrorMessage", rule))
        return rule.partition(" such as")[0]
    if kind == "array":
        return f"list of {_length(schema)}{_values(schema['items'])}"
    if kind == "boolean":
        return "`true`, `false`"
    bounds = [f"{sign} {schema[bound]}" for bound, sign in _BOUNDS.items() if bound in schema]
    return " ".join([kind, ", ".join(bounds)]).strip()


def _length(schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if most is None:
        return ""
    return f"{most}: " if least == most else f"{least} to {most}: "


def _families() -> str:
    header = (
        "model type",
        "column (outputs cut)",
        "row (inputs cut)",
        "vocabulary cut",
        "whole on every rank",
        "sequence",
    )
    return _table(header, [_family(family, family.tensor) for family in FAMILIES.values() if family.tensor])


def _family(family: ModelFamily, plan: TensorPlan) -> tuple[str, ...]:
    layers = f"{family.layers}."
    columns = [
        name.removeprefix(layers) + (f" ({blocks} in one)" if blocks > 1 else "")
        for name, blocks in plan.columns.items()
    ]
    vocabulary = [*plan.embeddings, *plan.vocabulary_heads]
    cells = (
        _names(columns + [f"{name.removeprefix(layers)} (heads)" for name in (*plan.head_embeddings, *plan.parts)]),
        _names(name.removeprefix(layers) for name in plan.rows),
        _names(vocabulary),
        _names([*plan.whole, *(f"{name.removeprefix(layers)} (partial gradients)" for name in plan.partial)]),
        "yes" if plan.sequence_parallel else "no",
    )
    return (f"`{family.model_type}`", *cells)


def _names(names: Iterable[str]) -> str:
    """Return names as a table cell. Markdown characters are escaped, because a bar would end the cell."""
    return "<br>".join(name.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_") for name in names) or "-"


def _exclusions() -> str:
    def words(condition: Condition) -> str:
        return f"`{condition.key}` {condition.values}"

    found: dict[str, list[str]] = {}
    for row in EXCLUSIONS:
        found.setdefault(words(row.first), []).append(words(row.second))
    return "\n".join(f"- {first}: {'; '.join(others)}" for first, others in found.items())


def _metrics() -> str:
    """Return the metrics of each task."""

    def shown(name: str, defaults: Collection[str]) -> str:
        text = f"`{name}`" if METRICS[TOKEN_METRICS.get(name, (name,))[0]].greater_is_better else f"`{name}` ↓"
        return f"**{text}**" if name in defaults else text

    rows = []
    for task, section in task_sections().items():
        field = section.model_fields["metrics"]
        defaults = field.get_default(call_default_factory=True)
        words = get_args(get_args(field.annotation)[0])
        rows.append((f"`{task}`", ", ".join(shown(word, defaults) for word in words)))
    return _table(("`task.type`", "`task.metrics`"), rows)


def _schedules() -> str:
    header = ("`schedule`", "what it does", "stages on a rank", "microbatches of a pass", "share of a pass that idles")
    return _table(header, [_schedule(row) for row in SCHEDULES.values()])


def _schedule(row: PipelineSchedule) -> tuple[str, ...]:
    """Return a row for P ranks with v stages each and m microbatches. The example has P = 4 and m = 16."""
    least = "as many as stages, or more" if row.fills else "any number"
    many = ", a multiple of P" if row.several_stages else ""
    work = "".join(["3 " * row.splits_backward, "v " * row.several_stages, "m"])
    example = row.bubble(4, row.stages_per_rank, 16)
    formula = f"(P - 1) / ({work} + P - 1)"
    stages = f"{row.stages_per_rank} or more" if row.several_stages else "1"
    return f"`{row.name}`", row.summary, stages, f"{least}{many}", f"{formula}: {example:.1%}"


def _pipeline_families() -> str:
    able = [f"`{name}`" for name, family in FAMILIES.items() if family.stages]
    unable = [f"`{name}`" for name, family in FAMILIES.items() if not family.stages]
    return f"{', '.join(able)}. Not {', '.join(unable)}."


def _checks() -> str:
    groups = groupby(CHECKS, lambda check: check.group)
    return "\n\n".join(f"**{group}**\n\n" + "\n".join(map(_check, checks)) for group, checks in groups)


def _check(check: Check) -> str:
    summary, *_ = str(getdoc(check.examine)).split("\n\n")
    return f"- {check.name}: {' '.join(summary.split())}"


def _own_rows(*programs: str) -> dict[str, Counterpart]:
    """Return the rows of programs without the fields of TrainingArguments of the same name and default."""
    rows = {key: row for program in programs for key, row in PROGRAMS[program].items()}
    inherited = {key for key, row in TRAINING_ARGUMENTS.items() if key in rows and rows[key].defaults == row.defaults}
    return {key: row for key, row in rows.items() if row.argument != key or key not in inherited}


def _counterparts(table: Mapping[str, Counterpart]) -> str:
    """Return a list of the keys that have a counterpart in a recipe; `trainer convert` explains the others."""
    found: dict[tuple[str, str], list[str]] = {}
    for key, row in table.items():
        if row.key is not None:
            here = "parallel.deepspeed" if row.key.startswith("parallel.deepspeed.") else row.key
            found.setdefault((here, _STATED.sub("", row.note)), []).append(f"`{key}`")
    return "\n".join(f"- {', '.join(keys)}: `{here}`{note and f', {note}'}" for (here, note), keys in found.items())


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def parity() -> str:
    """Return the parity table from the figures of the last measurement."""
    return _parity("rows")


def parity_of_experts() -> str:
    """Return the parity table of a mixture of experts from the same measurement."""
    return _parity("experts")


def _parity(kind: str) -> str:
    measured = _read(PARITY)
    rows = [(row["layout"], *(f"{figure:.0e}" for figure in row["differences"])) for row in measured[kind]]
    return _table(("", *measured["columns"]), rows)


def throughput(figures: Mapping[str, Any]) -> str:
    """Return tables of the ratios to the hand-written loop by processor time, one for each set of trainings."""
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for setting, found in figures.items():
        _, *others = found  # all ratios of the first are 1
        if all(_BY_DEFAULT not in numbers for numbers in found.values()):
            ratios = (_median(found[name]["cpu_ratio"]) for name in others)
            groups.setdefault(tuple(others), []).append((setting, *ratios))
    return "\n\n".join(_table(("", *names), rows) for names, rows in groups.items())


def throughput_by_default(figures: Mapping[str, Any]) -> str:
    """Return a table of the ratios to transformers' `Trainer` with its defaults, by processor time."""
    chosen = {
        setting: found
        for setting, found in figures.items()
        if all(_BY_DEFAULT in numbers for numbers in found.values())
    }
    names = dict.fromkeys(name for found in chosen.values() for name in found)
    rows = [(name, *(_median(found[name][_BY_DEFAULT]) for found in chosen.values())) for name in names]
    return _table(("", *(setting.partition(", beside")[0] for setting in chosen)), rows)


def operations(figures: Mapping[str, Mapping[str, float]], layers: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table of trainings and layouts: our operations, those of the plain loop, and the ratio of bytes.

    Models with a step in which the host waits have both numbers of waits, too. Rows with a form of the model's authors
    have its operations, and our bytes divided by its bytes.

    Steps on one process in bf16 also have their kernels and bytes with compiled layers, from those of `layers`.
    """
    found: dict[str, dict[str, str]] = {}
    waiting = {name.partition(",")[0] for name, row in figures.items() if row.get("waits") or row.get("plain_waits")}
    for name, row in figures.items():
        model, task, precision, layout, *more = name.split(", ")
        cells = found.setdefault(", ".join([model, task, precision, *more]), {})
        waits = f"; {row['waits']} of {row['plain_waits']} waits" if model in waiting else ""
        own = f"; own form {row['own_operations']:,}, {row['own_bytes_ratio']:.2f}" if "own_operations" in row else ""
        cells[layout] = f"{row['operations']:,} of {row['plain_operations']:,}, {row['bytes_ratio']:.2f}{own}{waits}"
        of_model = [
            layer for name, layer in layers.items() if (one := name.split(", "))[:1] + one[2:] == [model, *more]
        ]
        if of_model and (precision, layout) == ("bf16", "one process"):
            kernels, gigabytes = compiled_step(row, of_model)
            cells["one process, compiled"] = f"{kernels:,}, {gigabytes / row['plain_gigabytes']:.2f}"
    layouts = list(dict.fromkeys(layout for cells in found.values() for layout in cells))
    return _table(("", *layouts), [(name, *(cells.get(one, "-") for one in layouts)) for name, cells in found.items()])


def compiled_step(step: Mapping[str, float], layers: Sequence[Mapping[str, float]]) -> tuple[int, float]:
    """Return the kernels and gigabytes of a step with compiled layers: those of a step, changed by each layer."""
    kernels, gigabytes = step["operations"], step["gigabytes"]
    for layer in layers:
        kernels += layer["layers"] * (layer["compiled_kernels"] - layer["operations"])
        gigabytes += layer["layers"] * (layer["compiled_gigabytes"] - layer["gigabytes"])
    return int(kernels), gigabytes


def compiled_layers(figures: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table of the operations and bytes of layers, uncompiled and compiled."""
    rows = [
        (
            name,
            f"{row['operations']}, {row['gigabytes']:.2f} GB",
            f"{row['compiled_kernels']}, {row['compiled_gigabytes']:.2f} GB",
            f"{row['bytes_ratio']:.2f}",
        )
        for name, row in figures.items()
    ]
    return _table(("a layer of", "uncompiled", "compiled", "bytes"), rows)


def compiled_kernels(most: Mapping[str, tuple[int, int]]) -> str:
    """Return a table of the most memory that the kernels of a group use on each GPU, and of the compiled cases."""
    found: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for name, usage in most.items():
        capability, kind, *rest = name.split(", ")
        group = ", ".join([kind, *rest[:2]]) if kind == "attention" else kind
        found.setdefault(group, {}).setdefault(capability, []).append(usage)
    capabilities = sorted({one for cells in found.values() for one in cells}, key=float)

    def cell(cases: Sequence[tuple[int, int]]) -> str:
        stack, shared = (max(numbers) for numbers in zip(*cases, strict=True))
        return f"{len(cases)}: {stack}, {shared / 1024:.0f}"

    rows = [
        (group, *(cell(cells[one]) if one in cells else "-" for one in capabilities)) for group, cells in found.items()
    ]
    return _table(("", *capabilities), rows)


def _median(quartiles: Sequence[float]) -> str:
    return f"{quartiles[1]:.3f}"


def with_spread(quartiles: Sequence[float]) -> str:
    """Return the median of `quartiles`, and the others in brackets."""
    low, middle, high = quartiles
    return f"{middle:.3f} ({low:.2f}-{high:.2f})"


def gpu_figures(results: Iterable[Mapping[str, Any]]) -> str:
    """Return a table for each device, from the results of `make gpu`; the usual keys of a training are left out."""
    found = []
    for result in results:
        note = f" ({result['note']})" if "note" in result else ""
        found.append(f"{result['device']}, torch {result['torch']}{note}:\n\n{_gpu_table(result)}")
    return "\n\n".join(found) or "No run on a GPU is stored yet."


def _gpu_table(result: Mapping[str, Any]) -> str:
    header = (
        "training",
        "samples/s",
        "MFU",
        "HFU",
        "ms a step",
        "launches",
        "peak memory",
        *_PEERS.values(),
    )
    columns = list(zip(header, *(_gpu_row(name, row, result) for name, row in result["training"].items()), strict=True))
    own = len(header) - len(_PEERS)
    peers = [column for column in columns[own:] if set(column[1:]) != {"-"}]
    head, *rows = zip(*columns[:own], *peers, strict=True)
    return _table(head, rows)


_PEERS = {
    "plain": "of a plain loop",
    "compiled": "of a compiled loop",
    "captured": "of a compiled, captured loop",
    "sparse": "of a compiled loop over masked words",
    "transformers": "of transformers' Trainer",
}
"""The heads of the columns of other loops: ratios of rates, and the peak memory of that loop."""
_LIKE_PEERS = re.compile(r"(keyed dropout, CUDA graphs|compiled(, CUDA graphs)?|CUDA graphs, whole logits)$")


def _name_at_peers(name: str) -> str:
    """Return the name under which the other loops trained the same batches."""
    if name.endswith("no dropout, compiled"):
        return name.removesuffix(", compiled")
    return _LIKE_PEERS.sub("keyed dropout", name)


def _beside_peer(row: Mapping[str, Any], peer: Mapping[str, Any]) -> str:
    if "rows_per_second" not in peer:
        return "-"
    memory = f" ({_size(peer['peak_bytes'])})" if peer.get("peak_bytes") else ""
    return f"{row['rows_per_second'] / peer['rows_per_second']:.2f}{memory}"


def gpu_budget(results: Iterable[Mapping[str, Any]]) -> str:
    """Return the expected figures of `tests/benchmarks/budget.py` beside the fastest measured steps."""
    results = list(results)
    rows = []
    for one in budget():
        found = [value for result in results if (value := one.measured(result)) is not None]
        measured = f"{min(found):,.1f}" if found and one.unit == "ms" else "-"
        work, is_training, _ = one.place[-2].partition(" tokens, bf16, ddp")
        shares = [
            row["mfu"] * 1000 * row["step_seconds"] / one.value
            for result in results if is_training
            for name, row in result["training"].items() if name.startswith(f"{work} tokens") and "mfu" in row
        ]  # fmt: skip
        mfu = f"{shares[0]:.1%}" if shares else "-"
        value = f"{one.value:,.0f}" if one.unit == "operations" else f"{one.value:.3g}"
        rows.append((one.name, one.unit, measured, value, mfu, one.assumption))
    head = ("figure", "unit", "measured", "expected, not measured", "its MFU", "assumption")
    return _table(head, rows)


_USUAL = re.compile(r", (bf16|ddp|keyed dropout)(?=,|$)")  # keys of a training that its name need not have


def _gpu_row(name: str, row: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[str, ...]:
    if "rows" not in row:
        return name, row.get("not_run") or row["error"].splitlines()[0], *"-" * (5 + len(_PEERS))
    shares, peak = [row.get(share) for share in ("mfu", "hfu")], row.get("peak_bytes")
    same_batches = _name_at_peers(name)
    return (
        _USUAL.sub("", name),
        f"{row['rows_per_second']:,.0f}",
        *("-" if share is None else f"{share:.1%}" for share in shares),
        f"{1000 * row['step_seconds']:.1f}",
        str(row["launches"]),
        "-" if peak is None else _size(peak),
        *(_beside_peer(row, result.get(peer, {}).get(same_batches, {})) for peer in _PEERS),
    )


def _command_line() -> str:
    """Return the usage, the description and the options of each verb."""
    program = command()
    with program.make_context("trainer", [], resilient_parsing=True) as context:
        verbs = list(_verbs("trainer", program, context))
    times = Counter(row for _, rows in verbs for row in rows)
    shared = [row for row in times if times[row] > 2]
    begin = "Options of several verbs:\n\n" + "\n".join(shared)
    sections = (
        "\n\n".join(filter(None, [head, "\n".join(row.partition(": ")[0] if row in shared else row for row in rows)]))
        for head, rows in verbs
    )
    return "\n\n".join([begin, *sections])


def _verbs(name: str, command: Any, context: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the head of the section of each verb, and its options."""
    for verb in command.list_commands(context):
        below = command.get_command(context, verb)
        with below.make_context(verb, [], parent=context, resilient_parsing=True) as inner:
            yield _verb(f"{name} {verb}", below, inner)
            if hasattr(below, "list_commands"):
                yield from _verbs(f"{name} {verb}", below, inner)


def _verb(name: str, command: Any, context: Any) -> tuple[str, list[str]]:
    """Return the head of a verb's section and its options, without those that the page describes: recipe, overrides."""
    usage = " ".join([name, *command.collect_usage_pieces(context)[1:]])
    shown = [param for param in command.get_params(context) if param.name not in _DESCRIBED_ONCE]
    rows = [f"- `{left}`: {' '.join(text.split())}" for left, text in (one.get_help_record(context) for one in shown)]
    rows = [re.sub(r"; x[<>]=\d+|x[<>]=\d+; | \[x[<>]=\d+\]", "", row) for row in rows]
    return "\n\n".join(filter(None, [f"## `{name}`", f"`{re.sub('[{}]', '', usage)}`", command.help])), rows


def _state() -> str:
    """Return tables of the bytes that a rank holds and sends, for each model and strategy."""
    header = ("", "parameters", "gradients", "optimizer", "together", "sent by a rank in a step")
    return "\n\n".join(
        f"**{name}**, {costs.num_parameters(name):,} parameters, {_RANKS} ranks:\n\n"
        + _table(header, [_state_row(name, row) for row in STRATEGIES.values() if not row.single_process])
        for name in _SHOWN
    )


def _state_row(name: str, row: Strategy) -> tuple[str, ...]:
    held = costs.state(name, row.name, _RANKS)
    label = f"`{row.name}`" + (f", one group of {_RANKS}" if row.groups else "")
    sent = costs.sent_by_data_parallel(name, row.name, _RANKS)
    return (label, *map(_size, (held.parameters, held.gradients, held.optimizer, held.total, sent)))


def _model_cuts() -> str:
    """Return a table of a rank's parameters and communication with tensor parallelism or pipeline stages."""
    rows = []
    for name in _SHOWN:
        everything, hidden = costs.num_parameters(name), costs.hidden_bytes(name, _BATCH)
        for degree in (2, 4, 8):
            held = costs.state(name, "ddp", 1, degree).parameters // costs.FP32_BYTES
            sent = costs.sent_by_tensor_rank(name, _BATCH, degree)
            if costs.model_of(name).config.num_attention_heads % degree == 0:
                rows.append((name, f"`parallel.tensor` {degree}", _share(held, everything), _size(sent)))
        for stages in (2, 4):
            held = costs.largest_stage(name, stages)
            sent = hidden * (2 if stages > 2 else 1)  # only a middle stage sends in both directions
            rows.append((name, f"`parallel.pipeline.stages` {stages}", _share(held, everything), _size(sent)))
    header = ("model", "cut", "parameters of the rank that holds the most", "sent by a rank for one microbatch")
    return _table(header, rows)


def _share(held: int, everything: int) -> str:
    return f"{held / 1e6:.1f} M, {held / everything:.0%}"


def _activations() -> str:
    """Return a table of the bytes that the layers keep for the backward pass of one microbatch."""
    rows = []
    for name in _SHOWN:
        for length in (128, 512):
            batch = replace(_BATCH, length=length)
            alone, cut = costs.activations(name, batch), costs.activations(name, batch, tensor=4, sequence=True)
            if costs.model_of(name).config.num_attention_heads % 4 == 0:
                cells = (alone["none"], alone["scores again"], alone["full"], cut["none"])
                rows.append((name, f"{batch.rows} x {length}", *map(_size, cells)))
    kept = ("everything", "scores again", "full", "everything, tensor 4 with sequence")
    return _table(("model", "rows x tokens", *kept), rows)


def _size(number: float) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


_DESCRIBED_ONCE = ("recipe", "overrides", "help")
_RANKS = 8
_SHOWN = ("BERT-large",)
_BATCH = costs.Microbatch(rows=8, length=128)


def _floors() -> str:
    """Return a table of the floors of the import contract, with the first paragraph of each package docstring."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["name"] == "floors")
    rows = []
    for floor, layer in zip(reversed(range(len(layers))), layers, strict=True):
        for name in layer.split(" : "):
            rows.append((str(floor), *_package(name)))
            rows += [("", *_package(f"{name}.{part}")) for part in _sub_packages(name)]
    return _table(("floor", "package", "holds"), rows)


def _house() -> str:
    return _table(("number", "today", "aim"), [tuple(row) for row in _read(HOUSE)])


def _sub_packages(name: str) -> list[str]:
    folder = ROOT / "trainer" / name
    return sorted(init.parent.name for init in folder.glob("*/__init__.py"))


def _package(name: str) -> tuple[str, str]:
    """Return the place of a package or module, and the first paragraph of its docstring."""
    package = importlib.util.find_spec(f"trainer.{name}")
    assert package is not None
    assert package.origin is not None
    docstring = ast.get_docstring(ast.parse(Path(package.origin).read_text(encoding="utf-8"))) or ""
    place = name.replace(".", "/") + ("/" if package.submodule_search_locations else ".py")
    return f"`{place}`", " ".join(docstring.split("\n\n")[0].split())


def _faults() -> str:
    rows = _read(FAULTS)
    times = sum(row["times"] for row in rows)
    drawn = sum(row["times"] for row in rows if "campaign" in row)
    return (
        f"{len(rows)} kinds of faults were injected {times:,} times; `docs/faults.json` lists them with numbers. A"
        f" seeded campaign, `make chaos`, drew {drawn:,} of them: kills, failing calls and damaged files, in tiny"
        " trainings with each kind of state."
    )


BLOCKS: Mapping[str, Callable[[], str]] = {
    "activations": _activations,
    "checks": _checks,
    "coming_from_accelerate": lambda: _counterparts(ACCELERATE),
    "coming_from_axolotl": lambda: _counterparts(_own_rows("axolotl")),
    "coming_from_llama_factory": lambda: _counterparts(_own_rows("LLaMA-Factory")),
    "coming_from_sentence_transformers": lambda: _counterparts(_own_rows("SentenceTransformer")),
    "coming_from_setfit": lambda: _counterparts(_own_rows("SetFit")),
    "coming_from_trl": lambda: _counterparts(
        _own_rows("TRL's SFT", "TRL's DPO", "TRL's KTO", "TRL's reward modelling")
    ),
    "coming_from_deepspeed": lambda: _counterparts(DEEPSPEED),
    "coming_from_megatron": lambda: _counterparts(MEGATRON),
    "coming_from_training_arguments": lambda: _counterparts(TRAINING_ARGUMENTS),
    "command_line": _command_line,
    "exclusions": _exclusions,
    "expectations": _expectations,
    "compiled_layers": lambda: compiled_layers(_read(COMPILED_LAYERS)),
    "compiled_kernels": lambda: compiled_kernels(_read(COMPILED_KERNELS)["most"]),
    "families": _families,
    "faults": _faults,
    "floors": _floors,
    "gpu_budget": lambda: gpu_budget(_read(file) for file in sorted(GPUS.glob("*.json"))),
    "gpu_figures": lambda: gpu_figures(_read(file) for file in sorted(GPUS.glob("*.json"))),
    "gpus": lambda: ", ".join(f"`{name}`" for name in known_devices()),
    "house": _house,
    "keys": _keys,
    "metrics": _metrics,
    "model_cuts": _model_cuts,
    "sizes": sizes.table,
    "operations": lambda: operations(_read(OPERATIONS), _read(COMPILED_LAYERS)),
    "parity": parity,
    "parity_of_experts": parity_of_experts,
    "pipeline_families": _pipeline_families,
    "schedules": _schedules,
    "shipped": _shipped,
    "state": _state,
    "strategies": _strategies,
    "throughput": lambda: throughput(_read(THROUGHPUT)),
    "throughput_by_default": lambda: throughput_by_default(_read(THROUGHPUT)),
}


if __name__ == "__main__":
    for page in pages():
        page.write_text(with_blocks(page.read_text(encoding="utf-8")), encoding="utf-8")
