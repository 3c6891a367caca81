"""What mkdocs does not do by itself: pages of features, and pages of files that other pages link to.

The page of a feature is `page.md` in its folder. The site shows it beside the pages of `docs/`.

In the repository a page links to `../launchers/train.py`, and a forge shows it. The site has only the pages of `docs/`
and of features, so each file that is linked to, and each that the navigation names under `repository/`, gets a page
there: Markdown as it is, a folder as a list of its files, anything else as a listing. Links in all pages are turned to
these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
DOCS, SHOWN = PurePosixPath("docs"), PurePosixPath("repository")
_LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".json": "json", ".yaml": "yaml"}
_FENCES = re.compile(r"^(?P<fence>```|~~~).*?^(?P=fence)[ ]*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?![a-z]+:|#)(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


@dataclass(frozen=True)
class _Places:
    """Where the site has a file of the repository."""

    of_features: dict[str, str]
    """The page of the site, by the path of a feature's page in the repository."""

    def in_repository(self, uri: str) -> str:
        """Return the path of the file that the page `uri` shows."""
        for path, place in self.of_features.items():
            if place == uri:
                return path
        page = PurePosixPath(uri)
        return str(page.relative_to(SHOWN) if page.is_relative_to(SHOWN) else DOCS / page)

    def on_site(self, path: str) -> str:
        """Return the page that shows the file `path` of the repository."""
        if path in self.of_features:
            return self.of_features[path]
        place = PurePosixPath(path)
        if place.is_relative_to(DOCS):
            return str(place.relative_to(DOCS))
        return str(SHOWN / (path if place.suffix == ".md" else f"{path}.md"))

    def target(self, uri: str, link: str) -> str:
        """Return the path in the repository of the target of a link in the page `uri`."""
        return normpath(str(PurePosixPath(self.in_repository(uri)).parent / link))


def _places(config: Any) -> _Places:
    addresses = config.extra["addresses"]
    pages = sorted(ROOT.glob("trainer/features/*/page.md"))
    names = {page.relative_to(ROOT).as_posix(): page.parent.name for page in pages}
    return _Places({path: f"{addresses.get(name, name)}.md" for path, name in names.items()})


def on_files(files: Files, config: Any, **_: object) -> Files:
    """Adds the pages of features, and of files that are linked to; those linked to from such pages included."""
    places = _places(config)
    for path, uri in places.of_features.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    open_ends = [
        target for page in files.documentation_pages() for target in _outside(places, page.src_uri, page.content_string)
    ]
    in_nav = {path.removeprefix(f"{SHOWN}/") for path in _leaves(config.nav) if path.startswith(f"{SHOWN}/")}
    open_ends += in_nav
    while open_ends:
        path = open_ends.pop()
        uri = places.on_site(path)
        if (ROOT / path).exists() and files.get_file_from_path(uri) is None:
            text = _page_of(path)
            inclusion = InclusionLevel.INCLUDED if path in in_nav else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, uri, content=text, inclusion=inclusion))
            open_ends += _outside(places, uri, text)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: object) -> str:
    """Turns links to the repository's files into links to their pages."""
    here, places = page.file.src_uri, _places(config)

    def turned(link: re.Match[str]) -> str:
        place = places.on_site(places.target(here, link["target"]))
        return f"]({relpath(place, str(PurePosixPath(here).parent))}{link['anchor'] or ''})"

    return "".join(text if is_code else _LINK.sub(turned, text) for text, is_code in _pieces(markdown))


def _outside(places: _Places, uri: str, markdown: str) -> list[str]:
    """The files outside of `docs/` that a page links to, relative to the repository."""
    links = (link for text, is_code in _pieces(markdown) if not is_code for link in _LINK.finditer(text))
    paths = (places.target(uri, link["target"]) for link in links)
    return [path for path in paths if not PurePosixPath(path).is_relative_to(DOCS)]


def _pieces(markdown: str) -> Iterator[tuple[str, bool]]:
    """The text in order, and of each piece whether it is a fenced block, in which nothing is a link."""
    end = 0
    for block in _FENCES.finditer(markdown):
        yield markdown[end : block.start()], False
        yield block[0], True
        end = block.end()
    yield markdown[end:], False


def _page_of(path: str) -> str:
    file = ROOT / path
    if file.suffix == ".md":
        return file.read_text(encoding="utf-8")
    if file.is_dir():
        names = sorted(entry.name for entry in file.iterdir() if entry.is_file() and not entry.name.startswith("."))
        return f"# {path}\n\n" + "\n".join(f"- [{name}]({file.name}/{name})" for name in names)
    return f"# {path}\n\n```{_LANGUAGES.get(file.suffix, 'text')}\n{file.read_text(encoding='utf-8')}```\n"


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav or ():
            yield from _leaves(item)
