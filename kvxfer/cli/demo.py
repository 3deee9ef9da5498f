"""`kvxfer demo`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvxfer.cli.worker import PACKAGES, require_packages

if TYPE_CHECKING:
    from kvxfer.demo.run import Phase


class Fabric(StrEnum):
    AUTO = "auto"
    LOCAL = "local"
    VERBS = "verbs"
    OFI = "ofi"
    TCP = "tcp"


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="Text to take the prompts from.", show_default="the project's README"),
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=1, help="Pieces that the text is split into, each one prompt.")
    ] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt.")] = 32,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face checkpoint folder of a Llama model.",
            show_default="a small model with seeded weights and byte tokens",
        ),
    ] = None,
    fabric: Annotated[
        Fabric, typer.Option(help="The fabric that moves the KV cache; auto picks the best.")
    ] = Fabric.AUTO,
    gpu: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Move the KV cache between memory of this GPU (CUDA's number). The model computes "
            "on the CPU.",
            show_default="host memory",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON.")] = False,
) -> None:
    """Move real KV caches between two processes, and check the tokens.

    Starts a control plane, a prefill worker and a decode worker, sends the prompts through them,
    and computes the same prompts in a single process. The exit code is 1 if tokens differ, or if
    anything fails.
    """
    require_packages("the demo", PACKAGES)
    import asyncio

    from kvxfer.cli.output import out, show_error, show_json
    from kvxfer.demo.prompts import project_readme, read_prompt_file, split_text
    from kvxfer.demo.run import DemoSettings, run_demo
    from kvxfer.errors import TransferError

    text = project_readme() if prompt_file is None else read_prompt_file(prompt_file)
    settings = DemoSettings(
        prompts=split_text(text, prompts),
        tokens=tokens,
        model=model,
        fabrics=None if fabric is Fabric.AUTO else (fabric.value,),
        gpu=gpu,
    )
    with _progress_bar(prompts) as progress:
        report = asyncio.run(run_demo(settings, progress))
    if as_json:
        show_json(report.as_json())
    else:
        out.print(report.table())
    if report.difference is not None:
        show_error(TransferError(report.difference), as_json=False)
        raise typer.Exit(1)


@contextmanager
def _progress_bar(prompts: int) -> Iterator[Callable[[Phase, int], None]]:
    """Shows a bar on stderr that is drawn when something has changed, without a thread."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from kvxfer.cli.output import err

    labels: dict[Phase, str] = {
        "start": "starting control plane and workers",
        "cluster": "prompts through prefill and decode",
        "single": "the same prompts in a single process",
    }
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=err,
        auto_refresh=False,
        transient=True,
        disable=not err.is_terminal,
    ) as bar:
        task = bar.add_task("", total=prompts)

        def progress(phase: Phase, done: int) -> None:
            bar.update(task, description=labels[phase], completed=done, refresh=True)

        yield progress
