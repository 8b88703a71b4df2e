"""`clairvit certify`: how many top patches keep the model's answer, on a share of photos like these."""

from __future__ import annotations

import shlex
from pathlib import Path

from clairvit.cli import options
from clairvit.cli.arguments import single_method
from clairvit.cli.command import Command, ScoringOptions
from clairvit.cli.console import print_line, print_result_note
from clairvit.cli.declare import option
from clairvit.errors import BadInput

EXAMPLES = """[bold]Examples[/bold]

clairvit certify photos/ --out certificate.json, then: clairvit explain cat.jpg --certificate certificate.json

clairvit certify photos/ --method genatt --keep 0.8 --statement change

clairvit certify photos/ --masks masks/ --statement region

clairvit certify --data pets:data/oxford-iiit-pet --limit 200
"""


def certify(
    images: list[str] | None = options.ANNOTATED_IMAGES,
    *,
    method: list[str] | None = options.method_list(
        "The method that ranks the patches: one of 'clairvit methods'.", "attnlrp+plus where it fits the model"
    ),
    keep: float = option(0.9, "The share of photos on which the statement holds, between 0 and 1.", "SHARE"),
    statement: str = option(
        "keep",
        "keep: the top patches alone keep the answer; change: hiding them changes it; region: the inside of each "
        "photo's mask alone keeps it.",
        "keep|change|region",
    ),
    sizes: int = option(20, "How many numbers of patches are tried, one pass for each.", min=2),
    removal: str = option("token", options.REMOVAL_HELP),
    question: ScoringOptions,
    out: str = options.out("certificate.json", "Where the certificate is written.", "FILE.json"),
    output: options.OutputOptions,
) -> None:
    import clairvit as cv
    from clairvit._io import check_writable
    from clairvit.methods.spec import resolve_method
    from clairvit.metrics.certify import check_statement
    from clairvit.perturbation.removal import check_removal

    check_statement(statement, keep)
    check_removal(removal)
    typed = single_method(method, "certify")
    spec = None if typed is None else resolve_method(typed)
    file = Path(out)
    if file.suffix.lower() != ".json":
        raise BadInput(
            f"--out {out} is no name for a certificate; expected one that ends in .json, such as certificate.json."
        )
    check_writable(file)
    command = Command("certify", "used", output)
    opened = question.open(command, images, [])
    with command.progress(f"{len(opened.images)} photos"):
        certificate = cv.certify(
            opened.model,
            opened.images,
            spec,
            keep,
            statement=statement,  # type: ignore[arg-type]  # checked above
            sizes=sizes,
            removal=removal,
            **opened.arguments,
        )
    certificate.save(file)

    def show() -> None:
        print_line(certificate.sentence)
        for note in certificate.notes:
            print_result_note(note)
        use = "" if statement == "region" else "; use it by: "
        use += "" if statement == "region" else shlex.join(question.explain_with("--certificate", str(file)))
        print_line(f"Wrote {file}{use}")

    command.finish(certificate.n, lambda: certificate.to_dict() | {"files": [str(file)]}, show)


certify.__doc__ = (
    "Certify how many top patches of a map alone keep the model's answer, on a share of photos like these.\n\n"
    f"{EXAMPLES}"
)
