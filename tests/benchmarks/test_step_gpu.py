"""The step benchmark's driver and arms at tiny sizes, so that it keeps running where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support import tape_graphs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="measures there, instead")


def test_chunks():
    from benchmarks.steps import chunks

    assert chunks([5, 5], 8) == [[(0, 0, 5), (1, 0, 3)], [(1, 3, 2)]]
    assert chunks([16], 8) == [[(0, 0, 8)], [(0, 8, 8)]]


def test_targets_can_be_missed():
    from benchmarks.step_gpu import missed_targets

    def row(of_off: float, of_ideal: float, kernels: int) -> dict:
        graphs = {"of_off": of_off, "of_ideal": of_ideal, "first_step": {"kernels": kernels}}
        return {"requests": 1, "isl": 16384, "arms": {"graphs": graphs, "floor": {"first_step": {"kernels": 5}}}}

    decode = {"requests": 1, "eager": {"of_off": 1.0}, "full_graph": {"of_off": 1.02}}
    assert missed_targets([row(0.6, 0.98, 5)], []) == []
    assert len(missed_targets([row(1.02, 0.96, 6)], [decode])) == 4


def test_every_arm_runs(monkeypatch):
    from benchmarks import step_gpu
    from benchmarks.steps import StepHost

    tape_graphs.install(monkeypatch)
    monkeypatch.setattr(
        step_gpu,
        "SETTINGS",
        {name: {**values, "ASCEND_REPLAY_GRAPH_SIZES": "8,32"} for name, values in step_gpu.SETTINGS.items()},
    )
    host = StepHost(
        preset="tiny",
        overrides={"hc_sinkhorn_iters": 2, "compute_dtype": "float32"},
        max_num_tokens=48,
        max_model_len=128,
        max_num_reqs=4,
        block_size=16,
    )
    bench = step_gpu.Bench(host, step_gpu.ARMS, host.pages_for(2, 96))
    result = step_gpu.run(bench, [(1, 96)], step_gpu.ARMS, [2], context=20, quick=True, repeats=2)
    (row,) = result["prefills"]
    window, exact = host.config.sliding_window, bench.states["exact"].replay_keep_last
    arms = row["arms"]
    assert (row["steps"], row["steps_with_ends"]) == (2, 1)
    assert set(arms) == set(step_gpu.ARMS)
    assert [arms[name]["kept_rows"] for name in ("eager", "graphs", "exact")] == [window, window, exact]
    for name, figures in arms.items():
        assert figures["ms"] > 0
        assert ("of_ideal" in figures) == (name in step_gpu.IDEALS)
    # What a prompt's end says is the unbounded model's with enough rows, and another's with a window of them.
    assert arms["exact"]["difference_to_off"] < 1e-4 < arms["graphs"]["difference_to_off"]
    assert arms["eager"]["difference_to_off"] == pytest.approx(arms["graphs"]["difference_to_off"])
    assert result["decodes"][0]["eager"]["of_off"] > 0
