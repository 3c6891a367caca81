"""The texts before queries and documents."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

QUERY, DOCUMENT = ("query",), ("document", "passage", "corpus")
"""The names of the prompt of a text by its role; the first one that a folder has counts."""


def prompt_of(role: tuple[str, ...], known: Collection[str]) -> str | None:
    """Return the name of the prompt of a role, of those that a folder has; None: it has none."""
    return next((name for name in role if name in known), None)


@dataclass(frozen=True)
class Prompts:
    """The texts before queries and documents; None: those of the model's folder, if any.

    `others` are the prompts of the folder by name, and `default` is the name of the one for texts without a role.
    """

    query: str | None = None
    document: str | None = None
    others: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None

    def of_folder(self, known: Mapping[str, str], default: str | None, has_roles: bool) -> Prompts:
        """Return these prompts, completed by those of a folder.

        Args:
            known: the prompts of the folder by name.
            default: the name of its default prompt.
            has_roles: whether texts are queries and documents; if not, the folder's default prompt is for all.
        """
        names = [prompt_of(role, known) if has_roles else default for role in (QUERY, DOCUMENT)]
        query, document = (known.get(name or "", "") for name in names)
        return Prompts(
            query if self.query is None else self.query,
            document if self.document is None else self.document,
            known,
            default,
        )

    def as_json(self, has_roles: bool) -> dict[str, Any]:
        """Return the prompts as a folder of sentence-transformers holds them."""
        prompts, default = dict(self.others), self.default
        query, document = self.query or "", self.document or ""
        if has_roles or query != document:
            for role, text in ((QUERY, query), (DOCUMENT, document)):
                prompts[prompt_of(role, prompts) or role[0]] = text
        elif query != prompts.get(default or "", ""):
            default = "query"
            prompts |= {"query": query, "document": document}
        return {"prompts": prompts, "default_prompt_name": default}
