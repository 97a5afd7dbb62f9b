"""What the reference model must compute: one request, dense masks, NumPy in float64, no pages and no batches.

It shares the weights with the model and nothing else. A floor per layer and row plays runs that read no window KV
below some position: a full run has none, decoder replay has one in the late layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_ascend_replay.reference.config import ReferenceConfig

Array = np.ndarray
SourceKV = tuple[Array, Array]
"""Rotated latents ``[n, head_dim]`` and index keys ``[n, index_head_dim]`` of a KV source's complete groups."""


@dataclass
class OracleRun:
    """Results of the rows at positions ``start .. len(tokens) - 1``; ``T`` of them."""

    start: int
    hidden: Array
    """``[T, H]`` after the final norm."""
    logits: Array
    """``[T, vocab]``."""
    entering: dict[int, Array]
    """Streams ``[T, hc, H]`` that enter each layer, and those that leave the last one under the layer count."""
    sources: dict[int, SourceKV]
    """Per KV source, from group 0 on."""
    window_kv: dict[int, Array] = field(default_factory=dict)
    """Per layer ``[T, head_dim]``."""

    def aux(self, layer: int) -> Array:
        """The aux state of ``layer``, ``[T, H]``: its entering streams, averaged."""
        return self.entering[layer].mean(1)

    def logprobs(self) -> Array:
        """``[T, vocab]``."""
        top = self.logits.max(-1, keepdims=True)
        return self.logits - top - np.log(np.exp(self.logits - top).sum(-1, keepdims=True))


class Oracle:
    """Runs requests of one model."""

    def __init__(self, config: ReferenceConfig, weights: Mapping[str, torch.Tensor]) -> None:
        """
        Args:
            config: the model's.
            weights: the model's, by dotted name.
        """
        self.config = config
        self.weights = {name: value.detach().cpu().double().numpy() for name, value in weights.items()}

    def late_floor(self, kv_start: int, length: int, start: int = 0) -> dict[int, Array]:
        """Floors of a run whose late layers hold window KV from ``kv_start`` on.

        Rows below it do not run there; they get a floor that leaves them something to read.
        """
        floor = np.minimum(np.arange(start, length), kv_start)
        return dict.fromkeys(range(self.config.cut + 1, self.config.num_hidden_layers), floor)

    def run(
        self,
        tokens: Sequence[int],
        *,
        floors: Mapping[int, Array] | None = None,
        start: int = 0,
        hit: int = 0,
        donor: Mapping[int, SourceKV] | None = None,
    ) -> OracleRun:
        """Every layer on every row.

        Args:
            tokens: ids of the request, generated ones included.
            floors: per layer int ``[T]``: the lowest window position that each row may read; absent: all.
            start: first position that is run, after a prefix hit the first replayed one.
            hit: positions below it have their compressed entries from the prefix cache.
            donor: those entries, per KV source.
        """
        config, w = self.config, self.weights
        positions = np.arange(start, len(tokens))
        num_rows = len(positions)
        streams = np.repeat(w["embedding"][np.asarray(tokens)[positions]][:, None], config.hc_mult, 1)
        pre = np.eye(config.hc_mult)[np.zeros(num_rows, dtype=int)]
        run = OracleRun(start, np.empty(0), np.empty(0), {}, {})
        attends = candidates = np.empty(0)
        for i in range(config.num_hidden_layers):
            run.entering[i] = streams
            if i in config.engram_layer_ids:
                streams = self._engram(i, streams, tokens, positions)
            x = self._rms(np.einsum("ti,tih->th", pre, streams), w[f"layers.{i}.attn_norm"])
            pre, post, comb = self._mixes(f"layers.{i}.hc_attn", streams)

            low_rank = self._rms(x @ w[f"layers.{i}.attn.wq_a"].T, w[f"layers.{i}.attn.q_norm"])
            query = (low_rank @ w[f"layers.{i}.attn.wq_b"].T).reshape(num_rows, config.num_attention_heads, -1)
            query = self._turn(i, query, positions)
            keys = self._turn(i, self._rms(x @ w[f"layers.{i}.attn.wkv"].T, w[f"layers.{i}.attn.kv_norm"]), positions)
            run.window_kv[i] = keys
            behind = positions[:, None] - positions[None]
            mask = (behind >= 0) & (behind < config.sliding_window)
            if floors is not None and i in floors:
                mask &= positions[None] >= np.asarray(floors[i])[:, None]
            if config.compress_ratios[i]:
                if i in config.kv_source_layer_ids:
                    run.sources[i] = self._compress(i, x, start, hit, donor)
                source = config.kv_source(i)
                assert source is not None
                latents, index_keys = run.sources[source]
                if i in config.index_source_layer_ids:
                    scores = self._index_scores(i, x, low_rank, positions, index_keys)
                    if i == config.candidate_source_layer_id:
                        candidates = self._candidates(scores)
                    elif 0 <= config.candidate_source_layer_id < i:
                        scores = np.where(candidates, scores, -np.inf)
                    attends = self._best(scores, config.index_topk)
                keys, mask = np.concatenate((keys, latents)), np.concatenate((mask, attends), 1)
            y = self._attend(i, query, keys, mask, positions)
            streams = post[..., None] * y[:, None] + np.einsum("tij,tih->tjh", comb, streams)

            x = self._rms(np.einsum("ti,tih->th", pre, streams), w[f"layers.{i}.ffn_norm"])
            pre, post, comb = self._mixes(f"layers.{i}.hc_ffn", streams)
            y = self._moe(i, x)
            streams = post[..., None] * y[:, None] + np.einsum("tij,tih->tjh", comb, streams)
        run.entering[config.num_hidden_layers] = streams
        run.hidden = self._rms(np.einsum("ti,tih->th", pre, streams), w["norm"])
        run.logits = run.hidden @ w["head"].T
        return run

    def generate(self, prompt: Sequence[int], count: int) -> tuple[list[int], Array]:
        """Greedy tokens of a full run and their log-probabilities ``[count, vocab]``."""
        tokens, rows = list(prompt), []
        for _ in range(count):
            rows.append(self.run(tokens).logprobs()[-1])
            tokens.append(int(rows[-1].argmax()))
        return tokens[len(prompt) :], np.stack(rows)

    # -- pieces -------------------------------------------------------------------------------------------------

    def _rms(self, x: Array, weight: Array) -> Array:
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.config.rms_norm_eps) * weight

    def _turn(self, layer: int, x: Array, positions: Array, back: bool = False) -> Array:
        """Rotate the last dims of ``x [T, ..., d]`` as complex numbers."""
        dim = self.config.qk_rope_head_dim
        speed = self.config.rope_theta_of(layer) ** (-2.0 * np.arange(dim // 2) / dim)
        turn = np.exp((-1j if back else 1j) * positions[:, None] * speed)
        turn = turn.reshape(len(positions), *(1,) * (x.ndim - 2), dim // 2)
        pairs = (x[..., -dim::2] + 1j * x[..., -dim + 1 :: 2]) * turn
        out = x.copy()
        out[..., -dim::2], out[..., -dim + 1 :: 2] = pairs.real, pairs.imag
        return out

    def _mixes(self, name: str, streams: Array) -> tuple[Array, Array, Array]:
        config, w = self.config, self.weights
        hc, flat = config.hc_mult, streams.reshape(len(streams), -1)
        m = flat @ w[f"{name}.fn"].T / np.sqrt(np.mean(flat * flat, -1, keepdims=True) + config.rms_norm_eps)
        m = m * np.repeat(w[f"{name}.scale"], (hc, hc, hc * hc)) + w[f"{name}.base"]
        pre = 1 / (1 + np.exp(-m[:, :hc])) + config.hc_eps
        post = 2 / (1 + np.exp(-m[:, hc : 2 * hc]))
        comb = np.exp(m[:, 2 * hc :]).reshape(-1, hc, hc)
        comb = comb / comb.sum(2, keepdims=True) + config.hc_eps
        for step in range(2 * config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(1 if step % 2 == 0 else 2, keepdims=True) + config.hc_eps)
        return pre, post, comb

    def _compress(self, layer: int, x: Array, start: int, hit: int, donor: Mapping[int, SourceKV] | None) -> SourceKV:
        w, name, ratio = self.weights, f"layers.{layer}.attn.compressor", self.config.compress_ratios[layer]
        raw = x @ w[f"{name}.wkv"].T
        # A hit is aligned to blocks, so a run never starts inside a group that it has to complete.
        groups = np.arange(-(-start // ratio), (start + len(x)) // ratio)
        members = groups[:, None] * ratio + np.arange(ratio) - start
        if ratio == 1:
            pooled = raw[members[:, 0]]
        else:
            gate = np.exp(x @ w[f"{name}.wgate"].T)[members]
            pooled = (raw[members] * gate).sum(1) / gate.sum(1)
        latents = self._rms(pooled, w[f"{name}.norm"])
        keys = self._rms(latents @ w[f"{name}.wk"].T, w[f"{name}.k_norm"])
        latents, keys = (self._turn(layer, value, groups * ratio) for value in (latents, keys))
        if donor is None:
            assert start == 0
            return latents, keys
        cached = hit // ratio
        fresh = groups >= cached
        old_latents, old_keys = donor[layer]
        return np.concatenate((old_latents[:cached], latents[fresh])), np.concatenate((old_keys[:cached], keys[fresh]))

    def _index_scores(self, layer: int, x: Array, low_rank: Array, positions: Array, keys: Array) -> Array:
        config, w, name = self.config, self.weights, f"layers.{layer}.attn.indexer"
        query = (low_rank @ w[f"{name}.wq"].T).reshape(len(x), config.index_n_heads, -1)
        query = self._turn(layer, query, positions)
        weight = x @ w[f"{name}.wproj"].T / np.sqrt(config.index_head_dim * config.index_n_heads)
        scores = sum(np.maximum(query[:, h] @ keys.T, 0) * weight[:, h : h + 1] for h in range(config.index_n_heads))
        seen = (positions + 1) // config.compress_ratios[layer]
        return np.where(np.arange(len(keys)) < seen[:, None], scores, -np.inf)

    def _candidates(self, scores: Array) -> Array:
        """bool ``[T, n]``: entries in a row's best blocks; the block of its newest entry counts as the best."""
        size, keep = self.config.candidate_block_size, np.zeros(scores.shape, dtype=bool)
        for row, line in enumerate(scores):
            seen = int((line > -np.inf).sum())
            if not seen:
                continue
            best = [line[at : at + size].max() for at in range(0, seen, size)]
            best[-1] = np.inf
            order = sorted(range(len(best)), key=lambda block: (-best[block], block))
            for block in order[: self.config.candidate_topk_blocks]:
                keep[row, block * size : (block + 1) * size] = True
        return keep

    @staticmethod
    def _best(scores: Array, count: int) -> Array:
        """bool ``[T, n]``: the best entries of each row, the lower one of equals."""
        chosen = np.zeros(scores.shape, dtype=bool)
        for row, line in enumerate(scores):
            order = np.lexsort((np.arange(len(line)), -line))[:count]
            chosen[row, order[line[order] > -np.inf]] = True
        return chosen

    def _attend(self, layer: int, query: Array, keys: Array, mask: Array, positions: Array) -> Array:
        config, w, name = self.config, self.weights, f"layers.{layer}.attn"
        heads = []
        for h in range(config.num_attention_heads):
            score = np.where(mask, query[:, h] @ keys.T / np.sqrt(config.head_dim), -np.inf)
            sink = w[f"{name}.sink"][h]
            top = np.maximum(score.max(1, initial=-np.inf), sink)[:, None]
            weight = np.exp(score - top)
            heads.append(weight @ keys / (weight.sum(1, keepdims=True) + np.exp(sink - top)))
        out = self._turn(layer, np.stack(heads, 1), positions, back=True).reshape(len(query), config.o_groups, -1)
        low = [out[:, g] @ w[f"{name}.wo_a"][g].T for g in range(config.o_groups)]
        return np.concatenate(low, 1) @ w[f"{name}.wo_b"].T

    def _moe(self, layer: int, x: Array) -> Array:
        config, w, name = self.config, self.weights, f"layers.{layer}.moe"
        scores = np.sqrt(np.logaddexp(0, x @ w[f"{name}.gate"].T))
        chosen = np.argsort(-(scores + w[f"{name}.gate_bias"]), -1)[:, : config.num_experts_per_tok]
        weights = np.zeros_like(scores)
        np.put_along_axis(weights, chosen, np.take_along_axis(scores, chosen, 1), 1)
        weights *= config.routed_scaling_factor / weights.sum(1, keepdims=True)
        out = self._expert(name, config.num_experts, x)
        for expert in range(config.num_experts):
            out = out + weights[:, expert : expert + 1] * self._expert(name, expert, x)
        return out

    def _expert(self, name: str, expert: int, x: Array) -> Array:
        w, limit = self.weights, self.config.swiglu_limit
        gate = np.minimum(x @ w[f"{name}.w1"][expert].T, limit)
        up = np.clip(x @ w[f"{name}.w3"][expert].T, -limit, limit)
        return (gate / (1 + np.exp(-gate)) * up) @ w[f"{name}.w2"][expert].T

    def _engram(self, layer: int, streams: Array, tokens: Sequence[int], positions: Array) -> Array:
        config, w, name = self.config, self.weights, f"layers.{layer}.engram"
        rows = []
        for p in positions:
            row = []
            for n in range(2, config.engram_max_ngram + 1):
                for head in range(config.engram_heads):
                    value = 0
                    for k in range(n):
                        token = tokens[p - k] + 1 if p >= k else 0
                        value = (value * 1009 + token * (7 + 2 * head) + k) % config.engram_vocab_size
                    row.append(w[f"{name}.table"][value])
            rows.append(np.concatenate(row))
        kv = np.stack(rows) @ w[f"{name}.wkv"].T
        hidden = config.hidden_size
        key, value = kv[:, :-hidden].reshape(streams.shape), kv[:, -hidden:]
        unit = np.ones(hidden)
        dot = self._rms(streams, unit) * w[f"{name}.q_norm"] * self._rms(key, unit) * w[f"{name}.k_norm"]
        dot = dot.sum(-1) / np.sqrt(hidden)
        gate = 1 / (1 + np.exp(-np.copysign(np.sqrt(np.maximum(np.abs(dot), 1e-6)), dot)))
        return streams + gate[..., None] * value[:, None]
