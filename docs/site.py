"""Build the documentation as a site with Zensical: `python -m docs.site`, as `make docs` does, writes `site/`.

With `--version 0.2 --into FOLDER`, the site becomes a version of those in the folder, which a web server shows. The
folder is laid out as `mike` does it, so the theme lets readers choose a version: `versions.json` lists them, and
`latest/` is the newest.

The page of a feature is `page.md` in its folder. The site shows it beside the pages of `docs/`.

In the repository a page links to `../launchers/train.py`, and a forge shows it. The site has only the pages of `docs/`
and of features, so each file that is linked to, and each that the navigation names under `repository/`, gets a page
there: Markdown as it is, a folder as a list of its files, anything else as a listing. Links in all pages are turned to
these. For language models, `llms.txt` lists the pages, and each lies beside its HTML as Markdown (https://llmstxt.org).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "mkdocs.yml"
_DOCS, _SHOWN = PurePosixPath("docs"), PurePosixPath("repository")
_LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".json": "json", ".yaml": "yaml"}
_TO_LATEST = '<!doctype html><meta http-equiv="refresh" content="0; url=latest/"><a href="latest/">latest</a>\n'
_FENCES = re.compile(r"^(?P<fence>```|~~~).*?^(?P=fence)[ ]*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?![a-z]+:|#)(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


class SiteError(Exception):
    """Links, anchors or lines of the navigation lead nowhere, or a page is not in the navigation."""


@dataclass(frozen=True)
class Site:
    """The pages of the site: `sources` has the path in the repository of each page, by its path on the site."""

    root: Path
    config: dict[str, Any]

    @cached_property
    def in_nav(self) -> list[str]:
        """The pages that the navigation names."""
        return [*_leaves(self.config["nav"])]

    @cached_property
    def of_features(self) -> dict[str, str]:
        """The page on the site of each page of a feature, by its path in the repository."""
        addresses = self.config["extra"]["addresses"]
        pages = [page.relative_to(self.root) for page in sorted(self.root.glob("trainer/features/*/page.md"))]
        return {page.as_posix(): f"{addresses.get(page.parent.name, page.parent.name)}.md" for page in pages}

    @cached_property
    def sources(self) -> dict[str, str]:
        """The path in the repository of each page and picture of the site, by its path on the site."""
        in_docs = [path.relative_to(self.root).as_posix() for path in sorted((self.root / _DOCS).rglob("*"))]
        own = [path for path in in_docs if (self.root / path).is_file() and not path.endswith((".py", ".pyc", ".json"))]
        shown = [path.removeprefix(f"{_SHOWN}/") for path in self.in_nav if path.startswith(f"{_SHOWN}/")]
        waiting, found = [*own, *self.of_features, *shown], dict[str, str]()
        while waiting:
            path = waiting.pop()
            place = self.place(path)
            if place in found or not (self.root / path).exists():
                continue
            found[place] = path
            if place.endswith(".md"):
                waiting += [normpath(PurePosixPath(path).parent / link["target"]) for link in _links(self.text(path))]
        return found

    def place(self, path: str) -> str:
        """Return the page that shows the file `path` of the repository."""
        if path in self.of_features:
            return self.of_features[path]
        if PurePosixPath(path).is_relative_to(_DOCS):
            return str(PurePosixPath(path).relative_to(_DOCS))
        shown = path.removeprefix(".")  # Zensical reads no hidden folder
        return str(_SHOWN / (shown if path.endswith(".md") else f"{shown}.md"))

    def text(self, path: str) -> str:
        """Return the Markdown of the page that shows a file or a folder of the repository."""
        file = self.root / path
        if file.is_dir():
            names = sorted(entry.name for entry in file.iterdir() if entry.is_file() and not entry.name.startswith("."))
            return f"# {path}\n\n" + "\n".join(f"- [{name}]({file.name}/{name})" for name in names)
        text = file.read_text(encoding="utf-8")
        return text if file.suffix == ".md" else f"# {path}\n\n```{_LANGUAGES.get(file.suffix, 'text')}\n{text}```\n"

    def turned(self, place: str) -> str:
        """Return the Markdown of a page; its links lead to pages of the site."""
        path = PurePosixPath(self.sources[place])

        def turn(link: re.Match[str]) -> str:
            target = self.place(normpath(path.parent / link["target"]))
            return f"]({relpath(target, str(PurePosixPath(place).parent))}{link['anchor'] or ''})"

        return "".join(text if is_code else _LINK.sub(turn, text) for text, is_code in _pieces(self.text(str(path))))

    def problems(self) -> Iterator[str]:
        """Find the links and lines that Zensical passes over: its strict mode reads links to pages, and anchors."""
        for place, path in self.sources.items():
            for link in _links(self.text(path)) if place.endswith(".md") else ():
                if not (self.root / normpath(PurePosixPath(path).parent / link["target"])).exists():
                    yield f"`{path}` links to `{link['target']}`, which does not exist."
        for place in self.in_nav:
            if place not in self.sources:
                yield f"The navigation of `{CONFIG}` names `{place}`, which does not exist."
        for place, path in self.sources.items():
            if place.endswith(".md") and not place.startswith(f"{_SHOWN}/") and place not in self.in_nav:
                yield f"The navigation of `{CONFIG}` lacks `{place}`, the page of `{path}`."

    def index(self) -> str:
        """Return `llms.txt`: the sections of the navigation, and the first sentence of each page."""
        lines = [f"# {self.config['site_name']}", f"> {self.config['site_description']}"]
        for section in self.config["nav"]:
            for title, entries in section.items():
                lines.append(f"## {title}")
                lines.append("\n".join(self._entry(*entry) for page in entries for entry in page.items()))
        return "\n\n".join(lines) + "\n"

    def _entry(self, title: str, place: str) -> str:
        paragraphs = re.split(r"\n{2,}", self.text(self.sources[place]))
        first = next((one for one in paragraphs if re.match(r"\w|`[^`]|\*\*", one)), "")
        sentence = re.split(r"(?<=[a-z`)]\.) (?=[A-Z`])", " ".join(first.split()))[0]
        sentence = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", sentence)
        return f"- [{title}]({place}): {sentence}"

    def write(self, folder: Path) -> None:
        """Write the pages and pictures."""
        for place, path in self.sources.items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            if place.endswith(".md"):
                (folder / place).write_text(self.turned(place), encoding="utf-8")
            else:
                shutil.copyfile(self.root / path, folder / place)


def build(target: Path, root: Path = ROOT, url: str | None = None) -> None:
    """Build the site of a repository; a folder `target` that exists is replaced.

    Args:
        url: the address at which it will be, for the map of the site.

    Raises:
        SiteError: a link or an anchor leads nowhere, or the navigation and the pages differ.
    """
    text = (root / CONFIG).read_text(encoding="utf-8")
    site = Site(root, yaml.safe_load(text))
    problems = [*site.problems()]
    with TemporaryDirectory() as name:
        folder = Path(name)
        site.write(folder / site.config["docs_dir"])
        (folder / CONFIG).write_text(text + (f"site_url: {json.dumps(url)}\n" if url else ""), encoding="utf-8")
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", CONFIG]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            problems.append(re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr.partition("Traceback")[0]))
        if problems:
            raise SiteError("\n".join(problems))
        built = folder / site.config["site_dir"]
        (built / "llms.txt").write_text(site.index(), encoding="utf-8")
        for place in site.sources:
            if not place.endswith(".md"):
                continue
            (built / place).write_text(site.turned(place), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(built, target)


def add_version(site: Path, folder: Path, version: str) -> None:
    """Add a site to the versions in a folder, or replace it there; the newest version is also `latest/`."""
    listed = folder / "versions.json"
    versions = {one["version"] for one in json.loads(listed.read_text("utf-8"))} if listed.exists() else set()
    newest_first = sorted(versions | {version}, key=Version, reverse=True)
    for name in (version, "latest") if version == newest_first[0] else (version,):
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(site, folder / name)
    entries = [
        {"version": one, "title": one, "aliases": ["latest"] if one == newest_first[0] else []} for one in newest_first
    ]
    listed.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    (folder / "index.html").write_text(_TO_LATEST, encoding="utf-8")
    (folder / ".nojekyll").touch()  # GitHub Pages shows the files as they are


def _links(markdown: str) -> Iterator[re.Match[str]]:
    for text, is_code in _pieces(markdown):
        if not is_code:
            yield from _LINK.finditer(text)


def _pieces(markdown: str) -> Iterator[tuple[str, bool]]:
    """The text in order, and of each piece whether it is a fenced block, in which nothing is a link."""
    end = 0
    for block in _FENCES.finditer(markdown):
        yield markdown[end : block.start()], False
        yield block[0], True
        end = block.end()
    yield markdown[end:], False


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from _leaves(item)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="the address of the site")
    parser.add_argument("--version", help="the version that this site describes, with --into", type=_version)
    parser.add_argument("--into", metavar="FOLDER", help="the folder of all versions", type=Path)
    arguments = parser.parse_args()
    if (arguments.version is None) != (arguments.into is None):
        parser.error("give both `--version` and `--into`, or none")
    try:
        build(ROOT / "site", url=arguments.url)
    except SiteError as error:
        sys.exit(f"The site was not built:\n{error}")
    if arguments.into:
        arguments.into.mkdir(parents=True, exist_ok=True)
        add_version(ROOT / "site", arguments.into, arguments.version)


def _version(text: str) -> str:
    try:
        return str(Version(text))
    except InvalidVersion:
        raise argparse.ArgumentTypeError(f"`{text}` is no version; write one such as `0.2`") from None


if __name__ == "__main__":
    main()
