"""What mkdocs does not do by itself: pages link to files of the repository, which the site must then show.

In the repository a page links to `../launchers/train.py`, and a forge shows it. The site has only what lies in `docs/`,
so each file that is linked to, and each that the navigation names under `repository/`, gets a page there: Markdown as
it is, a folder as a list of its files, anything else as a listing. Links in all pages are turned to these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
DOCS, SHOWN = PurePosixPath("docs"), PurePosixPath("repository")
_LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".json": "json", ".yaml": "yaml"}
_FENCES = re.compile(r"^(?P<fence>```|~~~).*?^(?P=fence)[ ]*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?![a-z]+:|#)(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: Any, **_: object) -> Files:
    """Adds the pages of files outside of `docs/`, those that are linked to from such pages included."""
    open_ends = [
        target for page in files.documentation_pages() for target in _outside(page.src_uri, page.content_string)
    ]
    in_nav = {path.removeprefix(f"{SHOWN}/") for path in _leaves(config.nav) if path.startswith(f"{SHOWN}/")}
    open_ends += in_nav
    while open_ends:
        path = open_ends.pop()
        uri = _place(path)
        if (ROOT / path).exists() and files.get_file_from_path(uri) is None:
            text = _page_of(path)
            inclusion = InclusionLevel.INCLUDED if path in in_nav else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, uri, content=text, inclusion=inclusion))
            open_ends += _outside(uri, text)
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Turns links to the repository's files into links to their pages."""
    here = page.file.src_uri

    def turned(link: re.Match[str]) -> str:
        place = _place(_repository_path(here, link["target"]))
        return f"]({relpath(place, str(PurePosixPath(here).parent))}{link['anchor'] or ''})"

    return "".join(text if is_code else _LINK.sub(turned, text) for text, is_code in _pieces(markdown))


def _outside(uri: str, markdown: str) -> list[str]:
    """The files outside of `docs/` that a page links to, relative to the repository."""
    links = (link for text, is_code in _pieces(markdown) if not is_code for link in _LINK.finditer(text))
    paths = (_repository_path(uri, link["target"]) for link in links)
    return [path for path in paths if not PurePosixPath(path).is_relative_to(DOCS)]


def _pieces(markdown: str) -> Iterator[tuple[str, bool]]:
    """The text in order, and of each piece whether it is a fenced block, in which nothing is a link."""
    end = 0
    for block in _FENCES.finditer(markdown):
        yield markdown[end : block.start()], False
        yield block[0], True
        end = block.end()
    yield markdown[end:], False


def _repository_path(uri: str, target: str) -> str:
    """What a link in the page `uri` leads to, relative to the repository."""
    page = PurePosixPath(uri)
    place = page.relative_to(SHOWN) if page.is_relative_to(SHOWN) else DOCS / page
    return normpath(str(place.parent / target))


def _place(path: str) -> str:
    """Where the site has what lies at `path` in the repository."""
    place = PurePosixPath(path)
    if place.is_relative_to(DOCS):
        return str(place.relative_to(DOCS))
    return str(SHOWN / (path if place.suffix == ".md" else f"{path}.md"))


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
