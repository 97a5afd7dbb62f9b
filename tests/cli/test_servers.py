"""verify, bench and the counters against real API servers with replay on and off."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

pytestmark = pytest.mark.engine

TINY = ["--window", "8", "--vocab-size", "97"]


def completion(server, prompt, **fields):
    body = {"model": httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"], "prompt": prompt, **fields}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=600)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def counters(server):
    response = httpx.post(f"{server.url}/collective_rpc", json={"method": "ascend_replay_stats"}, timeout=600)
    assert response.status_code == 200, response.text
    (result,) = response.json()["results"]
    return result


def metrics(server):
    lines = httpx.get(f"{server.url}/metrics", timeout=600).text.splitlines()
    values = (line.rsplit(" ", 1) for line in lines if line.startswith("vllm_ascend_replay_"))
    return {re.sub(r"\{.*\}", "", name): float(value) for name, value in values}


def difference(after, before):
    return {name: after[name] - before[name] for name in before if name != "full_steps_by_reason"}


@pytest.mark.parametrize("baseline", [True, False], ids=["baseline", "itself"])
def test_verify(command, servers, baseline):
    arguments = ["--url", servers["on"].url, *TINY, "--lengths", "5,9,17,129", "--logprobs", "-1"]
    arguments += ["--needle-tokens", "129", "--tokens", "4"]
    if baseline:
        arguments += ["--baseline-url", f"{servers['off'].url}/v1"]
    outcome = command("verify", *arguments)
    assert outcome.status == 0, outcome.text
    report = outcome.report
    assert report["passed"] is True
    assert [p["tokens"] for p in report["prompts"]] == [5, 9, 17, 129]
    assert [p["trimmed"] for p in report["prompts"]] == [False, True, True, True]
    short, *trimmed = report["prompts"]
    assert short["mean_kl"] < 1e-6
    assert max(p["mean_kl"] for p in trimmed) > 1e-5, "replay was at work"
    assert all(p["mean_kl"] < p["last_window_kl"] for p in trimmed)
    assert len(report["needles"]) == 5
    assert "replay is at work" in outcome.text
    assert "PASSED" in outcome.text


def test_verify_two_full_runs(command, servers):
    """Replay off on both sides: no difference, and the command says what that means."""
    outcome = command(
        "verify", "--url", servers["off"].url, *TINY, "--lengths", "129", "--logprobs", "-1", "--needle-tokens", "0"
    )
    assert outcome.status == 0, outcome.text
    assert outcome.report["prompts"][0]["max_kl"] < 1e-6
    assert "no difference at all to a full run" in outcome.text


def test_verify_limits(command, servers, tmp_path):
    """A user's prompts, and limits that replay does not keep."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('[4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]\n{"name": "mine", "prompt": ' + str([5, 9] * 40) + "}\n")
    outcome = command(
        *["verify", "--url", servers["on"].url, *TINY, "--lengths", "9", "--needle-tokens", "0"],
        *["--prompts", str(file), "--max-kl", "1e-9", "--max-mean-kl", "1e-9"],
    )
    assert outcome.status == 1
    assert [p["name"] for p in outcome.report["prompts"]] == ["random 9", "line 1", "mine"]
    assert [c["name"] for c in outcome.report["checks"] if not c["passed"]] == ["mean KL", "max KL"]
    assert "FAILED: mean KL, max KL." in outcome.text


def test_bench_compare_and_plot(command, servers, tmp_path):
    png = tmp_path / "ttft.png"
    outcome = command(
        *["bench", "--url", servers["on"].url, "--compare", servers["off"].url, "--tokens", "129,257"],
        *["--concurrency", "1,2", "--waves", "1", "--warmup", "0", "--vocab-size", "97", "--plot", str(png)],
    )
    assert outcome.status == 0, outcome.text
    cells, ratios = outcome.report["cells"], outcome.report["ratios"]
    points = [(n, c) for n in (129, 257) for c in (1, 2)]
    assert [(c["tokens"], c["concurrency"]) for c in cells] == [p for p in points for _ in range(2)]
    assert [c["server"] for c in cells] == [servers["on"].url, servers["off"].url] * 4
    for cell in cells:
        assert (cell["requests"], cell["errors"]) == (cell["concurrency"], 0)
        assert 0 < cell["ttft_p50"] <= cell["ttft_p99"]
        assert cell["input_tokens_per_second"] > 0
    assert [(r["tokens"], r["concurrency"]) for r in ratios] == points
    on, off = cells[0], cells[1]
    assert ratios[0]["ttft_p50"] == pytest.approx(on["ttft_p50"] / off["ttft_p50"])
    assert png.read_bytes().startswith(b"\x89PNG")


def test_bench_hit(command, servers):
    """All but the suffix was sent before, so the engine's rows are few."""
    before = counters(servers["on"])
    outcome = command(
        *["bench", "--url", servers["on"].url, "--mode", "hit", "--tokens", "400", "--suffix-tokens", "30"],
        *["--concurrency", "2", "--waves", "1", "--warmup", "0", "--vocab-size", "97"],
    )
    assert outcome.status == 0, outcome.text
    (cell,) = outcome.report["cells"]
    assert cell["tokens"] == 430
    rows = difference(counters(servers["on"]), before)["rows_in"]
    assert 2 * 430 <= rows < 2 * 500, "the prefix was computed once"


def test_bench_shows_a_refused_request(command, servers):
    outcome = command("bench", "--url", servers["off"].url, "--tokens", "5000", "--vocab-size", "97")
    assert outcome.status == 1
    assert "request '5000 tokens, 1'" in outcome.text
    assert "maximum context length is 4096" in outcome.text


# -- counters -----------------------------------------------------------------------------------------------------


def test_counters_of_known_requests(servers):
    """By hand: window 8, F = 8; each request is alone, so every step is its own."""
    server = servers["on"]
    before = counters(server)
    completion(server, [*range(3, 90), *range(3, 45)], max_tokens=3, ignore_eos=True, cache_salt="a")  # 129 tokens
    after = counters(server)
    counted = difference(after, before)
    # One prefill that keeps 8 rows, two decodes of one row each.
    assert counted == {
        "steps": 3,
        "replay_steps": 1,
        "skipped_steps": 0,
        "rows_in": 131,
        "rows_kept": 10,
        "graph_steps": 0,
        "padded_rows": 0,
    }
    completion(server, [5, 6, 7, 8], max_tokens=1, cache_salt="b")  # never trimmed
    completion(server, [*range(3, 40)], max_tokens=1, prompt_logprobs=0, cache_salt="c")  # keeps every row
    end = counters(server)
    assert difference(end, after)["rows_kept"] == difference(end, after)["rows_in"] == 4 + 37
    reason = "no prompt of the step is bounded"
    assert end["full_steps_by_reason"][reason] - after["full_steps_by_reason"].get(reason, 0) == 2


def test_skipped_steps(servers):
    """A prompt of three chunks (2048 tokens each): the first keeps no row."""
    server = servers["on"]
    before = counters(server)
    completion(server, [3 + i % 90 for i in range(4000)], max_tokens=1, cache_salt="d")
    counted = difference(counters(server), before)
    assert (counted["steps"], counted["skipped_steps"], counted["replay_steps"]) == (2, 1, 1)
    assert (counted["rows_in"], counted["rows_kept"]) == (4000, 8)


def test_metrics_follow_the_counters(servers):
    server = servers["on"]
    completion(server, [*range(3, 60)], max_tokens=2, ignore_eos=True, cache_salt="e")
    until = time.monotonic() + 120
    while True:
        told, seen = counters(server), metrics(server)
        full = sum(told.pop("full_steps_by_reason").values())
        wanted = {f"vllm_ascend_replay_{name}_total": float(value) for name, value in told.items()}
        wanted["vllm_ascend_replay_rows_total"] = wanted.pop("vllm_ascend_replay_rows_in_total")
        wanted["vllm_ascend_replay_full_steps_total"] = float(full)
        got = {name: value for name, value in seen.items() if name in wanted}
        if got == wanted or time.monotonic() > until:
            break
        time.sleep(0.5)
    assert got == wanted


def test_the_log_says_what_is_on_and_what_it_saves(servers):
    completion(servers["on"], [*range(3, 60)], max_tokens=2, ignore_eos=True, cache_salt="f")
    line = r"decoder replay, last \d+ s: replay layers ran [\d.]+ % of rows \(\d+ of \d+\), steps \d+, trimmed \d+"
    until = time.monotonic() + 120
    while not re.search(line, servers["on"].log.read_text()) and time.monotonic() < until:
        time.sleep(0.5)
    log = servers["on"].log.read_text()
    assert re.search(line, log)
    assert log.count("decoder replay is running") == 1
    assert "decoder replay" not in servers["off"].log.read_text()


def test_replay_off_leaves_no_counter(servers):
    response = httpx.post(f"{servers['off'].url}/collective_rpc", json={"method": "ascend_replay_stats"}, timeout=600)
    assert response.status_code != 200
    assert "vllm_ascend_replay" not in httpx.get(f"{servers['off'].url}/metrics", timeout=600).text


# -- parallel -----------------------------------------------------------------------------------------------------

_PARALLEL = """
import json, os, sys
from vllm import LLM, SamplingParams
lengths, arguments = json.loads(sys.argv[1]), json.loads(sys.argv[2])
llm = LLM(load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, dtype="float32", seed=0,
          kv_cache_memory_bytes=1 << 26, max_num_batched_tokens=100, **arguments)
params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
# In one call: without a server's coordinator, an idle rank does not join what another one begins later.
prompts = [{"prompt_token_ids": [3 + (j + 7 * i) % 90 for j in range(n)]} for i, n in enumerate(lengths)]
llm.generate(prompts, params, use_tqdm=False)
print("COUNTERS", json.dumps(llm.collective_rpc("ascend_replay_stats")), flush=True)
sys.stdin.read()  # the ranks of a group must end together
llm.llm_engine.engine_core.shutdown()
os._exit(0)
"""


def run_parallel(model, tmp_path, lengths, *, tp=1):
    """Counters of every worker, one list for each data-parallel rank.

    Args:
        lengths: for each data-parallel rank, its prompts, sent together; three tokens are generated for each.
    """
    from vllm_ascend_replay.reference.engine import prepare_environment

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = len(lengths)
    environ = {**prepare_environment({}), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(["0", "1"][: max(tp, ranks)])
    arguments = json.dumps({"model": str(model), "tensor_parallel_size": tp})
    processes = []
    for rank, mine in enumerate(lengths):
        if ranks > 1:
            environ |= {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank), "VLLM_DP_SIZE": str(ranks)}
            environ |= {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": port}
        command = [sys.executable, "-c", _PARALLEL, json.dumps(mine), arguments]
        with (tmp_path / f"rank{rank}.log").open("w") as log:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        processes.append(process)
    try:
        results = [_counters_of(process, tmp_path / f"rank{rank}.log") for rank, process in enumerate(processes)]
        for process in processes:
            process.stdin.close()
        for process in processes:
            process.wait(timeout=600)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
    return results


def _counters_of(process, log):
    for line in process.stdout:
        if line.startswith("COUNTERS"):
            return json.loads(line.removeprefix("COUNTERS"))
    pytest.fail(log.read_text()[-3000:])


# By hand, for prompts of 129 and 40 tokens and 100 tokens a step: 100 of the first prompt, none kept; its other 29 and
# the second one, 8 kept of each; two decodes of both.
BY_HAND = {"steps": 4, "rows_in": 129 + 40 + 4, "rows_kept": 8 + 8 + 4}


# tests/engine reads such ranks' counters too, without a command in between.
@pytest.mark.slow
def test_counters_under_tensor_parallelism(tiny_model, tmp_path):
    """Both ranks count the same."""
    ((first, second),) = run_parallel(tiny_model, tmp_path, [[129, 40]], tp=2)
    assert first == second
    assert (first["skipped_steps"], first["replay_steps"], first["padded_rows"]) == (1, 1, 0)
    assert {name: first[name] for name in BY_HAND} == BY_HAND


# tests/engine reads such ranks' counters too, without a command in between.
@pytest.mark.slow
def test_counters_under_data_parallelism(tiny_model, tmp_path):
    """The second rank has one short prompt and then idles: its dummy batches are nobody's steps."""
    (first,), (second,) = run_parallel(tiny_model, tmp_path, [[129, 40], [5]])
    assert {name: first[name] for name in BY_HAND} == BY_HAND
    # The step of which this rank keeps nothing: skipped if the other had begun later, else padded for its sake.
    assert first["replay_steps"] + first["skipped_steps"] >= 2
    assert first["skipped_steps"] + first["padded_rows"] == 1
    assert (second["steps"], second["rows_in"], second["rows_kept"]) == (3, 5 + 2, 5 + 2)
    assert second["skipped_steps"] == 0
