"""Profiles of the property tests: short by default, long with REPLAY_HYPOTHESIS_PROFILE=long."""

import os
from importlib.util import find_spec

# vLLM settles at import whether graphs may have eager breaks; eager runs are the same either way.
if find_spec("vllm_ascend") is None:
    os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")

# The environments of the other hosts need no hypothesis.
if find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    common = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    settings.register_profile("short", max_examples=100, derandomize=True, **common)
    settings.register_profile("long", max_examples=2000, **common)
    settings.load_profile(os.environ.get("REPLAY_HYPOTHESIS_PROFILE", "short"))
