"""Tensor parallelism that can be compared bit for bit with one rank.

Ranks get shards of one set of weights. The single rank they are compared with *pretends*: where ranks add BF16 partial
sums (the output projection, the shared and routed experts), it rounds and adds the same partial sums.
"""

import torch

from . import numerics, patches


def install(parts, *, pretend):
    """Call before a model is built.

    Args:
        parts: tensor-parallel ranks.
        pretend: this is the single rank; otherwise nothing needs to change.
    """
    if not pretend:
        return
    import vllm_ascend.ops.linear as ascend_linear
    from vllm_ascend.ops.fused_moe.fused_moe import AscendMoERunner

    def apply(self, layer, x, bias=None):
        name = getattr(layer, "prefix", "")
        if name.endswith("wo_b"):
            return _add(_partial_sums(x, layer.weight, parts))
        if "shared_experts.down_proj" in name:
            return torch.stack(_partial_sums(x, layer.weight, parts))
        return numerics.linear(x, layer.weight, bias)

    def forward_impl(runner, hidden_states, router_logits, shared_experts_input=None, input_ids=None):
        experts = runner.routed_experts
        w13, w2 = experts.w13_weight, experts.w2_weight
        gates, ups = (half.chunk(parts, -1) for half in w13.chunk(2, -1))
        routed, shared = [], None
        try:
            for gate, up, down in zip(gates, ups, w2.chunk(parts, 1)):
                experts.w13_weight = torch.nn.Parameter(torch.cat((gate, up), -1), requires_grad=False)
                experts.w2_weight = torch.nn.Parameter(down, requires_grad=False)
                shared, part = patches.moe_forward_impl(runner, hidden_states, router_logits)
                routed.append(part)
        finally:
            experts.w13_weight, experts.w2_weight = w13, w2
        # Each rank adds its two outputs before the ranks' sums meet; the runner's own addition finds nothing to add.
        total = _add([a + b for a, b in zip(shared, routed)])
        return torch.zeros_like(total), total

    ascend_linear.AscendUnquantizedLinearMethod.apply = apply
    AscendMoERunner._forward_impl = forward_impl


def _partial_sums(x, weight, parts):
    pairs = zip(x.chunk(parts, -1), weight.chunk(parts, 1))
    return [numerics.linear(a.contiguous(), b.contiguous()) for a, b in pairs]


def _add(terms):
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def save(model, path):
    """Writes a single rank's weights for `load`."""
    torch.save({name: p.detach().clone() for name, p in model.named_parameters()}, path)


@torch.no_grad()
def load(model, path, rank, parts):
    """Fills a rank's model with its shards of saved weights."""
    whole = torch.load(path)
    for name, p in model.named_parameters():
        p.copy_(shard(name, whole[name], p.shape, rank, parts))
    for m in model.modules():
        if hasattr(m, "weight_fp32"):
            m.weight_fp32.copy_(m.weight.float())


def shard(name, whole, shape, rank, parts):
    """This rank's part of a weight: along the one axis whose size differs; gate and up halves are cut apart."""
    if tuple(whole.shape) == tuple(shape):
        return whole
    (axis,) = [d for d in range(whole.dim()) if whole.shape[d] != shape[d]]
    assert whole.shape[axis] == parts * shape[axis], (name, whole.shape, shape)
    if "gate_up_proj" in name or "w13" in name:
        return torch.cat([half.chunk(parts, axis)[rank] for half in whole.chunk(2, axis)], axis)
    return whole.chunk(parts, axis)[rank]
