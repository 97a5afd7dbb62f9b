#!/bin/bash
# Run a command on the GPU machine with the packed vLLM:  run.sh ARCHIVE COMMAND...
# The archive is unpacked once, beside the temporary files; the repository is the working directory.
set -e
archive=$1; shift
tree=${TMPDIR:-/tmp}/gpu-engine
if [ ! -e "$tree/.ready" ]; then
  mkdir -p "$tree"; tar -xJf "$archive" -C "$tree"; touch "$tree/.ready"
fi
export PYTHONPATH=$tree/vllm:$tree/site:$tree/plugin:$PWD
# FlashInfer is not there; a model directory without a tokenizer asks no hub.
export VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1
exec "$@"
