"""`trainer push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer.base.terminal import say
from trainer.base.text import listed
from trainer.cli.options import flag


def push(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="An exported folder, or that of a run: then best/, or else model/.")
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The repository, such as owner/name; new or existing.")],
    public: Annotated[bool, flag("Let everybody read a new repository, or push to a public one.", "--public")] = False,
) -> None:
    """Send an exported model to the hub, or to that of HF_ENDPOINT; a new repository is private.

    The token is that of `hf auth login`, or HF_TOKEN. Nothing but the folder is sent. Files of an older export that the
    folder lacks are deleted there, in the same commit.
    """
    from trainer.tools.push import push as push_folder

    done = push_folder(run, name, public)
    say(
        f"pushed {done.folder}: {len(done.names)} files, {done.num_bytes / 1e6:,.1f} MB,"
        f" {'private' if done.is_private else 'public'}: {done.address}"
    )
    if done.others:
        say(f"left there, not of this model: {listed(done.others, 10)}; delete them on the hub if they are loaded")
    if done.deleted:
        say(f"deleted there, from an older push: {listed(done.deleted, 10)}")
