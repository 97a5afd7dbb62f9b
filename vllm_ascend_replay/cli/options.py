"""What the commands share: ``--json FILE``, a console that is wide enough for tables, the end of a failed command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result to FILE as JSON.", dir_okay=False)
]
"""``--json FILE``, which every command has."""
ApiKey = Annotated[
    str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Sent to the server as a bearer token.")
]
Timeout = Annotated[float, typer.Option(help="Seconds that an answer may take.", min=1)]
VocabSize = Annotated[
    int, typer.Option(help="Random token ids stay below this; never above the model's vocabulary.", min=8)
]
ModelName = Annotated[str | None, typer.Option(help="The model's name on the server; default: its first.")]

WIDTH = 140
"""Columns where the output is no terminal."""


def writable(path: Path | None, option: str = "--json") -> Path | None:
    """``path``, if a file can be written there.

    Raises:
        typer.BadParameter: it cannot; better said before the work than after it.
    """
    if path is None:
        return None
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no directory {path.parent} to write {path.name} in", param_hint=option)
    existed = path.exists()
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror}", param_hint=option) from error
    return path


def positive_numbers(text: str, option: str) -> tuple[int, ...]:
    """A list like ``1,8``, without repetitions.

    Raises:
        typer.BadParameter: it is none.
    """
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise typer.BadParameter(f"{text!r} is no list of positive whole numbers", param_hint=option)
    return numbers


def wide_console() -> Console:
    """A console on standard output; tables are not folded where it is no terminal."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    return console


def write_json(path: Path | None, values: dict[str, Any]) -> None:
    """Write ``values`` where ``--json`` says, if it does."""
    if path is not None:
        path.write_text(json.dumps(values, indent=2) + "\n")


def end_failed(console: Console, fault: Exception, json_file: Path | None) -> int:
    """Say why the command failed, in both places.

    Returns:
        The exit status.
    """
    console.print(f"FAILED: {fault}", highlight=False, markup=False, soft_wrap=True)
    write_json(json_file, {"passed": False, "error": str(fault)})
    return 1
