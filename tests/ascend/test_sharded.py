"""vllm-ascend's ranks that share a batch's rows: bit for bit one rank's results, and controls that are not.

One process imports vllm-ascend and forks every topology's ranks (`sharded_process`); sums are added in rank order.
DSA-CP is refused by rc2 with Model Runner V2: what runs here are its row layouts, behind that check.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.ascend.sharded_process import CONTROLS, TOPOLOGIES, USUAL
from tests.npu_emulator import ON_A5

ROOT = pathlib.Path(__file__).parents[2]
LAST_LAYER = "7"


def case(name, *values):
    """A topology's test; slow where the other profile has it."""
    return pytest.param(name, *values, marks=[] if name in USUAL["A5" if ON_A5 else "A2"] else pytest.mark.slow)


def scenarios(controls):
    """A case for each topology's right scenarios, or controls."""
    return [case(n, s) for n, t in TOPOLOGIES.items() for s in t.scenarios if (s in CONTROLS) == controls]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    """Results of every topology that a selected test names."""
    folder = tmp_path_factory.mktemp("sharded")
    mine = [item for item in request.session.items if item.path == request.path]
    wanted = {item.callspec.params["name"] for item in mine}
    command = [sys.executable, "-W", "ignore", "-m", "tests.ascend.sharded_process", str(folder), *sorted(wanted)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=1800, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def results_of(folder, name, scenario):
    """What every rank found; fails with the rank's traceback if one did not come through."""
    logs = [log.read_text() for log in (folder / name).glob("*.log")]
    results = []
    for rank in range(TOPOLOGIES[name].size):
        for file in (folder / name).glob(f"*.{rank}.json"):
            found = json.loads(file.read_text())
            if scenario in found:
                results.append(found[scenario])
    assert scenario in CONTROLS or len(results) == TOPOLOGIES[name].size, "\n".join(logs)
    return results


@pytest.mark.parametrize(("name", "scenario"), scenarios(controls=False))
def test_ranks_equal_one_rank(folder, name, scenario):
    for rank in results_of(folder, name, scenario):
        assert rank["worst"] == 0.0
        assert rank["same tokens"]
        assert not rank["nan"]
        # The same rows were left out, and they are zero.
        assert rank["zero rows"] == rank["zero rows of one rank"]
        layers = rank["layers"]
        assert layers[LAST_LAYER] < layers["0"] or not rank["zero rows"]


@pytest.mark.parametrize("name", [case("sp2"), case("sp4")])
def test_ranks_share_the_rows(folder, name):
    first, *_ = results_of(folder, name, "chunk")
    share, padding = first["layers of one rank"][LAST_LAYER] / TOPOLOGIES[name].size, first["steps"]
    assert share <= first["layers"][LAST_LAYER] <= share + padding


@pytest.mark.parametrize("name", [case("pcp2")])
def test_ranks_run_as_many_rows_as_the_fullest(folder, name):
    """All kept rows are rank 0's; rank 1 runs as many rows of padding."""
    for rank in results_of(folder, name, "single"):
        assert rank["layers"][LAST_LAYER] == rank["layers of one rank"][LAST_LAYER]


@pytest.mark.parametrize("name", [case("dp2-sp2"), case("dp2-pcp2")])
def test_an_idle_rank_joins(folder, name):
    busy, *_, idle = results_of(folder, name, "final")
    assert busy["zero rows"]
    assert busy["rows"] > 2 * idle["rows"]
    # The idle rank ran the last layer in steps that had no row of its own.
    assert idle["layers"][LAST_LAYER] > idle["layers of one rank"][LAST_LAYER] / TOPOLOGIES[name].size


@pytest.mark.parametrize(("name", "scenario"), scenarios(controls=True))
def test_controls_are_noticed(folder, name, scenario):
    results = results_of(folder, name, scenario)
    # A rank that hangs because another one failed has no result.
    assert results
    assert any("error" in r or r["nan"] or r["worst"] > 2.0**-6 for r in results)
