"""One CPU rank: the real NPUModelRunner and the real scheduler, stepped by hand."""

import hashlib
import tempfile

import torch
from vllm.config import set_current_vllm_config

from . import patches

_groups_ready = False


def init_groups(vllm_config, rank=0, method=None):
    """Joins the process groups of `vllm_config` once per process; `method`: a torch.distributed init method."""
    global _groups_ready
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm_ascend.distributed.parallel_state import init_ascend_model_parallel

    if _groups_ready:
        return
    _groups_ready = True
    method = method or "file://" + tempfile.mktemp(prefix="rendezvous_")
    p = vllm_config.parallel_config
    with set_current_vllm_config(vllm_config):
        init_distributed_environment(p.world_size, rank, method, rank, "gloo")
        ensure_model_parallel_initialized(
            p.tensor_parallel_size,
            p.pipeline_parallel_size,
            p.prefill_context_parallel_size,
            p.decode_context_parallel_size,
        )
        init_ascend_model_parallel(vllm_config.parallel_config, vllm_config.engram_config)


def forget_process_state():
    """Forgets what is process-wide and set by the first configuration: RoPE tables, parameters of FULL graphs."""
    from vllm_ascend.compilation import acl_graph
    from vllm_ascend.ops import rope_dsv4

    rope_dsv4._ROPE_STATE = rope_dsv4.RopeGlobalState()
    for name in ("_graph_params", "_draft_graph_params", "_draft_graph_prefill_params"):
        assert hasattr(acl_graph, name)
        setattr(acl_graph, name, None)


class Rank:
    """Model, caches and scheduler of one configuration.

    Args:
        vllm_config: from `tiny.make_vllm_config`.
        num_blocks: KV cache blocks.
        seed: of the weights.
        rank, method: this process's rank and where the ranks meet, for more than one.
        scheduler_cls: scheduler class; default vLLM's `Scheduler`.
    """

    before_execute = None
    """Called with each scheduler output before the runner executes it."""

    def __init__(self, vllm_config, *, num_blocks=256, seed=0, rank=0, method=None, scheduler_cls=None):
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager
        from vllm_ascend.ascend_config import init_ascend_config
        from vllm_ascend.utils import register_ascend_customop
        from vllm_ascend.worker.v2.model_runner import NPUModelRunner

        patches.install()
        forget_process_state()
        self.config = vllm_config
        init_ascend_config(vllm_config)
        register_ascend_customop(vllm_config)
        init_groups(vllm_config, rank, method)
        with set_current_vllm_config(vllm_config):
            self.runner = NPUModelRunner(vllm_config, torch.device("cpu"))
            self.runner.load_model()
            if self.drafter is not None:
                # First: it shares the target's embedding and head.
                randomize(self.drafter.model, seed)
            randomize(self.model, seed)
            vllm_config.cache_config.kv_cache_layout = "LBNHC"
            vllm_config.cache_config.num_gpu_blocks_override = num_blocks
            specs = self.runner.get_kv_cache_spec()
            (self.kv_config,) = get_kv_cache_configs(vllm_config, [specs], [1 << 32])
            self.kv_config.kv_cache_layout = vllm_config.cache_config.kv_cache_layout
            vllm_config.cache_config.num_gpu_blocks = self.kv_config.num_blocks
            self.runner.initialize_kv_cache(self.kv_config)
            if self.kv_config.needs_kv_cache_zeroing:
                self.runner._init_kv_zero_meta()
        self.scheduler = (scheduler_cls or Scheduler)(
            vllm_config=vllm_config,
            kv_cache_config=self.kv_config,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=vllm_config.cache_config.block_size,
            log_stats=False,
        )
        self.hasher = None
        if self.scheduler.kv_cache_manager.enable_caching:
            from vllm.utils.hashing import sha256
            from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

            init_none_hash(sha256)
            self.hasher = get_request_block_hasher(self.scheduler.kv_cache_manager.coordinator.hash_block_size, sha256)
        # Triton's interpreter cannot run the log-softmax kernel; only the rows matter here.
        self.runner.prompt_logprobs_worker.compute_prompt_logprobs = lambda *args, **kwargs: {}

    @property
    def model(self):
        return self.runner.model

    @property
    def drafter(self):
        """The runner's speculator, None without one."""
        return self.runner.speculator

    @property
    def state(self):
        """The runner's model state."""
        return self.runner.model_state

    @property
    def text(self):
        """The DeepseekV41Model inside the model."""
        return self.model.language_model.model

    @property
    def layers(self):
        """Every module that owns or serves a KV cache, by name."""
        return self.config.compilation_config.static_forward_context

    def add(self, req_id, tokens, max_tokens=4, **sampling):
        """Hands a greedy request to the scheduler."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **sampling)
        self.scheduler.add_request(
            Request(
                request_id=req_id,
                prompt_token_ids=list(tokens),
                sampling_params=params,
                pooling_params=None,
                block_hasher=self.hasher,
            )
        )

    def step(self):
        """One scheduler step -> (scheduler output, the runner's execution state or None, runner output)."""
        out = self.scheduler.schedule()
        if self.before_execute is not None:
            self.before_execute(out)
        with set_current_vllm_config(self.config):
            first = self.runner.execute_model(out)
            state = self.runner.execute_model_state
            result = first if first is not None else self.runner.sample_tokens(None)
            if hasattr(result, "get_output"):
                result = result.get_output()
        self.scheduler.update_from_output(out, result)
        if self.drafter is not None and state is not None:
            self.scheduler.update_draft_token_ids(self.runner.take_draft_token_ids())
        return out, state, result

    def capture(self):
        """What the worker does at the end of start-up: lets the runner capture graphs; returns their bytes."""
        from vllm.v1.worker.workspace import init_workspace_manager

        init_workspace_manager(torch.device("cpu"))
        with set_current_vllm_config(self.config):
            return self.runner.capture_model()

    def idle_step(self, num_tokens=1):
        """What the engine runs on a rank that has nothing to do while another one has."""
        with set_current_vllm_config(self.config):
            self.runner._dummy_run(num_tokens, uniform_decode=True)

    def run(self, limit=10_000):
        """Steps until every request is done; returns the steps."""
        steps = []
        while self.scheduler.has_unfinished_requests() and len(steps) < limit:
            steps.append(self.step())
        return steps


@torch.no_grad()
def randomize(model, seed=0):
    """Weights by name, scaled so that activations stay near one; independent of the order of the parameters.

    Each tensor is drawn whole, so sharded parameters of a tensor-parallel rank need their shard cut out instead:
    `randomize_shard`.
    """
    for name, p in model.named_parameters():
        p.copy_(draw(name, p.shape, seed).to(p.dtype))
    refresh_derived(model)


def draw(name, shape, seed):
    """float32 values of one parameter."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:6], "little")
    v = torch.randn(shape, generator=torch.Generator().manual_seed(key), dtype=torch.float32)
    leaf = name.split(".")[-1]
    if "norm" in name and leaf == "weight":
        return 1 + 0.1 * v
    if name.endswith(("base", "scale", "attn_sink", "bias", "bias_vl")):
        return 0.3 * v
    if "embed_tokens" in name:
        return v
    stacked = any(part in name for part in ("wo_a", "experts.w", "w13", "w2_"))
    return v * (shape[-2] if stacked else shape[-1]) ** -0.5


def refresh_derived(model):
    """Copies of weights that modules keep in another dtype."""
    for m in model.modules():
        if hasattr(m, "weight_fp32"):
            m.weight_fp32.copy_(m.weight.float())
