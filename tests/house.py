"""The size and the shape of the code, as numbers: `python -m tests.house`.

`--store` writes those that CONTRIBUTING shows. The trunk is `trainer/` without `tools/`, `features/`, `cli/`
and `api.py`. The aims are those of CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trainer"
STORED = ROOT / "docs" / "house.json"
ABOVE = ("tools", "features", "cli", "api.py", "__main__.py", "__init__.py")
_MOST_COMPLEX = 15
_KINDS = {"Task", "TextTask", "ImageTask", "TaskKeys", "TextKeys", "ImageKeys"}
_IMPORTS = """
import atexit, json, sys
from pathlib import Path
from trainer.__main__ import main
def count():
    loaded = [module for name, module in sys.modules.items() if name.split(".")[0] == "trainer"]
    files = {module.__file__ for module in loaded if getattr(module, "__file__", None)}
    Path(sys.argv.pop()).write_text(json.dumps([len(Path(f).read_text().splitlines()) for f in files]))
atexit.register(count)
sys.argv[1:1] = ["run", "bert_sample", "training.max_steps=1", "--processes", "1"]
out = sys.argv.pop()
sys.argv.append(f"checkpoint.folder={out}/run")
try:
    code = main()
finally:
    sys.argv.append(f"{out}/lines")
sys.exit(code)
"""


def sources(folder: Path = PACKAGE) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def trunk() -> list[Path]:
    return [path for path in sources() if path.relative_to(PACKAGE).parts[0] not in ABOVE]


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def imported_by_a_run() -> tuple[int, int]:
    """Return the lines and modules of `trainer` that `trainer run bert_sample` on one process imports."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-c", _IMPORTS, folder], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=300
        )
        counts = json.loads((Path(folder) / "lines").read_text())
    return sum(counts), len(counts)


def reaches_up() -> list[str]:
    """Return the places of the trunk that name a tool or a feature, its task or strategy, as an import or text."""
    files = (PACKAGE / "features").glob("*/extension.json")
    rows = [json.loads(file.read_text()) for file in files]
    words = [name for row in rows for kind in ("task", "strategy") for name in row.get(kind, ())]
    names = ("trainer.tools", "trainer.features", *(f'"{name}"' for name in words))
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in [*trunk(), *PACKAGE.glob("recipe/**/*.json")]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if any(name in line for name in names)
    ]


def _classes_of_tasks() -> set[str]:
    """Return the names of the classes of tasks and of their sections in a recipe, but those that all of a kind have."""
    files = [path for folder in ("tasks", "features", "recipe/schema") for path in sources(PACKAGE / folder)]
    classes = [node for path in files for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    found, known = set(_KINDS), 0
    while known < len(found):
        known = len(found)
        found |= {node.name for node in classes if found & {ast.unparse(base) for base in node.bases}}
    return found - _KINDS


def switches() -> list[str]:
    """Return the places outside of `tasks/` and `features/` that ask for the type of a task, in the schema too."""
    classes = _classes_of_tasks()
    files = [*(PACKAGE / "tasks").glob("*.py"), *(PACKAGE / "features").glob("*/*.py")]
    types = {path.stem for path in files if "Task(" in path.read_text()} - {"task"}
    rooms = [path for path in sources() if path.relative_to(PACKAGE).parts[0] not in ("tasks", "features")]
    named = re.compile("|".join([*classes, *types, "task.type"]))  # others need no parsing, which takes seconds
    texts = {path: text for path in rooms if named.search(text := path.read_text())}
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if classes & {*_asked(node)} or _compares(node, types)
    ]


def _asked(node: ast.AST) -> Iterator[str]:
    """Yield the classes that an `isinstance` or a `case` asks for."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
        yield from (name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name))
    elif isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name):
        yield node.cls.id


def _compares(node: ast.AST, types: set[str]) -> bool:
    """Return whether a comparison is one of `task.type`, or with the type of a task as text."""
    if not isinstance(node, ast.Compare):
        return False
    values = {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
    return ("task.type" in ast.unparse(node.left) and None not in values) or bool(types & values)


def complex_functions() -> int:
    """Return the number of functions with a cyclomatic complexity above the limit (McCabe 1976)."""
    trees = [ast.parse(path.read_text()) for path in sources()]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return sum(1 + sum(map(_branches, ast.walk(function))) > _MOST_COMPLEX for function in functions)


def _branches(node: ast.AST) -> int:
    match node:
        case ast.If() | ast.IfExp() | ast.For() | ast.While() | ast.ExceptHandler() | ast.Assert() | ast.match_case():
            return 1
        case ast.comprehension():
            return 1 + len(node.ifs)
        case ast.BoolOp():
            return len(node.values) - 1
    return 0


def comments() -> float:
    """Return the share of lines of the package that are comments of their own."""
    texts = [path.read_text().splitlines() for path in sources()]
    return sum(line.lstrip().startswith("#") for text in texts for line in text) / sum(map(len, texts))


def table() -> Iterator[tuple[str, str, str]]:
    """Yield the name, the number and the aim of each row."""
    of_run, modules = imported_by_a_run()
    features = [*(PACKAGE / "features").glob("*/extension.json")]
    yield "lines of the trunk", f"{lines(trunk()):,}", "40,000 or fewer"
    yield "lines that `run bert_sample` on one process imports", f"{of_run:,} in {modules} modules", "32,000 or fewer"
    yield "places of the trunk that name a tool or a feature", str(len(reaches_up())), "0"
    yield "features in folders of their own", str(len(features)), "each, and deletable"
    yield "switches on the type of a task outside of `tasks/`", str(len(switches())), "0"
    yield f"functions with a complexity above {_MOST_COMPLEX}", str(complex_functions()), "40 or fewer"
    yield "comments on lines of their own", f"{comments():.1%}", "2.5%"
    yield "lines of `trainer/`", f"{lines(sources()):,}", "64,000 or fewer"


if __name__ == "__main__":
    rows = list(table())
    print("| number | today | aim |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows), sep="\n")
    if "--store" in sys.argv[1:]:
        STORED.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
