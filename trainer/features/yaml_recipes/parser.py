"""Parser of recipes in YAML, to the tree of JSON.

Plain scalars follow the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema): `no` and dates are
text, and 1e-5 is a number. The loaders of PyYAML follow YAML 1.1; only its parser is used here, which makes no objects.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from trainer.base.errors import RecipeError
from trainer.recipe.paths import KeyPath, shortened, shown_key
from trainer.recipe.reading.files import Scalar
from trainer.recipe.reading.parser import (
    MAX_DEPTH,
    MAX_NUMBER_LENGTH,
    TOO_DEEP,
    Node,
    Origin,
    Problem,
    Reading,
    not_finite,
)

MAX_NODES = 100_000
"""Values of a document. Aliases repeat the value of their anchor, so that a small file could fill the memory."""

_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_OCTAL_OR_HEX = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def core_scalar(node: yaml.ScalarNode) -> bool | int | float | str | None:
    """Return the value of a scalar by the core schema of YAML 1.2.

    Raises:
        ValueError: the scalar has a leading zero, is too long for a number, or is not finite.
    """
    text: str = node.value
    if node.style is not None:  # quoted, or a block of text
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _LEADING_ZERO.fullmatch(text):
        number = text.lstrip("+-0") or "0"
        raise ValueError(f'must not begin with 0, as octal numbers do, but is {text}; write {number} or "{text}"')
    is_number = _INTEGER.fullmatch(text) or _OCTAL_OR_HEX.fullmatch(text) or _FLOAT.fullmatch(text)
    if is_number and len(text) > MAX_NUMBER_LENGTH:
        raise ValueError(f"must be a number of at most {MAX_NUMBER_LENGTH} characters, but is {shortened(text)}")
    if _OCTAL_OR_HEX.fullmatch(text):
        return int(text, 0)
    if _INTEGER.fullmatch(text):
        return int(text)
    if is_number and math.isfinite(float(text)):
        return float(text)
    if is_number or _NOT_FINITE.fullmatch(text):
        raise ValueError(not_finite(text))
    return text


def parse_yaml(text: str, origin: Origin, scalar: Scalar | None = None) -> tuple[Node, list[Problem]]:
    """Return the tree of one document, and its duplicate keys and invalid values; see `parse` for JSON.

    Args:
        scalar: returns the value of a scalar, or raises `ValueError` with its problem; None: `core_scalar`.

    Raises:
        RecipeError: the text is not one YAML document, is nested too deeply, has tags, or has too many values.
    """
    tree = _Tree(origin, scalar or core_scalar)
    try:
        # Nodes only: no value is constructed, so no tag can run code.
        root = yaml.compose(text, Loader=_Composer)
        if root is None:
            raise RecipeError(f"{tree.at(1, 1)}: empty")
        return tree.node(root, ()), tree.problems
    except yaml.reader.ReaderError as error:
        # PyYAML gives such an error a position in the text, but neither line nor column.
        before = text[: error.position]
        place = tree.at(before.count("\n") + 1, len(before) - before.rfind("\n"))
        raise RecipeError(f"{place}: the character U+{error.character:04X} is not allowed in YAML") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = tree.place(mark) if mark else origin
        raise RecipeError(f"{place}: {_in_words(f'{error.context}: {error.problem}')}") from error


_PROBLEMS = {
    "while (scanning|parsing) a tag|undefined tag handle": "a text cannot begin with !; put it in quotes",
    "while scanning a (directive|%TAG)|duplicate YAML directive|expected URI": "a line cannot begin with %; remove it",
    "mapping (values|keys) are not allowed here": (
        "a colon with a blank after it makes a key, and none can stand here; put the text in quotes, or begin a line"
    ),
    "could not find expected ':'": (
        "a key needs a colon with a blank after it, as in `name: value`; add it, or close the quotes or brackets above"
    ),
    r"found character '\\t' that cannot": "a tab cannot indent a line; use blanks",
    "found character '(?P<found>.+)' that cannot": "a text cannot begin with {found}; put it in quotes",
    "found unexpected (end of stream|document separator)": "a text in quotes has no end; close its quotes",
    "expected ',' or '(?P<found>.)', but got": (
        "a comma or `{found}` is missing here; add it, or put a text with a bracket or brace in quotes"
    ),
    "expected <block end>, but found '(-|<block sequence start>)'": (
        "the items of a list must be indented alike, below their key; correct the blanks at the start of the line"
    ),
    "expected <block end>, but found": (
        "the keys of a section must be indented alike, and a value ends before this; correct the blanks at the start"
        " of the line, or put the whole value in quotes"
    ),
    "sequence entries are not allowed here": "an item of a list cannot stand here; begin a line with it",
    "expected the node content, but found": "a value is missing here; write it, or null, or put a text in quotes",
    "expected (chomping or|indentation indicator|a comment or a line break)": (
        "a text that begins with | or > begins on the next line; write it there, or put it in quotes"
    ),
    "invalid indentation or unclosed": "a bracket or brace has no end; close it",
    "found undefined alias '(?P<found>.+)'": "`*{found}` names no anchor; put a text that begins with * in quotes",
    "found duplicate anchor '(?P<found>[^']+)'": "the anchor `&{found}` is there twice; rename one",
    "found unknown escape character '(?P<found>.+)'": (
        r"a text in double quotes cannot hold \{found}; use single quotes"
    ),
    "expected escape sequence": "a text in double quotes has half an escape sequence; use single quotes",
    "expected (a single document in the stream|'<document start>')|found incompatible YAML document": (
        "the file must hold one document of YAML; remove other text, and lines with `---` or `%`"
    ),
    "expected alphabetic or numeric character": "a name is missing; put a text that begins with * or & in quotes",
}
"""Problems of PyYAML as regular expressions, in our words, with the fix."""


def _in_words(problem: str) -> str:
    """Return a problem of PyYAML, with its context before it, in our words; one of this module stays."""
    for form, words in _PROBLEMS.items():
        if match := re.search(form, problem):
            return words.format(**match.groupdict())
    return problem.removeprefix("None: ")


class _Composer(yaml.BaseLoader):  # type: ignore[misc]
    """The composer of PyYAML without tags, and with a limit of the depth, because it recurses."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        event = self.peek_event()
        if getattr(event, "tag", None) is not None:
            problem = f"the tag {shown_key(event.tag)} is not allowed; write the value without it, and text in quotes"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        # Not counted down after an error, because the reading ends with it.
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=TOO_DEEP, problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Tree(Reading):
    """The nodes of PyYAML as a tree of JSON values."""

    def __init__(self, origin: Origin, scalar: Scalar) -> None:
        super().__init__(origin)
        self._scalar = scalar
        self._left = MAX_NODES

    def place(self, mark: yaml.Mark) -> Origin:
        return self.at(mark.line + 1, mark.column + 1)

    def node(self, node: yaml.Node, path: KeyPath, key_origin: Origin | None = None) -> Node:
        """Return the tree of a node at a path; aliases are copies."""
        self._left -= 1
        if len(path) >= MAX_DEPTH:  # an alias inside of its own anchor
            raise yaml.MarkedYAMLError(problem=TOO_DEEP, problem_mark=node.start_mark)
        if self._left < 0:
            problem = f"aliases repeat more than the limit of {MAX_NODES:,} values"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        value: Any
        if isinstance(node, yaml.MappingNode):
            value = self._members(node, path)
        elif isinstance(node, yaml.SequenceNode):
            value = [self.node(item, (*path, index)) for index, item in enumerate(node.value)]
        else:
            value = self._value(node, path)
        return Node(value, self.place(node.start_mark), key_origin)

    def _members(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Node]:
        members: dict[str, Node] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(
                    problem="a key must be text; put it in quotes", problem_mark=key_node.start_mark
                )
            place = self.place(key_node.start_mark)
            key = self.usable(key_node.value, path, place)
            if key == "<<" and key_node.style is None:
                text = "merges the keys of an anchor, which recipes do not support; write the keys, or use `extends`"
                self.report((*path, key), place, text)
                continue
            self.key(members, key, (*path, key), place)
            members.setdefault(key, self.node(value_node, (*path, key), place))
        return members

    def _value(self, node: yaml.ScalarNode, path: KeyPath) -> bool | int | float | str | None:
        place = self.place(node.start_mark)
        try:
            value = self._scalar(node)
        except ValueError as error:
            self.report(path, place, str(error))
            return math.nan  # no rule reports it a second time
        return self.usable(value, path, place) if isinstance(value, str) else value
