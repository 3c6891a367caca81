"""The documentation as a site, and what its pages quote of the source."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from math import prod
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml
from torch import nn

from docs import costs
from docs.generate import pages
from docs.site import Site, SiteError, add_version, build
from tests.helpers.families import CONFIGS
from tests.helpers.families import build as build_model
from tests.helpers.processes import ROOT, run
from tests.helpers.ranks import RankPools
from tests.helpers.turns import once
from tests.models.test_tensor_split import compare
from trainer.models.describe import ModelUse, describe
from trainer.models.families.family import ModelFamily
from trainer.models.families.table import FAMILIES, layers_of
from trainer.models.stage_split import split_stages
from trainer.models.tensor_split import split_model
from trainer.parallel.dropout import DropoutKeys
from trainer.parallel.row_groups import RowGroups
from trainer.recipe.schema import Model, Training

DOCS = ROOT / "docs"
PAGES = [page for page in pages() if page.parent != ROOT]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
ADDRESSES = CONFIG["extra"]["addresses"]
HOLE = "\0"  # in a message of the source, where a value goes


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make() -> Path:
        folder = tmp_path_factory.mktemp("site")
        build(folder / "site")
        return folder / "site"

    return once("site", make)


def article(site: Path, page: Path) -> str:
    html = (site / address(page) / "index.html").read_text(encoding="utf-8")
    return html[html.index("<article") : html.index("</article>")]


def address(page: Path) -> str:
    if page.parent != DOCS:
        return ADDRESSES.get(page.parent.name, page.parent.name)
    return "" if page.stem == "index" else page.stem


def without_code(markdown: str) -> str:
    return re.sub(r"^```.*?^```$", "", markdown, flags=re.DOTALL | re.MULTILINE)


def test_the_site_builds_and_needs_no_other_server(site: Path):
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(?:https?:)?//")
    for page in site.rglob("*.html"):
        assert not loaded.search(page.read_text(encoding="utf-8")), page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\"?(?:https?:)?//", style.read_text(encoding="utf-8")), style


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_site_renders_tables_and_lists(page: Path, site: Path):
    text, html = without_code(page.read_text(encoding="utf-8")), article(site, page)
    assert html.count("<table>") == len(re.findall(r"^\|(?: ?:?-+:? ?\|)+$", text, re.MULTILINE))
    assert html.count("<li>") >= len(re.findall(r"^(?:-|\d+\.) ", text, re.MULTILINE))


def test_the_search_finds_a_message(site: Path):
    assert "could not join the others at" in (site / "search.json").read_text(encoding="utf-8")


def test_a_file_of_the_repository_has_its_page(site: Path):
    shown = (site / "repository" / "launchers" / "slurm.sbatch" / "index.html").read_text(encoding="utf-8")
    assert "scontrol" in shown
    assert 'href="../repository/launchers/slurm.sbatch/"' in article(site, DOCS / "launching.md")
    assert 'href="../../pipeline/"' in (site / "repository" / "CONTRIBUTING" / "index.html").read_text(encoding="utf-8")


def test_the_page_of_a_feature_is_beside_those_of_docs(site: Path):
    features = ROOT / "trainer" / "features"
    assert 'href="../pipeline/"' in article(site, features / "vision" / "page.md")
    assert 'href="../vision/"' in article(site, DOCS / "predict.md")
    assert 'href="../embeddings/"' in article(site, features / "rerankers" / "page.md")
    assert 'href="../tokens/"' in (site / "repository" / "index.html").read_text(encoding="utf-8")
    assert ADDRESSES.keys() <= {page.parent.name for page in PAGES}
    assert not list(site.glob("repository/trainer/features/*/page"))


def copied(root: Path, *left_out: str) -> Path:
    """Copy the pages, with links to all other files of the repository."""
    for name in ("docs", "trainer"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", *left_out))
    for path in ROOT.iterdir():
        if path.name not in ("docs", "trainer", ".git", "runs", "site"):
            (root / path.name).symlink_to(path)
    return root


def test_a_deleted_page_of_a_feature_is_named(tmp_path: Path):
    with pytest.raises(SiteError) as error:
        build(tmp_path / "site", copied(tmp_path, "vision"))
    assert "names `vision.md`, which does not exist" in str(error.value)
    assert "`docs/predict.md` links to `../trainer/features/vision/page.md`" in str(error.value)


def test_links_that_lead_nowhere_fail(tmp_path: Path):
    page = copied(tmp_path) / "docs" / "index.md"
    page.write_text(f"{page.read_text('utf-8')}\n[a](nowhere.md) [b](recipe.md#no-anchor) [c](../nofile.py) [d](/d)\n")
    (tmp_path / "docs" / "forgotten.md").touch()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("the last site")
    with pytest.raises(SiteError) as error:
        build(tmp_path / "site", tmp_path)
    expected = ("`nowhere.md`", "anchor does not exist", "`../nofile.py`", "`/d`", "lacks `forgotten.md`")
    assert [one for one in expected if one not in str(error.value)] == []
    assert (tmp_path / "site" / "index.html").read_text() == "the last site"


def test_language_models_find_each_page_as_markdown(site: Path):
    listed = re.findall(r"^- \[.+?\]\((.+?)\): (.+)$", (site / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert {place for place, _ in listed} == {*Site(ROOT, CONFIG).in_nav}
    assert all(sentence.endswith((".", ":")) and "](" not in sentence for _, sentence in listed)
    for place, _ in listed:
        text = without_code((site / place).read_text(encoding="utf-8"))
        for link in re.findall(r"\]\((?![a-z]+:|#)([^)\s#]+)", text):
            assert (site / place).parent.joinpath(link).is_file(), (place, link)


def test_versions_lie_side_by_side(site: Path, tmp_path: Path):
    small = tmp_path / "small"
    small.mkdir()
    for version in ("0.9", "0.10", "0.2", "0.9"):
        (small / "index.html").write_text(f"{version}, of {site.name}")
        add_version(small, tmp_path, version)
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert [(one["version"], one["aliases"]) for one in versions] == [("0.10", ["latest"]), ("0.9", []), ("0.2", [])]
    shown = {one: (tmp_path / one / "index.html").read_text() for one in ("0.2", "0.9", "0.10", "latest")}
    assert shown == {"0.2": "0.2, of site", "0.9": "0.9, of site", "0.10": "0.10, of site", "latest": "0.10, of site"}
    # The theme looks for the list beside the folder of its version, if its configuration names this form.
    scope = re.search(r'<script id="__config"[^>]*>(.*?)</script>', (site / "tutorial" / "index.html").read_text())
    assert scope
    assert json.loads(scope[1])["version"] == {"provider": "mike"}


@pytest.mark.slow
def test_each_release_adds_its_documentation_to_the_branch(tmp_path: Path):
    if not (ROOT / ".git").exists():
        pytest.skip("no repository")
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    for command in (
        ["init", "--bare", origin],
        ["clone", ROOT, clone],
        ["-C", clone, "remote", "set-url", "origin", origin],
    ):
        assert run(["git", *command], 60).returncode == 0
    for version in ("0.1", "0.2"):
        added = run([clone / ".ci" / "publish_docs", version, "https://x.org/t"], 120, PYTHON=sys.executable)
        assert added.returncode == 0, added.stderr
    listed = run(["git", "-C", origin, "ls-tree", "--name-only", "gh-pages"], 60).stdout.split()
    assert listed == [".nojekyll", "0.1", "0.2", "index.html", "latest", "versions.json"]
    sitemap = run(["git", "-C", origin, "show", "gh-pages:latest/sitemap.xml"], 60).stdout
    assert "<loc>https://x.org/t/0.2/tutorial/</loc>" in sitemap
    assert run(["git", "-C", origin, "rev-list", "--count", "gh-pages"], 60).stdout.strip() == "2"
    assert run([Path(sys.executable).parent / "shellcheck", ROOT / ".ci" / "publish_docs"]).returncode == 0


# Messages


def quoted() -> list[str]:
    """The messages of ours in the page on troubleshooting; `...` is what differs from run to run."""
    text, _, _ = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").partition("## Messages of others")
    return re.findall(r"^> `(.+)`$", text, re.MULTILINE)


@cache
def texts_of_source() -> dict[Path, list[str]]:
    """The texts in each file of the package, with a `HOLE` for each value, and once more for each key that is named."""
    return once("texts of the source", read_source)


def read_source() -> dict[Path, list[str]]:
    found = {}
    for path in sorted((ROOT / "trainer").rglob("*.py")):
        texts = {text_of(node) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if is_text(node)}
        found[path] = [*texts, *{re.sub(r"`[\w.]+`", HOLE, text) for text in texts}]
    return found


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else HOLE


def files_with(message: str) -> Iterator[Path]:
    parts = [re.escape(part) for part in re.split(r"\s*\.\.\.\s*", message) if part]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    for path, texts in texts_of_source().items():
        if any(pattern.search(text) for text in texts):
            yield path


@pytest.mark.parametrize("message", quoted())
def test_a_message_of_the_page_is_one_of_the_source(message: str):
    assert len(re.sub(r"[.\W]", "", message)) > 10, "anything would match"
    assert list(files_with(message))


def test_every_room_that_refuses_something_has_a_message_on_the_page():
    def room(path: Path) -> str:
        return path.relative_to(ROOT / "trainer").parts[0]

    raised = re.compile(r"raise (?:Usage|Data|Launch|Recipe|Trainer|Rank|NonFinite|LostPeer)Error\(")
    refusing = {room(path) for path in texts_of_source() if raised.search(path.read_text(encoding="utf-8"))}
    told = {room(path) for message in quoted() for path in files_with(message)}
    assert refusing - told == set(), "give `docs/troubleshooting.md` the message that users of it meet first"


# The figures of the page on choosing


def elements_of_a_tensor_rank() -> int:
    """On this rank: what it holds of a BERT, as the trainer cuts it."""
    placements = split_model(build_family("bert"), RowGroups(dist.group.WORLD))
    sizes = dict.fromkeys(("tp", "cp_tp"), dist.get_world_size())
    return sum(placement.num_elements(sizes) for placement in placements.values())


def build_family(model_type: str) -> nn.Module:
    return build_model(model_type, "AutoModelForSequenceClassification", 0.0, DropoutKeys(0))


def test_the_page_counts_the_weights_of_a_tensor_rank(ranks: RankPools):
    placements = costs.tensor_cuts(build_family("bert"), 2)
    counted = sum(placement.num_elements({"tp": 2}) for placement in placements.values())
    assert counted < sum(prod(placement.shape) for placement in placements.values()) * 0.6
    assert ranks(2).run(elements_of_a_tensor_rank)[0] == counted


def test_activations_equal_the_paper():
    """Korthikanti et al. 2022 (arXiv:2205.05198), equation 2, by hand: 12 layers, hidden 768, 12 heads."""
    batch = costs.Microbatch(rows=8, length=128)
    by_hand = 12 * 128 * 8 * 768 * (34 + 5 * 12 * 128 / 768)
    assert costs.activations("BERT-base", batch)["none"] == by_hand
    cut = costs.activations("BERT-base", batch, tensor=4, sequence=True)["none"]
    assert cut == by_hand / 4, "equation 4 cuts all of it"


def test_bert_has_the_parameters_that_everybody_counts():
    assert costs.num_parameters("BERT-base") == 109_482_240 + 2 * 769  # and its head
    assert costs.num_parameters("BERT-large") == 335_141_888 + 2 * 1025


# The family that the page on extending adds


def family_of_the_page() -> tuple[str, ModelFamily]:
    page = (DOCS / "extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (source,) = (block for block in blocks if "ModelFamily(" in block)
    names: dict[str, object] = {}
    exec(compile(source, "docs/extending.md", "exec"), names)
    (family,) = (value for value in names.values() if isinstance(value, ModelFamily))
    return family.model_type, family


def compare_with_whole(head: str) -> None:
    """On this rank: the family of the page over tensor ranks, outputs and gradients."""
    model_type, family = family_of_the_page()
    FAMILIES[model_type], CONFIGS[model_type] = family, CONFIGS["bert"]
    try:
        compare(model_type, head, dropout=0.0, sequence=True)
    finally:
        del FAMILIES[model_type], CONFIGS[model_type]


@pytest.mark.parametrize("head", ["AutoModelForSequenceClassification", "AutoModelForMaskedLM"])
def test_the_family_of_the_page_is_cut_over_ranks(ranks: RankPools, head: str):
    ranks(2).run(compare_with_whole, head)


def test_the_family_of_the_page_is_cut_into_stages(monkeypatch: pytest.MonkeyPatch):
    model_type, family = family_of_the_page()
    assert model_type not in FAMILIES, "the page adds a family that is there"
    monkeypatch.setitem(FAMILIES, model_type, family)
    recipe = Model.model_validate({"config": {"model_type": model_type, **CONFIGS["bert"]}, "tokenizer": "none"})
    model = describe(recipe, Training(), ModelUse("AutoModelForSequenceClassification", {"num_labels": 2})).on_meta()
    assert list(layers_of(model)) == ["encoder.layer.0", "encoder.layer.1"]
    assert split_stages(model, 2, None).num_stages == 2
