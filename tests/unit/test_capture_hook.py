"""When the replay graphs are captured: right after the model's, before a speculator's, on every vLLM version."""

import contextlib
from types import SimpleNamespace

import pytest

from vllm_ascend_replay import model_state
from vllm_ascend_replay.model_state import ReplayModelState, capture_replay_graphs


@pytest.fixture
def run(monkeypatch):
    """``run(...)``: what a runner's ``capture_model`` did, in order, and what it returned."""

    def run(*, native: bool, model_graphs: bool, graphs: bool = True, times: int = 1, pcp: bool = False):
        done = []

        class State(ReplayModelState):
            def __init__(self):
                self.replay_graphs = SimpleNamespace(captures=0) if graphs else None

            def capture_inner_cudagraphs(self, *given):
                done.append("replay")
                assert given == ("pcp buffers" if pcp else "buffers", "tables", "groups", "config")
                if self.replay_graphs is not None:
                    self.replay_graphs.captures += 1

        class Manager:
            def capture(self, model):
                assert model == "model"
                done.append("model")

        class Runner:
            input_buffers, block_tables, attn_groups, kv_cache_config = "buffers", "tables", "groups", "config"
            pcp_manager = SimpleNamespace(input_buffers="pcp buffers") if pcp else None

            def __init__(self):
                self.model_state, self.cudagraph_manager = State(), Manager()

            def capture_model(self, *, profile_only=False):
                if not model_graphs:
                    return 0
                self.cudagraph_manager.capture("model")
                if native:
                    buffers = (self.pcp_manager or self).input_buffers
                    self.model_state.capture_inner_cudagraphs(buffers, "tables", "groups", "config")
                done.append("speculator")
                return 7

        base = type("ModelState", (), {"capture_inner_cudagraphs": None} if native else {})
        monkeypatch.setattr(model_state, "ModelState", base)
        monkeypatch.setattr(model_state, "freeze_gc_for_cudagraph_capture", contextlib.nullcontext)
        free = iter([100, 40] * times)
        monkeypatch.setattr(model_state, "free_bytes", lambda: next(free))
        capture_replay_graphs(Runner)
        capture_replay_graphs(Runner)
        runner = Runner()
        results = [runner.capture_model(profile_only=bool(i)) for i in range(times)]
        assert "capture" not in vars(runner.cudagraph_manager)
        return done, results

    return run


@pytest.mark.parametrize("native", [True, False], ids=["0.32", "0.30"])
@pytest.mark.parametrize("pcp", [False, True])
def test_between_the_model_and_the_speculator(run, native, pcp):
    order = ["model", "replay", "speculator"]
    assert run(native=native, model_graphs=True, pcp=pcp) == (order, [7])


@pytest.mark.parametrize("native", [True, False], ids=["0.32", "0.30"])
def test_again_after_memory_profiling(run, native):
    assert run(native=native, model_graphs=True, times=2)[0] == ["model", "replay", "speculator"] * 2


@pytest.mark.parametrize("native", [True, False], ids=["0.32", "0.30"])
def test_without_graphs_of_the_model(run, native):
    assert run(native=native, model_graphs=False) == (["replay"], [60])


def test_without_replay_graphs(run):
    assert run(native=False, model_graphs=True, graphs=False) == (["model", "speculator"], [7])
    assert run(native=False, model_graphs=False, graphs=False) == ([], [0])
