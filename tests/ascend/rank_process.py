"""One rank of several, as a process: `python -m tests.ascend.rank_process FILE`, FILE a JSON job; see `Job`.

Writes what it found beside the job, as `FILE.RANK`. Used by `test_ranks.py`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field


@dataclass
class Job:
    """What every rank of a group does."""

    ranks: int
    kind: str
    """"dp" or "tp"."""
    port: int
    prompts: list[dict[str, int]]
    """Per DP rank, or one for all TP ranks: request name -> prompt length."""
    steps: int
    """Steps every DP rank takes; a rank with nothing to do runs an idle one."""
    chunk: int = 200
    max_tokens: int = 3
    keep: str = "window"
    graph_sizes: str = ""
    """Sizes of replay graphs; none: eager."""
    drafts: bool = False
    """Beside the DSpark drafter."""
    replay: bool = True
    weights: str = ""
    """File with whole weights, for TP."""
    config: dict = field(default_factory=dict)


def write(job: Job, path: str) -> None:
    with open(path, "w") as file:
        json.dump(asdict(job), file)


def main() -> None:
    path, rank = sys.argv[1], int(sys.argv[2])
    with open(path) as file:
        job = Job(**json.load(file))
    if job.kind == "dp":
        os.environ["VLLM_DP_RANK"] = str(rank)
    from tests.npu_emulator import activate

    activate()
    from tests.ascend import support

    support.remember_originals()
    result = {"dp": run_dp, "tp": run_tp}[job.kind](job, rank)
    with open(f"{path}.{rank}", "w") as file:
        json.dump(result, file)
    # The rendezvous store may go away with rank 0 first; nothing is left to do.
    sys.stdout.flush()
    os._exit(0)


def run_dp(job: Job, rank: int) -> dict:
    import torch
    import torch.distributed as dist
    from vllm.distributed import get_dp_group
    from vllm.forward_context import get_forward_context

    from tests.ascend import support
    from tests.npu_emulator import patches
    from tests.npu_emulator.checks import report
    from tests.npu_emulator.graphs import LOG, kernel
    from tests.npu_emulator.rank import Rank
    from tests.npu_emulator.session import Session, Trace, poison, tokens
    from tests.npu_emulator.tiny import DRAFTS, DSPARK, make_vllm_config

    engine = {"data_parallel_size": job.ranks, "data_parallel_backend": "mp"}
    if job.graph_sizes:
        engine |= {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "NONE"}}
    drafter = DSPARK if job.drafts else {}
    if job.drafts:
        engine |= DRAFTS
    with support.settings(keep=job.keep, graph_sizes=job.graph_sizes or None):
        if job.replay:
            support.register()
        config = make_vllm_config(engine=engine, **drafter, **job.config)
        p = config.parallel_config
        p.data_parallel_rank = p.data_parallel_index = rank
        p.data_parallel_master_ip, p.data_parallel_master_port = "127.0.0.1", job.port
        p._data_parallel_master_port_list = [job.port + i for i in range(1, 6)]
        session = Session(Rank(config))

    real, mismatches, late_rows, draft_rows = patches.moe_forward_impl, [], [], []

    def moe(runner, hidden_states, *args, **kwargs):
        """The exchange a MoE layer owes its group: every rank must be in the same layer, with the rows agreed on."""
        stack, _, number = runner.layer_name.removesuffix(".mlp.experts").rpartition(".")
        layer = int(number) + (8 if stack.endswith("mtp") else 0)
        mine = torch.tensor([layer, hidden_states.shape[0]])
        everyone = [torch.empty_like(mine) for _ in range(job.ranks)]
        dist.all_gather(everyone, mine, group=get_dp_group().cpu_group)
        agreed = get_forward_context().dp_metadata.num_tokens_across_dp_cpu.tolist()
        if {int(t[0]) for t in everyone} != {layer} or [int(t[1]) for t in everyone] != agreed:
            mismatches.append((layer, [t.tolist() for t in everyone], agreed))
        if layer == 7:
            late_rows.append([int(t[1]) for t in everyone])
        if layer == 8:
            draft_rows.append([int(t[1]) for t in everyone])
        return real(runner, hidden_states, *args, **kwargs)

    from vllm_ascend.ops.fused_moe.fused_moe import AscendMoERunner

    AscendMoERunner._forward_impl = kernel(moe)
    rank_obj = session.rank
    if job.graph_sizes:
        rank_obj.capture()
        poison(rank_obj)
        late_rows.clear()
    rank_obj.scheduler.max_num_scheduled_tokens = job.chunk
    for i, (name, length) in enumerate(job.prompts[rank].items()):
        ids = tokens(length, 10 * rank + i)
        session.traces[name] = Trace(list(ids), length)
        rank_obj.add(name, ids, max_tokens=job.max_tokens)
    for _ in range(job.steps):
        if rank_obj.scheduler.has_unfinished_requests():
            session.step()
        else:
            rank_obj.idle_step()
    reports = {name: asdict(report(session, name)) for name in job.prompts[rank]}
    return {
        "mismatches": mismatches,
        "late_rows": late_rows,
        "draft_rows": draft_rows,
        "draft_nan": any(bool(d.hidden.isnan().any()) for t in session.traces.values() for d in t.drafts),
        "replays": LOG.count("replay"),
        "kept": [s.kept for s in session.steps],
        "reports": reports,
        "unfinished": rank_obj.scheduler.has_unfinished_requests(),
    }


def run_tp(job: Job, rank: int) -> dict:
    import torch

    from tests.ascend import support
    from tests.npu_emulator import sharding
    from tests.npu_emulator.rank import Rank
    from tests.npu_emulator.session import Session, tokens
    from tests.npu_emulator.tiny import make_vllm_config

    sharding.install(job.ranks if job.ranks > 1 else 2, pretend=job.ranks == 1)
    engine = {"tensor_parallel_size": job.ranks, "distributed_executor_backend": "mp"} if job.ranks > 1 else {}
    with support.settings(keep=job.keep):
        if job.replay:
            support.register()
        config = make_vllm_config(engine=engine, **job.config)
        config.parallel_config.rank = rank
        session = Session(Rank(config, rank=rank, method=f"tcp://127.0.0.1:{job.port}" if job.ranks > 1 else None))
    if job.ranks == 1:
        sharding.save(session.rank.model, job.weights)
    else:
        sharding.load(session.rank.model, job.weights, rank, job.ranks)
    prompts = {name: tokens(n, i) for i, (name, n) in enumerate(job.prompts[0].items())}
    session.run(prompts, job.chunk, max_tokens=job.max_tokens)
    torch.save(
        {name: torch.cat([r.hidden for r in session.traces[name].rows]) for name in prompts},
        f"{job.weights}.{job.ranks}.{rank}",
    )
    return {
        "kept": [s.kept for s in session.steps],
        "tokens": {name: session.traces[name].output for name in prompts},
    }


if __name__ == "__main__":
    main()
