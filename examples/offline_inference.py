"""Offline inference with decoder replay, and what it saved.

    python examples/offline_inference.py               # a small model with random weights, on any machine
    python examples/offline_inference.py --model DIR   # a DeepSeek-V4.1 checkpoint

Nothing has to be switched on: the package is a vLLM plugin, and vLLM loads it where it is installed.
"""

import argparse
import os
import random
import tempfile

os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")  # decoder replay is a feature of Model Runner V2


def main() -> None:
    parser = argparse.ArgumentParser(description="Offline inference with decoder replay.")
    parser.add_argument("--model", help="a DeepSeek-V4.1 checkpoint; default: a small model with random weights")
    arguments = parser.parse_args()

    from vllm import LLM, SamplingParams

    if arguments.model:
        llm = LLM(model=arguments.model)
        vocabulary = llm.get_tokenizer().vocab_size
    else:
        from vllm_ascend_replay.reference.config import write_model

        llm = LLM(
            model=str(write_model(tempfile.mkdtemp())),
            load_format="dummy",  # the model makes its own random weights
            skip_tokenizer_init=True,  # it has no tokenizer: prompts are token ids
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            max_num_batched_tokens=256,  # longer prompts run in chunks
            kv_cache_memory_bytes=64 << 20,
        )
        vocabulary = 97

    draw = random.Random(0)
    prompts = [{"prompt_token_ids": [draw.randrange(vocabulary) for _ in range(n)]} for n in (61, 301, 577)]
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    for output in llm.generate(prompts, sampling, use_tqdm=False):
        print(f"{len(output.prompt_token_ids)} prompt tokens -> {output.outputs[0].token_ids}")

    # One dictionary per worker. Where replay is off, vLLM's start-up log says why and this method does not exist.
    for counted in llm.collective_rpc("ascend_replay_stats"):
        print(
            f"the replay layers ran {counted['rows_kept']} of {counted['rows_in']} rows; "
            f"{counted['skipped_steps']} of {counted['steps']} steps skipped them"
        )


if __name__ == "__main__":
    main()
