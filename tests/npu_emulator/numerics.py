"""Linear, normalisation, rotary, hyper-connection and MoE arithmetic, each in float64 and rounded once.

T rows of a step, H hidden size, D head width, hc hyper-connection streams, E experts, k experts per token.
"""

import torch
import torch.nn.functional as F

F64 = torch.float64


def linear(x, weight, bias=None):
    """`x [.., I] @ weight [O, I].T (+ bias [O])` -> [.., O] in x.dtype. Source: torch.nn.functional.linear."""
    y = x.to(F64) @ weight.to(F64).t()
    if bias is not None:
        y = y + bias.to(F64)
    return y.to(x.dtype)


def rms_norm(x, weight=None, eps=1e-6):
    """torch_npu.npu_rms_norm: x [.., H] -> (x / rms(x) * weight [H] in x.dtype, 1 / rms float32 [.., 1]).

    Source: Ascend's operator documentation of npu_rms_norm; vllm-ascend's `ops/layernorm.py` uses value 0 only.
    """
    f = x.to(F64)
    rstd = torch.rsqrt(f.square().mean(-1, keepdim=True) + eps)
    y = f * rstd
    if weight is not None:
        y = y * weight.to(F64)
    return y.to(x.dtype), rstd.float()


def partial_rotary_(x, cos, sin, rotary_mode, partial_slice, negate_sin=False):
    """_C_ascend::inplace_partial_rotary_mul: x [T, 1, heads, D], rotated in place on columns [start, end).

    cos, sin [T, 1, 1, end - start]; interleaved pairs (x0, x1) -> (x0 c - x1 s, x1 c + x0 s); `negate_sin` undoes it.
    Source: the golden function of vllm-ascend's test_inplace_partial_rotary_mul.py, `DeviceOperator`'s call.
    """
    if rotary_mode != "interleave" or x.ndim != 4:
        raise NotImplementedError(f"rotary_mode={rotary_mode!r} on {x.ndim} axes")
    start, end = partial_slice
    part = x[..., start:end].to(F64)
    turned = torch.stack((-part[..., 1::2], part[..., 0::2]), -1).flatten(-2)
    sign = -1.0 if negate_sin else 1.0
    x[..., start:end] = (part * cos.to(F64) + sign * turned * sin.to(F64)).to(x.dtype)


def rotary_mul(x, cos, sin, rotary_mode="half"):
    """torch_npu.npu_rotary_mul: x [T, 1, heads, D] rotated over its whole width -> the same shape and dtype.

    cos, sin [T, 1, 1, D]; interleaved pairs as in `partial_rotary_`. Source: Ascend's operator documentation of
    npu_rotary_mul; vllm-ascend's `ops/rope_dsv4.py`, which rotates the keys of DSpark's context with it.
    """
    out = x.clone()
    partial_rotary_(out, cos, sin, rotary_mode, [0, x.shape[-1]])
    return out


def hc_pre(x, fn, scale, base, pre_mix=None, *, hc_mult=4, hc_sinkhorn_iters=20, norm_eps=1e-6, hc_eps=1e-6):
    """_C_ascend::npu_hc_pre_v3: collapses the streams for one sublayer and computes the mixing of the next.

    x [T, hc, H]; fn [(2 + hc) hc, hc H], scale [3], base [(2 + hc) hc] float32; pre_mix [T, hc] float32 or None (the
    weights computed here). Returns y [T, H] in x.dtype, post [T, hc], comb [T, hc (from), hc (to)] and pre [T, hc],
    all float32. Source: the specification's mHC equations and the golden function of test_npu_hc_pre.py.
    """
    f = x.to(F64)
    flat = f.flatten(-2)
    mix = flat @ fn.to(F64).t() * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    a, b, c = mix.split([hc_mult, hc_mult, hc_mult * hc_mult], -1)
    scale, base = scale.to(F64), base.to(F64)
    pre = torch.sigmoid(a * scale[0] + base[:hc_mult]) + hc_eps
    post = 2 * torch.sigmoid(b * scale[1] + base[hc_mult : 2 * hc_mult])
    comb = (c * scale[2] + base[2 * hc_mult :]).unflatten(-1, (hc_mult, hc_mult)).softmax(-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    weights = pre if pre_mix is None else pre_mix.to(F64)
    y = (weights.unsqueeze(-1) * f).sum(-2)
    return y.to(x.dtype), post.float(), comb.float(), pre.float()


def hc_post(x, residual, post, comb):
    """_C_ascend::npu_hc_post: streams'_j = post_j x + sum_i comb[i, j] residual_i.

    x [.., T, H], residual [.., T, hc, H], post [.., T, hc], comb [.., T, hc, hc] -> residual's shape and dtype.
    Source: the specification's mHC equations; `DeepseekV41DecoderLayer.hc_post` calls it.
    """
    y = post.to(F64).unsqueeze(-1) * x.to(F64).unsqueeze(-2)
    y = y + comb.to(F64).transpose(-1, -2) @ residual.to(F64)
    return y.to(residual.dtype)


def transpose_batchmatmul(
    x, weight, *, bias=None, scale=None, perm_x1=(0, 1, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2), batch_split_factor=1
):
    """torch_npu.npu_transpose_batchmatmul: permute both [B, M, K] and [B, K, N], multiply, permute the result.

    Source: Ascend's operator documentation; used for the grouped output projection.
    """
    if bias is not None or scale is not None or batch_split_factor != 1:
        raise NotImplementedError("bias, scale and batch splitting are not emulated")
    y = x.to(F64).permute(perm_x1) @ weight.to(F64).permute(perm_x2)
    return y.permute(perm_y).to(x.dtype)


def swiglu(x):
    """torch_npu.npu_swiglu: x [.., 2 I] (gate first) -> silu(gate) * up [.., I] in x.dtype."""
    gate, up = x.to(F64).chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


def muls_add(x, y, scale):
    """x * scale + y in x.dtype; both of one shape. Source: vllm-ascend's Triton kernel `muls_add_triton`."""
    return (x.to(F64) * scale + y.to(F64)).to(x.dtype)


def route(logits, top_k, bias=None, *, scoring="sqrtsoftplus", renormalize=True, scale=1.0):
    """Expert ids int64 [T, k] and weights float64 [T, k] from logits [T, E]; `bias` [E] only selects.

    Ties go to the lower expert id. Source: the specification (sqrt-softplus scores, weights renormalised, scaled).
    """
    x = logits.to(F64)
    score = {
        "sqrtsoftplus": lambda v: F.softplus(v).sqrt(),
        "sigmoid": torch.sigmoid,
        "softmax": lambda v: v.softmax(-1),
    }[scoring](x)
    choice = score if bias is None else score + bias.to(F64)
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[..., :top_k]
    weights = score.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale
