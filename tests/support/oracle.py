"""The oracle lives in the package, where the demo uses it too."""

from vllm_ascend_replay.reference.oracle import Array, Oracle, OracleRun, SourceKV

__all__ = ["Array", "Oracle", "OracleRun", "SourceKV"]
