from vllm_ascend_replay import stats


def test_counters_and_snapshot_is_a_copy():
    stats.reset()
    counters = stats.current()
    counters.count_replay(700, 128, 0)
    counters.count_replay(512, 0, 0)
    counters.count_replay(300, 0, 1)
    counters.count_replay(300, 7, 9, graph=True)
    counters.count_full(40, "model graph")
    counters.count_full(3)
    snapshot = stats.snapshot()
    assert snapshot == {
        "steps": 6,
        "replay_steps": 3,
        "skipped_steps": 1,
        "rows_in": 1855,
        "rows_kept": 128 + 7 + 43,
        "graph_steps": 1,
        "padded_rows": 10,
        "full_steps_by_reason": {"model graph": 1},
    }
    snapshot["full_steps_by_reason"]["x"] = 1
    snapshot["steps"] = 99
    assert stats.snapshot()["steps"] == 6
    assert "x" not in stats.snapshot()["full_steps_by_reason"]
    stats.reset()
    assert stats.snapshot()["steps"] == 0
