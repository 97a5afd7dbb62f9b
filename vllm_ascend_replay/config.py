"""Settings, read once from the environment. A bad value stops start-up with its name, value and what is allowed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from vllm_ascend_replay.plan import POLICIES, exact_rows

PREFIX = "ASCEND_REPLAY"


class SettingError(ValueError):
    """A setting has a value that is not allowed."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{name} is {value!r}; allowed: {allowed}. Change or unset it.")


@dataclass(frozen=True)
class ReplaySettings:
    """The package's settings; `docs/settings.md` is their reference."""

    enabled: bool = True
    """``ASCEND_REPLAY``: decoder side on. It never touches the encoder side."""
    policy: str = "final"
    """``ASCEND_REPLAY_POLICY``: ``final`` or ``chunk``."""
    keep: str | int = "window"
    """``ASCEND_REPLAY_KEEP``: ``window``, ``exact``, or a number of rows not below the window."""
    min_saved: int = 1
    """``ASCEND_REPLAY_MIN_SAVED``: rows that a prompt must save to be bounded."""
    log_every: float = 10.0
    """``ASCEND_REPLAY_LOG_EVERY``: seconds of activity between two counter lines; 0: none."""
    graphs: bool = True
    """``ASCEND_REPLAY_GRAPHS``: run the replay layers out of captured graphs."""
    graph_sizes: tuple[int, ...] = ()
    """``ASCEND_REPLAY_GRAPH_SIZES``: rows of the graphs, ascending; empty: chosen by `ladder.default_sizes`."""
    debug: bool = False
    """``ASCEND_REPLAY_DEBUG``: replay graphs piece by piece, synchronised, and name the piece that failed."""

    def keep_last(self, *, window: int, num_late_layers: int) -> int:
        """F, the rows kept at a prompt's end.

        Raises:
            SettingError: a number below the window.
        """
        if self.keep == "exact":
            return max(window, exact_rows(num_late_layers, window))
        if self.keep == "window":
            return window
        if int(self.keep) < window:
            raise SettingError(
                f"{PREFIX}_KEEP", self.keep, f"window, exact, or a number of rows >= the model's window, {window}"
            )
        return int(self.keep)


def _flag(name: str, value: str) -> bool:
    if value not in ("0", "1"):
        raise SettingError(name, value, "0 or 1")
    return value == "1"


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise SettingError(name, value, " or ".join(allowed))
    return value


def _keep(name: str, value: str) -> str | int:
    if value in ("window", "exact"):
        return value
    if not _is_count(value):
        raise SettingError(name, value, "window, exact, or a positive number of rows not below the window")
    return int(value)


def _count(name: str, value: str) -> int:
    if not _is_count(value):
        raise SettingError(name, value, "a positive whole number of rows, at most 2147483647")
    return int(value)


def _is_count(value: str) -> bool:
    """Whether it is a number of rows, positions being of 32 bits."""
    return value.isascii() and value.isdigit() and 0 < int(value) < 1 << 31


def _seconds(name: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise SettingError(name, value, "a number of seconds >= 0 (0: no log line)")
    return seconds


def _sizes(name: str, value: str) -> tuple[int, ...]:
    allowed = "positive numbers of rows with commas between, ascending, each once (such as 128,256,512)"
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise SettingError(name, value, allowed)
    sizes = tuple(int(part) for part in parts)
    if sizes[0] == 0 or any(a >= b for a, b in pairwise(sizes)):
        raise SettingError(name, value, allowed)
    return sizes


_PARSERS: dict[str, tuple[str, Callable[[str, str], object]]] = {
    f"{PREFIX}": ("enabled", _flag),
    f"{PREFIX}_POLICY": ("policy", lambda name, value: _choice(name, value, POLICIES)),
    f"{PREFIX}_KEEP": ("keep", _keep),
    f"{PREFIX}_MIN_SAVED": ("min_saved", _count),
    f"{PREFIX}_LOG_EVERY": ("log_every", _seconds),
    f"{PREFIX}_GRAPHS": ("graphs", _flag),
    f"{PREFIX}_GRAPH_SIZES": ("graph_sizes", _sizes),
    f"{PREFIX}_DEBUG": ("debug", _flag),
}


def read_settings(environ: Mapping[str, str] | None = None) -> ReplaySettings:
    """Read the settings from ``environ`` (default: the process's).

    Raises:
        SettingError: a value that is not allowed, a variable with our prefix that does not exist (a misspelt setting
            must not be silently ignored), or settings that exclude each other.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, object] = {}
    for name in sorted(environ):
        if name != PREFIX and not name.startswith(PREFIX + "_"):
            continue
        if name not in _PARSERS:
            raise SettingError(name, environ[name], "no such setting; there are " + ", ".join(_PARSERS))
        field, parse = _PARSERS[name]
        values[field] = parse(name, environ[name].strip())
    settings = ReplaySettings(**values)  # type: ignore[arg-type]
    if settings.policy == "chunk" and settings.keep != "window":
        raise SettingError(f"{PREFIX}_KEEP", settings.keep, f"window under {PREFIX}_POLICY=chunk")
    return settings
