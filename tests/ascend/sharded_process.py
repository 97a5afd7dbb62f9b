"""`python -m tests.ascend.sharded_process FOLDER TOPOLOGY...`: ranks that share a batch's rows, against one rank.

Imports vllm-ascend once, then forks for each topology a single rank, which runs every scenario and leaves its results
in FOLDER, and then the ranks, which run the same and compare every hidden state and token. Each rank writes
`FOLDER/TOPOLOGY/SCENARIO.RANK.json`: by scenario the largest difference and what shows that replay did something.
"""

import json
import multiprocessing
import os
import pathlib
import random
import sys
import time
import traceback
from dataclasses import dataclass, field

TIMEOUT, GRACE = 500, 8
"""Seconds that ranks may take, and that those left have once one has failed."""


@dataclass(frozen=True)
class Topology:
    tp: int = 1
    pcp: int = 1
    dp: int = 1
    dsa_cp: bool = False
    scenarios: tuple[str, ...] = ("final", "chunk")
    model: dict = field(default_factory=dict)

    @property
    def size(self):
        return self.tp * self.pcp * self.dp


TOPOLOGIES = {
    "sp2": Topology(tp=2, scenarios=("final", "chunk", "single", "stale dp_metadata")),
    "sp4": Topology(tp=4, model={"o_groups": 4}),
    "dp2-sp2": Topology(tp=2, dp=2),
    "pcp2": Topology(pcp=2, scenarios=("final", "chunk", "single", "no restore index", "wrong owner", "no rope")),
    "pcp4": Topology(pcp=4),
    "pcp2-sp2": Topology(pcp=2, tp=2),
    "dp2-pcp2": Topology(dp=2, pcp=2),
    # rc2 refuses DSA-CP with MRV2: these are its row layouts, behind that check.
    "dsa-cp2": Topology(
        tp=2, dsa_cp=True, scenarios=("final", "chunk", "after the cut", "unmoved top-k rows", "query metadata")
    ),
}
CONTROLS = ("stale dp_metadata", "no restore index", "wrong owner", "no rope", "unmoved top-k rows", "query metadata")
USUAL = {"A2": ("sp4", "dsa-cp2"), "A5": ("dp2-sp2", "pcp2", "pcp2-sp2")}
"""By profile: between them every kind of sharing. The rest is slow: the same code with other numbers of ranks."""
MIXED = [("a", 300, 1), ("b", 71, 2), ("c", 333, 3)]


def requests_of(scenario, dp_rank):
    """(name, prompt length, seed) of each request; the second DP rank has one short prompt and is idle soon."""
    if dp_rank:
        return [("z", 40, 4)]
    return [("a", 500, 1)] if scenario == "single" else MIXED


def build(topology, scenario, rank, folder, one):
    """A poisoned rank with replay on."""
    import tempfile

    from tests.ascend import support
    from tests.npu_emulator.rank import Rank
    from tests.npu_emulator.session import Session
    from tests.npu_emulator.tiny import make_vllm_config

    policy = "chunk" if scenario in ("chunk", "single") else "final"
    support.without_package()
    engine = {}
    if not one:
        engine = {
            "tensor_parallel_size": topology.tp,
            "prefill_context_parallel_size": topology.pcp,
            "distributed_executor_backend": "mp",
            "enable_expert_parallel": True,
            "additional_config": {
                "enable_flashcomm1": topology.tp > 1,
                "enable_pcp_o_proj_weight_sharding": False,
                "enable_pcp_embedding_lmhead_weight_sharding": False,
            },
        }
        if topology.dp > 1:
            engine |= {"data_parallel_size": topology.dp, "data_parallel_backend": "mp"}
    with support.settings(policy=policy):
        support.register()
        config = make_vllm_config(engine=engine, **topology.model)
        method = "file://" + tempfile.mktemp(prefix="rendezvous_")
        if not one:
            per_dp = topology.tp * topology.pcp
            p = config.parallel_config
            p.rank = rank % per_dp
            if topology.dp > 1:
                port = json.loads((folder / "port").read_text())
                p.data_parallel_rank = p.data_parallel_index = rank // per_dp
                p.data_parallel_master_ip, p.data_parallel_master_port = "127.0.0.1", port
                p._data_parallel_master_port_list = [port + i for i in range(1, 9)]
            method = f"file://{folder}/rendezvous"
            built = Rank(config, rank=rank % per_dp, method=method)
        else:
            built = Rank(config, method=method)
    Session(built)
    return built


def run(node, requests, chunk, steps=None):
    """Serve requests; returns (hidden states of the scheduled rows, rows by request, tokens) of each step."""
    from tests.npu_emulator.session import tokens

    node.scheduler.max_num_scheduled_tokens = chunk
    for name, length, seed in requests:
        node.add(name, tokens(length, seed), max_tokens=3)
    done = []
    while node.scheduler.has_unfinished_requests() if steps is None else len(done) < steps:
        if not node.scheduler.has_unfinished_requests():
            node.idle_step()
            done.append(None)
            continue
        out, state, result = node.step()
        hidden, manager = state.hidden_states, getattr(node.runner, "pcp_manager", None)
        if manager is not None:
            hidden = manager.restore_hidden_states(hidden)
        rows = sum(out.num_scheduled_tokens.values())
        done.append((hidden[:rows].clone(), dict(out.num_scheduled_tokens), result.sampled_token_ids))
    return done


STEPS_WITH_DP = 7


def serve(node, topology, scenario, dp_rank):
    from tests.npu_emulator import patches

    patches.MOE_CALLS.clear()
    chunk = 512 if scenario in ("chunk", "single") else 200
    steps = STEPS_WITH_DP if topology.dp > 1 else None
    done = run(node, requests_of(scenario, dp_rank), chunk, steps)
    return done, patches.rows_per_layer()


def one_rank(topology, folder):
    import torch

    from tests.npu_emulator import parallel

    parallel.pretend(tp=topology.tp, experts=topology.size)
    results, node = {}, None
    for scenario in topology.scenarios:
        if scenario in CONTROLS or scenario == "after the cut":
            continue
        for dp_rank in range(topology.dp):
            node = build(topology, scenario, 0, folder, one=True)
            single = Topology(dp=1)
            results[scenario, dp_rank] = serve(node, single, scenario, dp_rank)
    torch.save({n: p.detach().clone() for n, p in node.model.named_parameters()}, folder / "weights.pt")
    torch.save(results, folder / "one.pt")


def many_ranks(topology, folder, rank, scenarios):
    import torch

    from tests.ascend import sharded_controls
    from tests.npu_emulator import parallel

    parallel.join(folder / "weights.pt", rank, tp=topology.tp)
    if topology.dsa_cp:
        parallel.force_dsa_cp()
    expected, dp_rank = torch.load(folder / "one.pt"), rank // (topology.tp * topology.pcp)
    found = {}
    for scenario in scenarios:
        like = scenario if scenario in ("final", "chunk", "single") else "final"
        node = build(topology, scenario, rank, folder, one=False)
        with sharded_controls.applied(scenario, node):
            try:
                done, layers = serve(node, topology, like, dp_rank)
            except (AssertionError, RuntimeError, ValueError, IndexError) as error:
                if scenario not in CONTROLS:
                    raise
                found[scenario] = {"error": f"{type(error).__name__}: {error}"}
            else:
                found[scenario] = compare(done, layers, *expected[like, dp_rank])
    return found


def compare(done, layers, want, want_layers):
    real = [step for step in done if step is not None]
    assert len(real) == len(want), (len(real), len(want))
    worst, same, zero = 0.0, True, 0
    for (hidden, rows, tokens), (hidden1, rows1, tokens1) in zip(real, want):
        assert rows == rows1
        difference = (hidden.double() - hidden1.double()).abs().max().item()
        worst = difference if difference != difference or difference > worst else worst
        same &= tokens == tokens1
        zero += int((hidden == 0).all(-1).sum())
    return {
        "worst": None if worst != worst else worst,
        "same tokens": same,
        "rows": sum(len(h) for h, _, _ in real),
        "zero rows": zero,
        "zero rows of one rank": sum(int((h == 0).all(-1).sum()) for h, _, _ in want),
        "steps": len(done),
        "layers": layers,
        "layers of one rank": want_layers,
        "nan": any(bool(h.isnan().any()) for h, _, _ in real),
    }


def child(topology, folder, rank, scenarios):
    """Runs in a forked process, without `scenarios` as the single rank; the exit code says whether it went through."""
    try:
        import torch

        torch.set_num_threads(1)
        if not scenarios:
            one_rank(topology, folder)
        else:
            if topology.dp > 1:
                os.environ["VLLM_DP_RANK"] = str(rank // (topology.tp * topology.pcp))
            found = many_ranks(topology, folder, rank, scenarios)
            (folder / f"{scenarios[0]}.{rank}.json").write_text(json.dumps(found))
        code = 0
    except BaseException:
        (folder / f"{rank if scenarios else 'single'}.log").write_text(traceback.format_exc())
        code = 1
    sys.stdout.flush()
    # The rendezvous store may go away with rank 0 first; nothing is left to do.
    os._exit(code)


def run_together(topology, folder, scenarios):
    """Forks the ranks; whether all came through. Once one has failed, or ended a control, the others may hang."""
    context = multiprocessing.get_context("fork")
    ranks = topology.size if scenarios else 1
    processes = [context.Process(target=child, args=(topology, folder, rank, scenarios)) for rank in range(ranks)]
    for p in processes:
        p.start()
    end, some_ended = time.monotonic() + TIMEOUT, False
    while any(p.is_alive() for p in processes) and time.monotonic() < end:
        time.sleep(0.2)
        ended = [p.exitcode for p in processes if p.exitcode is not None]
        if not some_ended and (any(ended) or (ended and scenarios[:1] and scenarios[0] in CONTROLS)):
            some_ended, end = True, min(end, time.monotonic() + GRACE)
    for p in processes:
        if p.is_alive():
            p.kill()
            p.join()
    return not any(p.exitcode for p in processes)


def run_topology(name, folder):
    topology, folder = TOPOLOGIES[name], folder / name
    folder.mkdir()
    (folder / "port").write_text(str(random.Random(os.getpid()).randint(20000, 50000)))
    right = [s for s in topology.scenarios if s not in CONTROLS]
    # A control leaves its ranks who knows where: each has ranks of its own.
    for scenarios in ([], right, *([s] for s in topology.scenarios if s in CONTROLS)):
        (folder / "rendezvous").unlink(missing_ok=True)
        if not run_together(topology, folder, scenarios) and scenarios[:1] and scenarios[0] not in CONTROLS:
            return


def main():
    folder = pathlib.Path(sys.argv[1])
    from tests.npu_emulator import activate, freeze_imports

    activate()
    from tests.ascend import support

    support.remember_originals()
    freeze_imports()
    for name in sys.argv[2:] or TOPOLOGIES:
        run_topology(name, folder)


if __name__ == "__main__":
    main()
