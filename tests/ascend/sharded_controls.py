"""Faults in the wiring of ranks that share rows, by the name of their scenario; each must be noticed."""

import contextlib
from dataclasses import replace
from unittest import mock


@contextlib.contextmanager
def applied(scenario, node):
    """`node` with the scenario's fault, if it is one, or with its variant of the tail."""
    with contextlib.ExitStack() as stack:
        fault = FAULTS.get(scenario)
        if fault is not None:
            fault(node, stack)
        yield


def _stale_dp_metadata(node, stack):
    """The step's row counts in place of the replay batch's."""
    from vllm.forward_context import get_forward_context

    import vllm_ascend_replay.ascend.context as module

    real = module.nested_context

    def stale(**changes):
        return real(**{**changes, "dp_metadata": get_forward_context().dp_metadata})

    stack.enter_context(mock.patch.object(module, "nested_context", stale))


def _no_restore_index(node, stack):
    """Rows of the ranks are put back as the whole step's would be."""
    import vllm_ascend_replay.ascend.context_parallel as module

    def keep(context, **changes):
        changes.pop("hidden_restore_idx", None)
        return replace(context, **changes)

    stack.enter_context(mock.patch.object(module, "replace", keep))


def _wrong_owner(node, stack):
    """Every rank keeps what rank 0 keeps."""
    import vllm_ascend_replay.ascend.context_parallel as module

    real = module.segments_of

    def segments_of(manager, whole):
        first, *others = real(manager, whole)
        return [first] * (1 + len(others))

    stack.enter_context(mock.patch.object(module, "segments_of", segments_of))


def _no_rope(node, stack):
    """Cloned builders without RoPE tables."""
    builder = type(node.runner.attn_groups[0][0].get_metadata_builder(0))
    stack.enter_context(mock.patch.object(builder, "prepare_source_rope"))


def _after_the_cut(node, stack, *, moves=True):
    from tests.ascend.after_cut import use_after_cut_tail

    use_after_cut_tail(node).compacts = moves


def _query_metadata(node, stack):
    """The cut layer's KV written through the metadata of this rank's queries."""
    impl = type(node.text.layers[node.text.replay_tail.cut].self_attn.v41_impl)
    real = impl._global_layer_metadata
    tail = node.text.replay_tail
    write = tail.write_kv

    def write_kv(*args):
        with mock.patch.object(impl, "_global_layer_metadata", lambda self, m: self._get_layer_metadata(m)):
            write(*args)

    assert real is not None
    tail.write_kv = write_kv


FAULTS = {
    "stale dp_metadata": _stale_dp_metadata,
    "no restore index": _no_restore_index,
    "wrong owner": _wrong_owner,
    "no rope": _no_rope,
    "after the cut": _after_the_cut,
    "unmoved top-k rows": lambda node, stack: _after_the_cut(node, stack, moves=False),
    "query metadata": _query_metadata,
}
