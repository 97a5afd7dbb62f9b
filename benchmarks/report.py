"""What every figure that lands carries: how it was measured, on which card, with which versions, when."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import torch


def about(
    name: str,
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    *,
    packages: Sequence[str] = ("triton", "vllm"),
) -> dict[str, Any]:
    """``command``, ``date``, ``device`` and ``versions`` of a run of ``benchmarks.NAME`` that uses ``packages``."""
    return {
        "command": command(name, parser, arguments),
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {name: _version(name) for name in ("torch", *packages)},
    }


def command(name: str, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """How a benchmark was called; files, and options at their defaults, are left out."""
    options = []
    for key, value in vars(arguments).items():
        if key == "json" or value == parser.get_default(key):
            continue
        if isinstance(value, list):
            value = ",".join("x".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in value)
        elif isinstance(value, str) and " " in value:
            value = f'"{value}"'
        options.append(f"--{key.replace('_', '-')}" + ("" if value is True else f" {value}"))
    return " ".join([f"python -m benchmarks.{name}", *options])


def _version(package: str) -> str:
    """By import: on a GPU machine vLLM lies there as source, without a distribution."""
    return str(import_module(package).__version__)


def write(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write a report, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


def say_missed(missed: Sequence[str], *, targets: str = "targets of an H200") -> None:
    """Print whether all that must hold does."""
    print(f"{targets}: " + ("met" if not missed else "MISSED\n  " + "\n  ".join(missed)), flush=True)
