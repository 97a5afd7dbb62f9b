"""Decoder replay through the real vllm-ascend engine, off and on, on emulated operators: `make demo-ascend`.

Runs vLLM's `LLM` (engine core, vllm-ascend's worker, Model Runner V2, scheduler with prefix caching and async
scheduling at their defaults) three times on a tiny DeepSeek-V4.1: without this package, with it, and with
ASCEND_REPLAY_KEEP=exact and graphs (recorded ones: decodes and replay layers). Prints the rows each layer ran and the
tokens, and compares. Exit status 0 if the lossless run gave the tokens of the run without the package, both runs with
it dropped rows, and the last one ran replay batches out of graphs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

LENGTHS = (300, 700, 40)
GRAPHS = "VLLM_USE_BREAKABLE_CUDAGRAPH"
REPLAY = {"VLLM_PLUGINS": "ascend,ascend_model,vllm_ascend_replay", GRAPHS: "0"}
MODES = {
    "without": {"VLLM_PLUGINS": "ascend,ascend_model", GRAPHS: "0"},
    "replay": REPLAY,
    "exact": {**REPLAY, "ASCEND_REPLAY_KEEP": "exact", GRAPHS: "1"},
}


def serve(path: str) -> None:
    """One engine: writes `{"rows": {layer: rows}, "tokens": [[..]], "model": name, "stats": {..}}` to `path`."""
    from tests.npu_emulator import activate, patches

    activate()
    from vllm import LLM, SamplingParams

    from tests.npu_emulator.rank import randomize
    from tests.npu_emulator.session import tokens
    from tests.npu_emulator.tiny import engine_args
    from vllm_ascend_replay import stats

    engine = {"enable_prefix_caching": None, "num_gpu_blocks_override": 256}
    if os.environ[GRAPHS] == "1":
        compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        engine |= {"enforce_eager": False, "compilation_config": compilation}
    llm = LLM(**engine_args(engine=engine))
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    randomize(runner.model)
    patches.MOE_CALLS.clear()
    stats.reset()
    prompts = [{"prompt_token_ids": tokens(n, i)} for i, n in enumerate(LENGTHS)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    result = {
        "rows": patches.rows_per_layer(),
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "model": type(runner.model).__name__,
        "stats": stats.snapshot(),
    }
    with open(path, "w") as file:
        json.dump(result, file)


def run(mode: str, folder: str) -> dict:
    """Runs one mode in a process of its own."""
    path = os.path.join(folder, f"{mode}.json")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ASCEND_REPLAY")}
    subprocess.run([sys.executable, __file__, path], env={**environment, **MODES[mode]}, check=True)
    with open(path) as file:
        return json.load(file)


def main() -> int:
    if len(sys.argv) > 1:
        serve(sys.argv[1])
        return 0
    with tempfile.TemporaryDirectory() as folder:
        results = {mode: run(mode, folder) for mode in MODES}
    profile = os.environ.get("NPU_EMU_DEVICE", "A2")
    print(f"profile {profile}, prompts of {', '.join(map(str, LENGTHS))} tokens, 8 new tokens each")
    layers = sorted(results["without"]["rows"], key=int)
    print("rows per layer".ljust(16), *(layer.rjust(6) for layer in layers))
    for mode, result in results.items():
        print(f"  {mode}".ljust(16), *(str(result["rows"][layer]).rjust(6) for layer in layers), " ", result["model"])
    for i, length in enumerate(LENGTHS):
        print(f"tokens after {length}")
        for mode, result in results.items():
            same = "" if result["tokens"][i] == results["without"]["tokens"][i] else "   differs"
            print(f"  {mode}".ljust(16), *result["tokens"][i], same)
    last = layers[-1]
    dropped = all(results[m]["rows"][last] < results["without"]["rows"][last] for m in ("replay", "exact"))
    lossless = results["exact"]["tokens"] == results["without"]["tokens"]
    in_graphs = results["exact"]["stats"]["graph_steps"] > 0
    print("rows dropped:", "yes" if dropped else "NO")
    print("replay batches of the exact run out of graphs:", "yes" if in_graphs else "NO")
    print("exact equals the run without the package:", "yes" if lossless else "NO")
    return 0 if dropped and lossless and in_graphs else 1


if __name__ == "__main__":
    sys.exit(main())
