"""The demo: once through the real engine, then what it says of runs that are not right."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_ascend_replay.cli import app, cases, demo
from vllm_ascend_replay.cli.cases import all_cases, kept_rows
from vllm_ascend_replay.reference.engine import Prefill, Request

CASES = {case.name: case for case in all_cases()}
FIELDS = ["name", "prompt_tokens", "chunks", "rows_off", "rows_on", "skipped_steps", "tokens_equal_off"]
FIELDS += ["max_abs_logprob_diff", "seconds"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """All engines, run once."""
    return demo.run_engines(demo.arms_of(all_cases()), tmp_path_factory.mktemp("demo"), lambda *_, **__: None)


@pytest.fixture
def invoke(outcome, monkeypatch, tmp_path):
    """The command with the engines' outcome, or a changed one: exit status, output, report."""

    def run(changed=outcome):
        monkeypatch.setattr(demo, "run_engines", lambda *_: changed)
        report = tmp_path / "report.json"
        done = CliRunner().invoke(app, ["demo", "--json", str(report)])
        return done.exit_code, done.output, json.loads(report.read_text())

    return run


def judged(outcome, name, on=None, off=None):
    case = CASES[name]
    return demo.judge(case, off or outcome.off[case.compared_with], on or outcome.on[name], outcome.oracle)


@pytest.mark.engine
def test_the_demo_passes_and_reports(invoke):
    code, output, report = invoke()
    assert code == 0, output
    assert list(report) == ["vllm", "runner", "cases", "passed"]
    assert (report["vllm"], report["runner"], report["passed"]) == ("0.32.0", "v2", True)
    assert [case["name"] for case in report["cases"]] == list(CASES)
    for case in report["cases"]:
        assert list(case) == FIELDS
        assert case["name"] in output
        assert case["max_abs_logprob_diff"] <= 1e-5
        assert (case["rows_on"] < case["rows_off"]) == (case["name"] != "shorter than the window")
    by_name = {case["name"]: case for case in report["cases"]}
    long = by_name["long prompt in chunks"]
    # 48 tokens a step; the last window and five decodes run, all chunks but the last skip the replay layers.
    assert (long["prompt_tokens"], long["chunks"], long["rows_off"]) == (301, 7, 306)
    assert (long["rows_on"], long["skipped_steps"]) == (8 + 5, 6)
    exact = by_name["long prompt, exact"]
    assert (exact["rows_on"], exact["skipped_steps"]) == (1 + 3 * 7 + 5, 5)
    assert exact["tokens_equal_off"]


@pytest.mark.engine
def test_the_readme_shows_this_table(invoke):
    """Times and the last digits of a difference are the machine's; the rest is the same everywhere."""
    _, _, report = invoke()
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    shown = re.findall(r"^ (\S.*?) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+) +(yes|no) +\S+ +\S+$", readme, re.MULTILINE)
    assert shown == [
        (case["name"], *map(str, list(case.values())[1:6]), "yes" if case["tokens_equal_off"] else "no")
        for case in report["cases"]
    ]


@pytest.mark.engine
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.saves and case.keep == "window"])
def test_a_wrong_floor_is_seen(outcome, name):
    """The comparison would fail a run that kept other rows: with more kept ones, and without a floor at all."""
    for keep in (9, None):
        assert demo.oracle_difference(CASES[name], outcome.on[name], outcome.oracle, keep) > 10 * cases.TOLERANCE
    assert demo.oracle_difference(CASES[name], outcome.off[name], outcome.oracle, 8) > 10 * cases.TOLERANCE


@pytest.mark.engine
def test_one_row_fewer_is_not_exact(outcome):
    name = "long prompt, exact"
    off = outcome.off[CASES[name].compared_with]
    # The run that keeps 22 rows equals the oracle without a floor; the oracle with 21 rows differs from both.
    assert demo.oracle_difference(CASES[name], outcome.on[name], outcome.oracle, None) <= cases.TOLERANCE
    assert demo.oracle_difference(CASES[name], off, outcome.oracle, 21) > cases.TOLERANCE


@pytest.mark.engine
def test_a_run_that_saves_nothing_fails(outcome, invoke):
    name = "cold prompt in one chunk"
    idle = replace(outcome.off[name], stats={**outcome.off[name].stats, "rows_kept": outcome.off[name].layer_rows})
    code, output, report = invoke(replace(outcome, on={**outcome.on, name: idle}))
    assert code == 1
    assert not report["passed"]
    assert f"FAILED: {name}: no row was saved: 50 with replay, 50 without" in " ".join(output.split())


@pytest.mark.engine
def test_a_case_that_differs_is_named(outcome, invoke):
    name = "prefix hit"
    changed = copy.deepcopy(outcome.on[name])
    changed.requests["hit"].logprobs[3][11] += 2e-5
    code, output, report = invoke(replace(outcome, on={**outcome.on, name: changed}))
    assert code == 1
    assert [case["name"] for case in report["cases"] if case["max_abs_logprob_diff"] > 1e-5] == [name]
    assert f"FAILED: {name}: log-probabilities differ by" in output
    assert "Passed" not in output


@pytest.mark.engine
def test_nan_is_a_difference_and_valid_json(outcome, invoke):
    name = "mixed with decodes"
    changed = copy.deepcopy(outcome.on[name])
    changed.requests["first"].logprobs[0][0] = float("nan")
    code, _, report = invoke(replace(outcome, on={**outcome.on, name: changed}))
    assert code == 1
    assert [case["name"] for case in report["cases"] if case["max_abs_logprob_diff"] is None] == [name]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "on", "fault"),
    [
        ("preempted and resumed", {"preemptions": 0}, "nothing was preempted"),
        ("long prompt in chunks", {"layer_rows": 306}, "the counters say 13 rows, the last layer ran 306"),
    ],
)
def test_a_case_must_do_what_it_is_named_for(outcome, name, on, fault):
    assert fault in judged(outcome, name, on=replace(outcome.on[name], **on)).faults


@pytest.mark.engine
def test_exact_must_equal_replay_off(outcome):
    name = "long prompt, exact"
    other = copy.deepcopy(outcome.off["long prompt in chunks"])
    other.requests["long"].tokens[2] ^= 1
    faults = judged(outcome, name, off=other).faults
    assert "its tokens differ from those without replay" in faults


def test_kept_rows():
    request = Request("r", [1] * 30, 4)
    prefill = Prefill(length=30, replay_start=0, computed=0, steps=[20, 3, 7, 1, 1, 1])
    assert kept_rows(request, prefill, None) == 33
    assert kept_rows(request, prefill, 8) == 8 + 3
    assert kept_rows(replace(request, prompt_logprobs=True), prefill, 8) == 33
    # After a hit only what was run counts.
    assert kept_rows(request, Prefill(30, 16, 16, [14, 1]), 8) == 9
    assert kept_rows(request, Prefill(30, 24, 24, [6, 1]), 8) == 7
    assert prefill.chunks == 3
    assert Prefill(30, 16, 16, [14, 1]).chunks == 1


def test_a_failed_engine_is_named_with_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "ENGINE", {"no_such_argument": 1})
    console = Console(record=True, width=200)
    assert demo.run_demo(console=console) == 1
    text = console.export_text()
    assert "no_such_argument" in text
    assert "FAILED: starting vLLM (replay off): the engine's process ended" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--json", "no/such/directory/file"], "there is no directory"),
        (["demo", "--json", "."], "is a directory"),
        (["demo", "--fast"], "No such option"),
        (["demo", "extra"], "unexpected extra argument"),
        (["dmeo"], "No such command"),
    ],
)
def test_bad_arguments_exit_2(arguments, message):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_a_missing_part_is_named(monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    console = Console(record=True, width=200)
    assert demo.run_demo(console=console) == 1
    assert "vLLM is not installed; run `make demo`" in console.export_text()
