"""Dense DeepSeek-V4.1 over one whole sequence: no pages, no batches, no chunks, no operators of this package's host.

Written from the specification's equations. It rounds to the storage dtypes where the NPU code does (BF16 activations,
float32 coefficients, the quantised index rows, the packed caches of A5), so a correct paged run agrees to the last bit
except for rare rounding ties.
"""

import math

import torch
import torch.nn.functional as F

from . import sparse_a5

F64 = torch.float64
ROWS = 64
"""Rows that attend at a time."""


def b16(x):
    """Rounded to BF16, as float64."""
    return x.to(torch.bfloat16).to(F64)


def f32(x):
    """Rounded to float32, as float64."""
    return x.float().to(F64)


def rms(x, w, eps):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return b16(y * w)


def rope_table(config, n, yarn):
    """(cos, sin) float64 [n, dim / 2] in the float32 arithmetic of the model's table; `yarn` on compressed layers."""
    p, dim = config.rope_parameters, config.qk_rope_head_dim
    base = config.compress_rope_theta if yarn else config.rope_theta
    freq = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if yarn:
        span = p["original_max_position_embeddings"]

        def dim_of(turns):
            return dim * math.log(span / (turns * 2 * math.pi)) / (2 * math.log(base))

        lo, hi = max(math.floor(dim_of(p["beta_fast"])), 0), min(math.ceil(dim_of(p["beta_slow"])), dim - 1)
        hi = hi + 0.001 if lo == hi else hi
        keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - lo) / (hi - lo)).clamp(0, 1)
        freq = freq / p["factor"] * (1 - keep) + freq * keep
    angle = torch.outer(torch.arange(n, dtype=torch.float32), freq)
    return angle.cos().to(F64), angle.sin().to(F64)


def rotate(x, cos, sin):
    """Interleaved rotation of the last 2 * cos.shape[-1] columns; x [n, (heads,) D]."""
    d = 2 * cos.shape[-1]
    if x.ndim == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = x[..., -d::2], x[..., -d + 1 :: 2]
    y = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((x[..., :-d], b16(y)), -1)


class Oracle:
    """Reads the weights of a loaded `DeepseekV41Model` and computes whole sequences from them."""

    def __init__(self, text_model):
        self.m, self.cfg = text_model, text_model.config
        self.a5 = text_model.layers[0].self_attn.packed_cache_ops is not None
        self._head = None  # (ids, what enters the layer after the cut) of the last sequence

    @staticmethod
    def w(p):
        return p.detach().to(F64)

    def project(self, x, module):
        return b16(x @ self.w(module.weight).t())

    # ---- quantisation of what a cache stores ---------------------------------

    def stored(self, rows, kind):
        """Rows as attention reads them back from their cache."""
        return sparse_a5.decode(sparse_a5.encode(rows, kind), rows.shape[-1], kind) if self.a5 else rows

    def index_pair(self, x, query):
        """(values, scales) of index keys or queries after quantisation."""
        if not self.a5:
            return self.int8(x, query)
        g = x.unflatten(-1, (4, 32))
        scale = torch.exp2(torch.ceil(torch.log2(g.abs().amax(-1).clamp_min(6 * 2.0**-126).float() / 6)).to(F64))
        v = sparse_a5.fp4_values(sparse_a5.fp4_codes((g / scale.unsqueeze(-1)).flatten(-2), ties_even=False))
        return (v.unflatten(-1, (4, 32)) * scale.unsqueeze(-1)).flatten(-2), torch.ones(x.shape[:-1], dtype=F64)

    @staticmethod
    def int8(x, half_first):
        s = x.abs().amax(-1) / 127
        s = s.half().clamp_min(2.0**-24) if half_first else s.float()
        q = torch.round(x / s.to(F64).clamp_min(1e-38).unsqueeze(-1)).clamp(-127, 127)
        return q, s.half().to(F64)

    # ---- sublayers -----------------------------------------------------------

    def mix(self, X, layer, which, pre):
        """Hyper-connection before a sublayer: collapsed row, post, comb, and the pre of the next sublayer."""
        c, n = self.cfg, X.shape[0]
        fn, base, scale = (self.w(getattr(layer, f"hc_{which}_{k}")) for k in ("fn", "base", "scale"))
        f = X.reshape(n, -1)
        m = f @ fn.t() * torch.rsqrt(f.square().mean(-1, keepdim=True) + c.rms_norm_eps)
        h = c.hc_mult
        new = f32(torch.sigmoid(m[:, :h] * scale[0] + base[:h]) + c.hc_eps)
        post = f32(2 * torch.sigmoid(m[:, h : 2 * h] * scale[1] + base[h : 2 * h]))
        C = (m[:, 2 * h :] * scale[2] + base[2 * h :]).view(n, h, h).softmax(-1) + c.hc_eps
        C = C / (C.sum(1, keepdim=True) + c.hc_eps)
        for _ in range(c.hc_sinkhorn_iters - 1):
            C = C / (C.sum(2, keepdim=True) + c.hc_eps)
            C = C / (C.sum(1, keepdim=True) + c.hc_eps)
        return b16(torch.einsum("nh,nhd->nd", pre, X)), post, f32(C), new

    @staticmethod
    def post(X, y, post, C):
        return b16(post.unsqueeze(-1) * y.unsqueeze(1) + torch.einsum("nij,nid->njd", C, X))

    @staticmethod
    def topk(score, k):
        """bool mask of the k largest per row; ties to the lower index, -inf never."""
        keep = torch.zeros_like(score, dtype=torch.bool)
        order = score.sort(dim=-1, descending=True, stable=True)
        k = min(k, score.shape[-1])
        keep.scatter_(-1, order.indices[:, :k], order.values[:, :k] > -math.inf)
        return keep

    def write_source(self, attn, x, cos, sin, state):
        """Compressed KV ("long") and index keys of a KV source layer."""
        c, n, r, comp, ix = self.cfg, x.shape[0], attn.role.compress_ratio, attn.compressor, attn.indexer
        g, D = n // r, c.head_dim
        if r == 1:
            latent = rms(self.project(x, comp.wkv), self.w(comp.norm.weight), c.rms_norm_eps)
        else:
            v = f32(x @ self.w(comp.wkv.weight).t())[: g * 2].view(g, 2, D)
            s = f32(x @ self.w(comp.wgate.weight).t())[: g * 2].view(g, 2, D)
            latent = rms(b16((v * s.softmax(1)).sum(1)), self.w(comp.norm.weight), c.rms_norm_eps)
        gc, gs = cos[: g * r : r], sin[: g * r : r]
        key = rotate(rms(self.project(latent, ix.wk), self.w(ix.k_norm.weight), c.rms_norm_eps), gc, gs)
        state["index"] = self.index_pair(key, False)
        state["long"] = rotate(latent, gc, gs)

    def select(self, attn, x, qr, cos, sin, visible, state):
        """Top-k rows of an index source, and candidate tiles where it makes them."""
        c, n, ix, role = self.cfg, x.shape[0], attn.indexer, attn.role
        G, size = visible.shape[1], c.candidate_block_size
        qi = rotate(self.project(qr, ix.wq_b).view(n, c.index_n_heads, c.index_head_dim), cos, sin)
        qi, qs = self.index_pair(qi, True)
        wt = self.project(x, ix.weights_proj).float() * ix.weights_scale
        wt = (wt if self.a5 else wt.half()).to(F64)
        k, ks = state["index"]
        dots = torch.relu(torch.einsum("nhd,gd->nhg", qi, k) * qs.unsqueeze(-1) * ks)
        score = torch.einsum("nh,nhg->ng", wt, dots).masked_fill(~visible, -math.inf)
        if role.is_candidate_source:
            tiles = F.pad(score, (0, -G % size), value=-math.inf).view(n, -1, size).amax(-1)
            newest = (visible.sum(-1) - 1) // size
            some = newest >= 0
            tiles[torch.arange(n)[some], newest[some]] = math.inf
            state["tiles"] = self.topk(tiles, c.candidate_topk_blocks)
        if role.uses_candidate_filter:
            inside = state["tiles"].repeat_interleave(size, -1)[:, :G]
            score = score.masked_fill(~inside, -math.inf)
        state["picked"] = self.topk(score, c.index_topk)

    def attention(self, layer, x, state, floor):
        c, a = self.cfg, layer.self_attn
        n, D, r = x.shape[0], c.head_dim, a.role.compress_ratio
        cos, sin = rope_table(c, n, r > 0)
        qr = rms(self.project(x, a.wq_a), self.w(a.q_norm.weight), c.rms_norm_eps)
        q = rotate(self.project(qr, a.wq_b).view(n, -1, D), cos, sin)
        kv = rotate(rms(self.project(x, a.wkv), self.w(a.kv_norm.weight), c.rms_norm_eps), cos, sin)
        pos = torch.arange(n)
        if a.role.is_kv_source:
            self.write_source(a, x, cos, sin, state)
        back = pos.unsqueeze(1) - pos.unsqueeze(0)
        ok = (back >= 0) & (back < c.sliding_window) & (pos.unsqueeze(0) >= floor.unsqueeze(1))
        keys = self.stored(kv, sparse_a5.WINDOW)
        if r:
            visible = torch.arange(state["long"].shape[0]).unsqueeze(0) < ((pos + 1) // r).unsqueeze(1)
            if a.role.is_index_source:
                self.select(a, x, qr, cos, sin, visible, state)
            far = self.stored(state["long"], sparse_a5.COMPRESSED)
            ok, keys = torch.cat((ok, state["picked"] & visible), 1), torch.cat((keys, far))
        sink = self.w(a.attn_sink).view(1, -1, 1)
        # Few rows at a time, and of the keys those that one of them sees: the rest has no weight.
        rows = zip(q.split(ROWS), ok.split(ROWS))
        o = rotate(b16(torch.cat([self.attend(few, sees, keys, sink) for few, sees in rows])), cos, -sin)
        o = o.reshape(n, c.o_groups, -1)
        o = b16(torch.einsum("ngi,gio->ngo", o, self.w(a.wo_a.weight))).reshape(n, -1)
        return self.project(o, a.wo_b)

    @staticmethod
    def attend(q, ok, keys, sink):
        """Rows q [n, heads, D] over the keys [k, D] that ok [n, k] lets them see."""
        some = ok.any(0)
        ok, keys = ok[:, some], keys[some]
        logit = torch.einsum("nhd,kd->nhk", q, keys) * keys.shape[1] ** -0.5
        logit = logit.masked_fill(~ok.unsqueeze(1), -math.inf)
        p = torch.cat((logit, sink.expand(len(q), -1, 1)), -1).softmax(-1)[..., :-1]
        return torch.einsum("nhk,kd->nhd", p, keys)

    def moe(self, layer, x):
        c, m = self.cfg, layer.mlp
        score = F.softplus(x @ self.w(m.gate.weight).t()).sqrt()
        order = (score + self.w(m.gate.e_score_correction_bias)).sort(dim=-1, descending=True, stable=True)
        ids = order.indices[:, : c.num_experts_per_tok]
        wt = score.gather(-1, ids)
        wt = wt / (wt.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        e, lim = m.experts.routed_experts, c.swiglu_limit
        out = torch.zeros_like(x)
        for i in range(e.w13_weight.shape[0]):
            t, k = (ids == i).nonzero(as_tuple=True)
            g, u = (x[t] @ self.w(e.w13_weight[i])).chunk(2, -1)
            y = (F.silu(g.clamp(max=lim)) * u.clamp(-lim, lim)) @ self.w(e.w2_weight[i])
            out.index_add_(0, t, y * wt[t, k, None])
        s = m.shared_experts
        g, u = self.project(x, s.gate_up_proj).chunk(2, -1)
        g, u = g.clamp(max=lim), u.clamp(-lim, lim)
        act = b16(b16(g * b16(torch.sigmoid(g))) * u)
        return b16(b16(out) + self.project(act, s.down_proj))

    def engram(self, layer, X, ids):
        """Adds the gated n-gram rows of each position to the streams; X [n, hc, H]."""
        h, slot, n = self.m.engram_hash, layer.self_attn.role.engram_slot, X.shape[0]
        source, pos = h.token_map[ids].long(), torch.arange(n)
        rolling, columns = torch.zeros(n, dtype=torch.long), []
        for shift in range(h.layout.max_ngram_size):
            earlier = source.roll(shift).masked_fill(pos < shift, h.pad_id)
            rolling = rolling ^ (earlier * h.multipliers[slot, shift])
            if shift:
                columns.append(rolling.unsqueeze(1) % h.primes[slot, shift - 1])
        rows = torch.cat(columns, 1) + h.offsets[slot]
        e = layer.engram
        kv = self.project(self.w(e.embed_tokens.weight)[rows].flatten(1), e.wkv)
        key, value = kv.split([X.shape[1] * X.shape[2], X.shape[2]], 1)
        key, eps = key.view_as(X), self.cfg.rms_norm_eps
        scale = torch.rsqrt(X.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
        dot = (X * self.w(e.q_weight) * self.w(e.k_weight) * key).sum(-1) * scale * X.shape[2] ** -0.5
        gate = torch.sigmoid(dot.abs().clamp_min(1e-6).sqrt().copysign(dot))
        return b16(X + gate.unsqueeze(-1) * value.unsqueeze(1))

    # ---- a sequence ----------------------------------------------------------

    @torch.no_grad()
    def __call__(self, ids, floors=None):
        """Final hidden rows float64 [n, H] of the tokens `ids`.

        `floors` int64 [n]: the first position each row's window may see in the layers after the cut; default 0. The
        layers up to the cut do not depend on it and are computed once for a sequence.
        """
        ids, cut = tuple(ids), max(self.cfg.kv_source_layer_ids)
        if self._head is None or self._head[0] != ids:
            self._head = (
                ids,
                self.run(0, cut + 1, *self.enter(torch.tensor(ids)), torch.zeros(len(ids), dtype=torch.long)),
            )
        X, pre, state = self._head[1]
        floors = torch.zeros(len(ids), dtype=torch.long) if floors is None else floors
        X, pre, _ = self.run(cut + 1, len(self.m.layers), X, pre, dict(state), floors)
        h = b16(torch.einsum("nh,nhd->nd", pre, X))
        return rms(h, self.w(self.m.norm.weight), self.cfg.rms_norm_eps)

    def enter(self, ids):
        """Streams, pre mix and shared attention state before the first layer."""
        X = self.w(self.m.embed_tokens.weight)[ids].unsqueeze(1).repeat(1, self.cfg.hc_mult, 1)
        pre = torch.zeros(len(ids), self.cfg.hc_mult, dtype=F64)
        pre[:, 0] = 1
        return X, pre, {"ids": ids}

    def run(self, begin, end, X, pre, state, floor):
        """Layers [begin, end) on every row."""
        for layer in list(torch.nn.ModuleList.__iter__(self.m.layers))[begin:end]:
            if layer.engram is not None:
                X = self.engram(layer, X, state["ids"])
            y, post, C, mid = self.mix(X, layer, "attn", pre)
            y = rms(y, self.w(layer.input_layernorm.weight), self.cfg.rms_norm_eps)
            X = self.post(X, self.attention(layer, y, state, floor), post, C)
            y, post, C, pre = self.mix(X, layer, "ffn", mid)
            y = rms(y, self.w(layer.post_attention_layernorm.weight), self.cfg.rms_norm_eps)
            X = self.post(X, self.moe(layer, y), post, C)
        return X, pre, state
