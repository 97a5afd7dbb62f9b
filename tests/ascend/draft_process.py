"""The whole engine with replay, without and with a DSpark drafter, as a process: prints what each served as JSON.

Used by `test_engine_drafts.py`: `LLM(...)` with async scheduling and prefix caching, every prompt sent twice.
"""

import json


def main() -> None:
    from tests.npu_emulator import activate

    activate()
    from vllm import LLM, SamplingParams

    from tests.ascend import support
    from tests.npu_emulator.rank import randomize
    from tests.npu_emulator.session import tokens
    from tests.npu_emulator.tiny import DRAFTS, DSPARK, engine_args, say_few_words
    from vllm_ascend_replay import stats

    support.register()
    prompts = [{"prompt_token_ids": tokens(n, n)} for n in (300, 170)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    engine = {"enable_prefix_caching": None, "num_gpu_blocks_override": 256, "disable_log_stats": False}
    for drafts in ({}, DRAFTS):
        llm = LLM(**engine_args(engine={**engine, **drafts}, max_tokens=128, **DSPARK))
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        models = [runner.model] if runner.speculator is None else [runner.speculator.model, runner.model]
        for model in models:
            randomize(model)
        say_few_words(*models)
        stats.reset()
        served = [[list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)] for _ in "12"]
        metrics = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
        asynchronous = llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        result = {"tokens": served, "metrics": metrics, "stats": stats.snapshot(), "async": asynchronous}
        print("SERVED " + json.dumps(result))
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
