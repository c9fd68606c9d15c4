"""Commands that let a model speak: the trainer's tool does it, run as a process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from muster.cli.checkpoints import folder_of
from muster.cli.errors import usage
from muster.cli.options import Json, Server
from muster.cli.trainer_tool import run_tool

JobOrFolder = Annotated[
    str,
    typer.Argument(
        metavar="JOB|FOLDER", help="Name or id of a job, its checkpoint folder, or a folder that export wrote."
    ),
]
AnyStep = Annotated[str, typer.Option("--step", help="best, last or a number.")]
System = Annotated[str, typer.Option("--system", help="System prompt.")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Maximum number of tokens per answer.")]
Temperature = Annotated[
    float, typer.Option("--temperature", min=0, help="Sampling temperature; 0 always takes the most likely token.")
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p", min=0.0001, max=1, help="Nucleus sampling: keep the most likely tokens up to this total probability."
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Random seed; the same seed gives the same text.")]
Stops = Annotated[list[str] | None, typer.Option("--stop", help="Stop before this text; may be repeated.")]


def generate(
    where: JobOrFolder,
    text: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="Text to continue.", show_default=False)
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", help="Text to continue, also one that begins with a dash; with --chat, the user's message."
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer as the assistant, using the model's chat template.")
    ] = False,
    system: System = "",
    step: AnyStep = "best",
    tokens: Tokens = 128,
    temperature: Temperature = 0.8,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    stop: Stops = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Generate text with a checkpoint or with the model in a folder.

    Runs on this machine's CPU in fp32, with the adapter merged into the model.
    """
    if (text is None) == (prompt is None):
        what = "the prompt is given twice" if text is not None else "there is no prompt"
        raise usage(what, f'muster generate {where} "Once upon a time"', "no-prompt")
    asked = {
        "checkpoint": folder_of(where, server, step),
        "step": step,
        "prompt": prompt or text or "",
        "system": system,
    }
    _run(asked, ["--chat"] if chat else [], tokens, temperature, top_p, seed, stop)


def chat(
    where: JobOrFolder,
    system: System = "",
    step: AnyStep = "best",
    tokens: Tokens = 512,
    temperature: Temperature = 0.8,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    stop: Stops = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Chat with a checkpoint or with the model in a folder: each line is a turn.

    /reset starts a new conversation; /exit or Ctrl-D ends it. Runs on this machine's CPU, as `muster generate` does.
    With --json each answer is one JSON document per line.
    """
    asked = {"checkpoint": folder_of(where, server, step), "step": step, "system": system}
    _run(asked, ["--interactive"], tokens, temperature, top_p, seed, stop)


def _run(
    asked: dict[str, str],
    how: list[str],
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    stop: list[str] | None,
) -> None:
    chosen = {"tokens": tokens, "temperature": temperature, "top-p": top_p, "seed": seed}
    # With =, so that a text may begin with a dash.
    words = [*_options(asked), *how, *_options(chosen), *(f"--stop={text}" for text in stop or ())]
    run_tool("generate", "muster.trainer.convert.generate", *words)


def _options(given: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in given.items()]
