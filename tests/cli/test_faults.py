"""Servers that fail: a message that names the request and the answer, exit status 1, no traceback."""

import pytest

VERIFY = ["--window", "8", "--lengths", "9", "--tokens", "2", "--needle-tokens", "0", "--vocab-size", "97"]
BENCH = ["--tokens", "9", "--concurrency", "2", "--waves", "2", "--vocab-size", "97"]

ANSWERS = {
    "error": 'HTTP 500: {"error":{"message":"the engine is on fire"}}',
    "not json": "<html>proxy</html>",
    "no choice": 'the answer has no choice: {"choices":[]}',
    "closes": "RemoteProtocolError",
    "no logprobs": "the answer has no log-probabilities",
    "no prompt logprobs": "the answer has no log-probabilities of the prompt",
    "bad prompt logprobs": "the prompt's log-probabilities cannot be read",
    "no token ids": "the answer has no token ids",
    "words": "do not name token ids",
    "too few": "1 tokens with 2 log-probabilities",
}


@pytest.mark.parametrize("how", ANSWERS)
def test_verify(command, faulty, how):
    url, fault = faulty
    fault.how = how
    outcome = command("verify", "--url", url, *VERIFY)
    assert outcome.status == 1
    text = " ".join(outcome.text.split())
    assert "FAILED: request 'random 9" in text
    assert f"{url}/v1/completions" in text
    assert ANSWERS[how] in text
    assert outcome.report["passed"] is False
    assert ANSWERS[how] in outcome.report["error"]


STREAMS = {
    "error": 'HTTP 500: {"error":{"message":"the engine is on fire"}}',
    "closes": "after 1 chunks: RemoteProtocolError",
    "error in stream": 'an error in the stream: {"error": {"message": "cancelled by the engine"}}',
    "bad chunk": "a chunk of the stream is no JSON: {oops",
    "no end": "the stream ended after 1 chunks without its end ([DONE])",
    "no token": "the stream ended without a token",
}


@pytest.mark.parametrize("how", STREAMS)
def test_bench(command, faulty, how):
    url, fault = faulty
    fault.how = how
    outcome = command("bench", "--url", url, *BENCH)
    assert outcome.status == 1
    text = " ".join(outcome.text.split())
    assert "FAILED: request '9 tokens, 1'" in text
    assert STREAMS[how] in text
    assert STREAMS[how] in outcome.report["error"]


def test_bench_counts_errors_and_shows_them(command, faulty):
    """Warm-up passes, later requests fail: they are counted, and the median is that of the answered ones."""
    url, fault = faulty
    fault.how = "error later"
    outcome = command("bench", "--url", url, *BENCH)
    assert outcome.status == 1
    assert fault.answered == 6
    assert "FAILED: 3 of 4 requests" in outcome.text
    assert "the engine is on fire" in outcome.text
    (cell,) = outcome.report["cells"]
    assert (cell["requests"], cell["errors"]) == (4, 3)
    assert cell["ttft_p50"] == cell["ttft_p99"]
    assert len(outcome.report["errors"]) == 3


def test_bench_with_nothing_answered(command, faulty):
    url, fault = faulty
    fault.how = "error"
    outcome = command("bench", "--url", url, *BENCH, "--warmup", "0")
    assert outcome.status == 1
    (cell,) = outcome.report["cells"]
    assert (cell["errors"], cell["ttft_p50"], cell["input_tokens_per_second"]) == (4, None, None)


def test_bench_keeps_what_it_measured_before_a_point_that_fails(command, faulty):
    url, fault = faulty
    fault.how = "error above 9"
    outcome = command("bench", "--url", url, *BENCH[2:], "--tokens", "9,50,9")
    assert outcome.status == 1
    assert "stopped at 50 tokens x 2, warm-up: request '50 tokens, 1'" in " ".join(outcome.text.split())
    (cell,) = outcome.report["cells"]
    assert (cell["tokens"], cell["requests"], cell["errors"]) == (9, 4, 0)
    assert outcome.report["passed"] is False


def test_bench_counts_a_prefix_that_fails(command, faulty):
    url, fault = faulty
    fault.how = "error above 9"
    hit = ["--mode", "hit", "--tokens", "12", "--suffix-tokens", "3", "--warmup", "0"]
    outcome = command("bench", "--url", url, *BENCH[2:], *hit)
    assert outcome.status == 1
    assert any("prefix 1" in error for error in outcome.report["errors"])
    (cell,) = outcome.report["cells"]
    assert cell["ttft_p50"] is None


@pytest.mark.parametrize("name", ["verify", "bench"])
def test_a_server_without_a_model(command, faulty, name):
    url, fault = faulty
    fault.how = "no model"
    outcome = command(name, "--url", url)
    assert outcome.status == 1
    assert 'the answer names no model: {"oops":1}' in " ".join(outcome.text.split())


@pytest.mark.parametrize("name", ["verify", "bench"])
def test_no_server(command, name):
    outcome = command(name, "--url", "http://127.0.0.1:9")
    assert outcome.status == 1
    assert "GET http://127.0.0.1:9/v1/models: ConnectError" in " ".join(outcome.text.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify"], "either --url or --demo"),
        (["verify", "--url", "x", "--demo"], "either --url or --demo"),
        (["verify", "--demo", "--baseline-url", "x"], "with itself"),
        (["verify", "--url", "x", "--lengths", "9,0"], "'9,0' is no list of positive"),
        (["verify", "--url", "x", "--needle-tokens", "9"], "at least 32 tokens"),
        (["verify", "--url", "x", "--logprobs", "0"], "at least one"),
        (["verify", "--url", "x", "--prompts", "no-such-file"], "does not exist"),
        (["bench"], "--url"),
        (["bench", "--url", "x", "--mode", "warm"], "cold, hit"),
        (["bench", "--url", "x", "--tokens", "8k"], "'8k' is no list"),
        (["bench", "--url", "x", "--concurrency", "-1"], "no list"),
        (["bench", "--url", "x", "--plot", "no/such/dir/a.png"], "there is no directory"),
        (["bench", "--url", "x", "--plot", "a.pdf"], "is no PNG file"),
        (["bench", "--url", "x", "--seed", "-1"], "'--seed': Input should be greater"),
        (["verify", "--url", "x", "--seed", "-1"], "'--seed': Input should be greater"),
        (["bench", "--url", "x", "--plot", "/proc/a.png"], "cannot be written"),
    ],
)
def test_bad_arguments(command, arguments, words):
    outcome = command(*arguments)
    assert outcome.status == 2
    assert words in " ".join(outcome.text.replace("│", " ").split())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{oops", "line 2: no JSON"),
        ("[]", "line 2: neither a text nor"),
        ("[1, -2]", "line 2: neither a text nor"),
        ("[true]", "line 2: neither a text nor"),
        ('{"name": "x"}', "line 2: neither a text nor"),
        ("3", "line 2: neither a text nor"),
    ],
)
def test_bad_prompt_files(command, tmp_path, line, words):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"[1, 2]\n{line}\n")
    outcome = command("verify", "--url", "x", "--prompts", str(file))
    assert outcome.status == 2
    assert words in " ".join(outcome.text.replace("│", " ").split())


def test_an_empty_prompt_file(command, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n")
    assert command("verify", "--url", "x", "--prompts", str(file)).status == 2


def test_a_text_is_scored_by_the_token_ids_that_the_server_names(command, faulty, tmp_path):
    url, _ = faulty
    file = tmp_path / "prompts.jsonl"
    file.write_text('"What does a replay layer own?"\n')
    outcome = command("verify", "--url", url, *VERIFY, "--prompts", str(file))
    assert [(p["name"], p["tokens"]) for p in outcome.report["prompts"]] == [("random 9", 9), ("line 1", 20)]
    # This server answers alike whatever it sees, also the last window only: the yardstick says so.
    assert outcome.status == 1
    assert [c["name"] for c in outcome.report["checks"] if not c["passed"]] == ["mean KL against last window only"]
