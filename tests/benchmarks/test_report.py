"""Every figure says how it was measured."""

import argparse
import json
from pathlib import Path

import pytest
import torch
import vllm

from benchmarks.report import about, command, write

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default="all")
    parser.add_argument("--shapes", type=lambda text: [tuple(map(int, part.split("x"))) for part in text.split(",")])
    parser.add_argument("--kept", type=lambda text: list(map(int, text.split(","))), default=[1])
    parser.add_argument("--require-targets", action="store_true")
    return parser


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ""),
        (["--json", "file"], ""),
        (["--rounds", "3"], ""),
        (["--rounds", "0"], " --rounds 0"),
        (["--cases", "64K + 1K"], ' --cases "64K + 1K"'),
        (["--shapes", "1x2,8x4096", "--require-targets"], " --shapes 1x2,8x4096 --require-targets"),
        (["--kept", "128,1024"], " --kept 128,1024"),
    ],
)
def test_the_command_can_be_typed_again(parser, words, expected):
    assert command("some_gpu", parser, parser.parse_args(words)) == "python -m benchmarks.some_gpu" + expected


def test_about_and_write(parser, tmp_path):
    report = about("some_gpu", parser, parser.parse_args([]), packages=["vllm"])
    assert set(report) == {"command", "date", "device", "versions"}
    assert report["versions"] == {"torch": torch.__version__, "vllm": vllm.__version__}
    write(None, report)
    write(tmp_path / "report.json", report)
    assert json.loads((tmp_path / "report.json").read_text()) == report


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_landed_figures_say_how_they_were_measured(file):
    report = json.loads(file.read_text())
    rows = [report, *report.get("prefills", []), *report.get("decodes", [])]
    assert any("python -m benchmarks." in row.get("command", "") for row in rows)
    assert {"date", "device"} <= set(report)
    assert not report.get("missed")
