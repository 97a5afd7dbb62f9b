"""The command `vllm-ascend-replay`: what a command needs is imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_ascend_replay import __version__
from vllm_ascend_replay.cli import bench, doctor, verify
from vllm_ascend_replay.cli.options import JsonFile, writable

app = typer.Typer(
    name="vllm-ascend-replay", no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Decoder-side bounded replay for DeepSeek-V4.1 with vLLM.

    Exit status: 0 good, 1 not good, 2 bad arguments.
    """


@app.command("demo")
def demo_command(json_file: JsonFile = None) -> None:
    """Run decoder replay through vLLM's real engine on this machine and compare it with a run without replay.

    A small DeepSeek-V4.1-shaped model is served three times: replay off, replay on, and replay on in its lossless
    setting. Every log-probability is compared with an independent dense computation of the same request.
    """
    from vllm_ascend_replay.cli.demo import run_demo

    raise typer.Exit(run_demo(writable(json_file)))


app.command("doctor", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(doctor.doctor)
app.command("verify")(verify.verify)
app.command("bench")(bench.bench)


def main() -> None:
    """Entry point of the console script."""
    app()
