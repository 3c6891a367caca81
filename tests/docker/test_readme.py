"""What `docker/README.md` tells to type: no engine is at hand to run it, so each word is held to the files."""

from __future__ import annotations

import re
import shlex

from tests.docker.isolation import DOCKER
from tests.helpers.processes import ROOT
from trainer.cli import main

README = (DOCKER / "README.md").read_text(encoding="utf-8")
DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def test_build_arguments_equal_the_dockerfile():
    declared = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    table = "\n".join(line for line in README.splitlines() if line.startswith("| `"))
    told = {name for row in table.splitlines() for name in re.findall(r"`([A-Z_]+)`", row.split("|")[1])}
    assert told == declared
    given = [words[index + 1] for words in commands() for index, word in enumerate(words) if word == "--build-arg"]
    assert {pair.partition("=")[0] for pair in given} <= declared


def test_the_files_and_images_that_commands_name_are_there():
    builds = [words for words in commands() if words[:2] == ["docker", "build"]]
    tags = {words[words.index("--tag") + 1] for words in builds}
    assert tags == {"trainer:cpu", "trainer:cuda"}
    for words in builds:
        assert (ROOT / words[words.index("--file") + 1]).exists()
    for words in commands():
        if words[:2] == ["docker", "run"]:
            assert sum(word in tags for word in words) == 1, words
        if words[0].startswith("docker/"):
            assert (ROOT / words[0]).exists()


def test_the_recipes_that_are_run_are_checked_without_complaint():
    """Those of the user's own folder are the business of the tests of the README."""
    runs = [words[words.index("run", 2) :] for words in commands() if words[:2] == ["docker", "run"]]
    shipped = [words[1:] for words in runs if not words[1].endswith(".json")]
    assert shipped != []
    for words in shipped:
        assert main(["check", "--quick", *words]) == 0


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)\s]+)\)", README):
        name, _, anchor = target.partition("#")
        page = (DOCKER / name) if name else DOCKER / "README.md"
        assert page.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, target
