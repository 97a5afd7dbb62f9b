"""Every setting: its default, its values, and an error that names the variable, the value and what is allowed."""

import pytest

from vllm_ascend_replay.config import ReplaySettings, SettingError, read_settings


def test_defaults():
    assert read_settings({}) == ReplaySettings(enabled=True, policy="final", keep="window", min_saved=1, log_every=10.0)


def test_all_values():
    environ = {
        "ASCEND_REPLAY": "0",
        "ASCEND_REPLAY_POLICY": "final",
        "ASCEND_REPLAY_KEEP": " 300 ",
        "ASCEND_REPLAY_MIN_SAVED": "64",
        "ASCEND_REPLAY_LOG_EVERY": "0",
        "UNRELATED": "x",
        "ASCEND_REPLAYED": "not ours",
    }
    assert read_settings(environ) == ReplaySettings(False, "final", 300, 64, 0.0)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("ASCEND_REPLAY", "yes", "0 or 1"),
        ("ASCEND_REPLAY", "", "0 or 1"),
        ("ASCEND_REPLAY_POLICY", "Final", "final or chunk"),
        ("ASCEND_REPLAY_KEEP", "0", "window, exact"),
        ("ASCEND_REPLAY_KEEP", "-128", "window, exact"),
        ("ASCEND_REPLAY_KEEP", "1e3", "window, exact"),
        ("ASCEND_REPLAY_KEEP", "²", "window, exact"),
        ("ASCEND_REPLAY_KEEP", "2147483648", "window, exact"),
        ("ASCEND_REPLAY_MIN_SAVED", "0", "positive whole number"),
        ("ASCEND_REPLAY_MIN_SAVED", "2147483648", "at most 2147483647"),
        ("ASCEND_REPLAY_LOG_EVERY", "nan", "seconds >= 0"),
        ("ASCEND_REPLAY_LOG_EVERY", "inf", "seconds >= 0"),
        ("ASCEND_REPLAY_LOG_EVERY", "often", "seconds >= 0"),
        ("ASCEND_REPLAY_POLICIES", "final", "no such setting"),
        ("ASCEND_REPLAY_GRAPHS", "on", "0 or 1"),
        ("ASCEND_REPLAY_DEBUG", "2", "0 or 1"),
        ("ASCEND_REPLAY_GRAPH_SIZES", "", "ascending"),
        ("ASCEND_REPLAY_GRAPH_SIZES", "128,,256", "ascending"),
        ("ASCEND_REPLAY_GRAPH_SIZES", "0,128", "positive"),
        ("ASCEND_REPLAY_GRAPH_SIZES", "-1", "positive"),
        ("ASCEND_REPLAY_GRAPH_SIZES", "256,128", "ascending"),
        ("ASCEND_REPLAY_GRAPH_SIZES", "128,128", "each once"),
    ],
)
def test_bad_values_name_everything(name, value, allowed):
    with pytest.raises(SettingError) as error:
        read_settings({name: value})
    for part in (name, repr(value), allowed):
        assert part in str(error.value)


def test_settings_that_exclude_each_other():
    with pytest.raises(SettingError, match=r"ASCEND_REPLAY_KEEP is 'exact'; allowed: window under .*chunk"):
        read_settings({"ASCEND_REPLAY_POLICY": "chunk", "ASCEND_REPLAY_KEEP": "exact"})


def test_rows_to_keep():
    assert ReplaySettings().keep_last(window=128, num_late_layers=19) == 128
    assert ReplaySettings(keep="exact").keep_last(window=128, num_late_layers=19) == 2414
    assert ReplaySettings(keep=129).keep_last(window=128, num_late_layers=19) == 129
    with pytest.raises(SettingError, match=r"ASCEND_REPLAY_KEEP is 127; .*>= the model's window, 128"):
        ReplaySettings(keep=127).keep_last(window=128, num_late_layers=19)


def test_exact_never_keeps_less_than_the_window():
    assert ReplaySettings(keep="exact").keep_last(window=1, num_late_layers=3) == 1
    assert ReplaySettings(keep="exact").keep_last(window=8, num_late_layers=1) == 8


def test_graph_settings():
    assert read_settings({}).graphs
    environ = {"ASCEND_REPLAY_GRAPHS": "0", "ASCEND_REPLAY_GRAPH_SIZES": " 1, 129,4096", "ASCEND_REPLAY_DEBUG": "1"}
    settings = read_settings(environ)
    assert (settings.graphs, settings.graph_sizes, settings.debug) == (False, (1, 129, 4096), True)
