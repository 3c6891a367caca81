"""`trainer certify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.base.terminal import say
from trainer.cli.options import JsonOption, RanksOption, flag, output_option, print_json, value

if TYPE_CHECKING:
    from trainer.tools.certificate.result import Certificate


def certify(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE|A", help="A recipe, or a recorded run or certificate.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE|B",
            help="Overrides of all layouts; or another recorded run or certificate, to compare with A.",
            show_default=False,
        ),
    ] = None,
    layouts: Annotated[str | None, value('Layouts, such as "fsdp; tensor=2; zero3 processes=4".', "TEXT")] = None,
    steps: Annotated[int, typer.Option(min=1, max=16, metavar="N", help="Steps of each layout.")] = 8,
    processes: RanksOption = None,
    against_first: Annotated[
        bool, flag("Compare with the first layout, and not with one process.", "--against-first")
    ] = False,
    output: Annotated[Path | None, output_option("For the certificate; default: runs/NAME-certify.", "FOLDER")] = None,
    as_json: JsonOption = False,
) -> None:
    """Certify that layouts of a recipe train the same, or name the first tensor that differs.

    With A and B, compare two runs that were trained with logging.fingerprints=true, or two certificates.
    The exit code is 0 if all are equal within the tolerances, and 1 if not. Under torchrun, accelerate or srun, the
    first ranks of the job train each layout.
    """
    from trainer.ranks.environment import problems_name_the_machine
    from trainer.tools.certificate import certifying

    def show(line: str) -> None:
        say(line, err=as_json)

    def finish(found: Certificate) -> None:
        for note in found.notes:
            show(f"note      {note}")
        if found.folder is not None:
            show(f"wrote     {found.folder / certifying.PAGE} and {certifying.JSON}")
        if as_json:
            print_json(found.as_object())

    words = overrides or []
    others = [word for word in words if "=" not in word]
    if len(words) == 1 and others:
        found = certifying.certify_records(Path(recipe), Path(words[0]), output)
        for result in found.results[1:]:
            show(f"{result.name}: {result.sentence()}")
        finish(found)
        raise typer.Exit(found.exit_code)
    request = certifying.CertifyRequest(recipe, words, layouts, steps, processes, output, against_first)
    with problems_name_the_machine():
        raise typer.Exit(certifying.certify(request, show, finish))
