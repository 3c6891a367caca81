"""`trainer tokenizer`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from trainer.base.errors import UsageError
from trainer.base.terminal import say
from trainer.cli.options import JsonOption, count, flag, print_json, value


def tokenizer(
    data: Annotated[
        list[str],
        typer.Argument(metavar="DATA...", help="Files (also .txt), folders, patterns or URLs of texts."),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist.")],
    kind: Annotated[
        Literal["wordpiece", "bpe", "unigram"] | None, typer.Option(help="Kind of model; default: that of the family.")
    ] = None,
    family: Annotated[
        Literal["bert", "modernbert", "roberta", "gpt2", "llama", "t5"] | None,
        typer.Option(help="Special tokens, template and class; default: bert, or modernbert for bpe, t5 for unigram."),
    ] = None,
    size: Annotated[int, count("Tokens of the vocabulary, with the special ones.")] = 32_000,
    text: Annotated[str | None, value("Column of texts; default: `text`, or the only one.", "COLUMN")] = None,
    recipe: Annotated[bool, flag("DATA is a recipe with overrides: its training rows.", "--recipe")] = False,
    min_frequency: Annotated[int, count("Fewest occurrences of a pair that is joined.")] = 2,
    lowercase: Annotated[bool | None, typer.Option(help="Write small letters; default: for bert alone.")] = None,
    max_length: Annotated[int | None, count("Most tokens that its models take; default: no limit.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a tokenizer on texts, with the special tokens of a family of models.

    The folder opens in transformers. A report shows tokens per word, bytes per token and unknown tokens.
    """
    from trainer.base.collector import importing

    with importing():
        from trainer.tools.tokenizer.training import TokenizerRequest, lines, train_tokenizer

    request = TokenizerRequest(data, output, kind, family, size, text, min_frequency, lowercase, max_length)
    texts = None
    if recipe:
        from trainer.recipe.reading.loading import load_recipe
        from trainer.tools.tokenizer.recipe_texts import RecipeTexts

        if text is not None or (others := [word for word in data[1:] if "=" not in word]):
            what = "--text" if text is not None else others[0]
            raise UsageError(
                f"`--recipe` takes one recipe, which names the columns of texts, and overrides; drop {what}"
            )
        texts = RecipeTexts(load_recipe(data[0], data[1:]).recipe)
    report = train_tokenizer(request, texts)
    if as_json:
        print_json(report)
    else:
        say(*lines(report, output))
