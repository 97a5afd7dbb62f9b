"""Several ranks whose sums can be compared bit for bit with one rank's.

Sequence-parallel and context-parallel ranks hold slices of one set of weights and add BF16 partial sums: the output
projection and shared experts over the tensor-parallel ranks, the routed experts over all ranks. Ranks add in rank
order; the single rank rounds and adds the same partial sums in the same order. Expert parallelism is on.

`sharding` is the same for plain tensor parallelism, where experts are cut along their width.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import numerics, patches, rank


def pretend(*, tp, experts):
    """Make this single rank add what `tp` tensor-parallel ranks, and `experts` expert-parallel ranks, would add."""
    import vllm_ascend.ops.linear as ascend_linear

    def apply(self, layer, x, bias=None):
        name = getattr(layer, "prefix", "")
        if tp > 1 and (name.endswith("wo_b") or "shared_experts.down_proj" in name):
            parts = zip(x.chunk(tp, -1), layer.weight.chunk(tp, 1))
            return _in_order([numerics.linear(a.contiguous(), b.contiguous()) for a, b in parts])
        return numerics.linear(x, layer.weight, bias)

    ascend_linear.AscendUnquantizedLinearMethod.apply = apply
    _install_moe(experts)


def join(path, number, *, tp):
    """Make this process rank `number` of several, with its slices of the weights in `path`.

    The weights are sliced as the parameters' shapes say: over the tensor-parallel ranks or over all of them.
    """
    import vllm_ascend.ops.fused_moe.moe_comm_method as comm

    # Token dispatchers ask HCCL for names; the emulated experts never call them.
    for cls in vars(comm).values():
        if isinstance(cls, type) and "_get_token_dispatcher" in vars(cls):
            cls._get_token_dispatcher = lambda self: None
    _install_moe(1)
    dist.reduce_scatter_tensor = _ordered_reduce_scatter

    def load(model, seed=0):
        whole = torch.load(path)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(_slice(name, whole[name], p.shape, number, tp))
        rank.refresh_derived(model)

    rank.randomize = load


def _in_order(terms):
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _ordered_reduce_scatter(output, input, op=None, group=None, async_op=False):
    """`reduce_scatter_tensor` that adds in rank order, so that it rounds as a loop would."""
    size, me = dist.get_world_size(group), dist.get_rank(group)
    everyone = [torch.empty_like(input) for _ in range(size)]
    dist.all_gather(everyone, input.contiguous(), group=group)
    return output.copy_(_in_order([part.chunk(size, 0)[me] for part in everyone]))


def _slice(name, whole, shape, number, tp):
    """Rank `number`'s part of a weight, along the one axis whose size differs."""
    if tuple(whole.shape) == tuple(shape):
        return whole
    (axis,) = [d for d in range(whole.dim()) if whole.shape[d] != shape[d]]
    parts = whole.shape[axis] // shape[axis]
    assert parts * shape[axis] == whole.shape[axis], (name, whole.shape, shape)
    # Experts are numbered over all ranks, everything else over the tensor-parallel ones.
    at = number % tp if parts == tp else number
    if "gate_up_proj" in name and axis == 0:
        return torch.cat([half.chunk(parts, 0)[at] for half in whole.chunk(2, 0)])
    return whole.chunk(parts, axis)[at]


def _experts(runner, x, logits, parts):
    """Sums over this rank's experts for every row of `x` [T, H]; those of each of `parts` add up by themselves."""
    spec, experts = runner.emulated, runner.routed_experts
    ids, weights = numerics.route(logits, spec["top_k"], spec["bias"], scoring=spec["scoring"], scale=spec["scale"])
    w13, w2, limit = experts.w13_weight, experts.w2_weight, spec["limit"]
    count = w13.shape[0]
    first = runner.moe_config.ep_rank * count if count < logits.shape[-1] else 0
    x, sums = x.to(numerics.F64), []
    for group in torch.arange(count).chunk(parts):
        out = torch.zeros_like(x)
        for e in group.tolist():
            rows, slot = (ids == first + e).nonzero(as_tuple=True)
            if rows.numel():
                gate, up = (x[rows] @ w13[e].to(numerics.F64)).chunk(2, -1)
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                out.index_add_(0, rows, (F.silu(gate) * up) @ w2[e].to(numerics.F64) * weights[rows, slot, None])
        sums.append(out.to(w2.dtype))
    return _in_order(sums)


def _install_moe(parts):
    from vllm_ascend.ops.fused_moe.fused_moe import AscendMoERunner

    def forward_impl(runner, hidden_states, router_logits, shared_experts_input=None, input_ids=None):
        from vllm_ascend.ops.fused_moe.prepare_finalize import PrepareAndFinalizeWithAllGather

        with runner._sequence_parallel_context():
            spec, config = runner.emulated, runner.moe_config
            logits = router_logits.to(numerics.F64)
            if runner.is_internal_router:
                logits = logits @ runner._gate.weight.to(numerics.F64).t()
            # What an exchange of float32 logits keeps.
            logits = logits.float()
            patches.MOE_CALLS.append((runner.layer_name, hidden_states.shape[0]))
            if config.is_sequence_parallel or config.pcp_size > 1 or config.dp_size > 1:
                # vllm-ascend's own exchange of rows.
                exchange = PrepareAndFinalizeWithAllGather(config)
                ready = exchange.prepare(hidden_states, logits)
                part = _experts(runner, ready.hidden_states, ready.router_logits.to(numerics.F64), 1)
                routed = exchange.finalize(part, reduce_results=False)
            else:
                routed = _experts(runner, hidden_states, logits.to(numerics.F64), parts)
            if spec["shared"] is None:
                return routed
            shared = runner.ascend_shared_experts
            if config.is_sequence_parallel and not shared.weights_replicated:
                whole = shared._gather_sp_input(hidden_states)
                return shared._pad_and_reduce_scatter(spec["shared"](whole)), routed
            return spec["shared"](hidden_states), routed

    AscendMoERunner._forward_impl = forward_impl


def force_dsa_cp():
    """Turn DSA-CP on behind the check that refuses it with MRV2: to test its row layouts, not a way to run it.

    Whatever reads the switch later (builders, layers, weights) sees it.
    """
    import vllm_ascend.ascend_config as module

    init = module.init_ascend_config

    def init_ascend_config(vllm_config):
        config = init(vllm_config)
        config.enable_dsa_cp = True
        return config

    module.init_ascend_config = init_ascend_config
