"""The emulator itself: its operators against vllm-ascend's Triton kernels, the engine on it against the oracle."""

import inspect

import pytest
import torch

from tests.npu_emulator import ON_A5, caches, numerics, operators, patches, sparse_a2, sparse_a5
from tests.npu_emulator.checks import TIE, report
from tests.npu_emulator.oracle import rotate
from tests.npu_emulator.rank import Rank
from tests.npu_emulator.session import Session, tokens
from tests.npu_emulator.tiny import make_vllm_config

REAL = patches.REAL


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- judged by vllm-ascend's own Triton kernels, run in Triton's interpreter ---------------------------------------


def test_window_indices():
    positions = torch.tensor([0, 3, 15, 16, 200, 7])
    for want, got in zip(REAL["build_window_indices_triton"](positions, 16), caches.window_indices(positions, 16)):
        assert torch.equal(want, got)


def test_draft_window_indices():
    from vllm_ascend.ops.triton.spec_decode.dspark_swa_indices import build_dspark_swa_indices_triton

    # A request without rows and two rows of no request, as a padded graph has them.
    starts = torch.tensor([0, 4, 8, 12, 12], dtype=torch.int32)
    lengths = torch.tensor([4, 23, 300, 0], dtype=torch.int32)
    want = build_dspark_swa_indices_triton(starts, lengths, 14, 128, 16)
    got = caches.draft_window_indices(None, 4, 16, 128, starts, lengths, 14, use_logical_indices=True)
    for x, y in zip(want, got):
        assert torch.equal(x, y)
        assert x.dtype == y.dtype


def test_rotary_of_the_drafters_keys():
    """Judged by the oracle's rotation."""
    x, angle = rand(3, 1, 1, 8).bfloat16(), rand(3, 4, seed=1)
    wide = [t.repeat_interleave(2, -1).view(3, 1, 1, 8) for t in (angle.cos(), angle.sin())]
    want = rotate(x.view(3, 8).double(), angle.cos().double(), angle.sin().double())
    assert torch.equal(numerics.rotary_mul(x, *wide, rotary_mode="interleave").view(3, 8).double(), want)


def test_verification_of_greedy_drafts(monkeypatch):
    """Drafts that all stand, that fall at once, that fall late; a request without drafts."""
    import vllm_ascend.worker.v2.spec_decode.rejection_sampler_utils as kernels

    best = torch.tensor([5, 6, 7, 3, 9, 9, 2, 1, 4])
    logits = torch.nn.functional.one_hot(best, 16).float()
    drafts = torch.tensor([0, 5, 6, 0, 1, 9, 0, 2, 0])
    bounds = torch.tensor([0, 3, 6, 8, 9], dtype=torch.int32)
    reqs, zeros = torch.arange(4, dtype=torch.int32), torch.zeros(4)
    rows = torch.repeat_interleave(reqs, torch.diff(bounds))
    place = torch.arange(9, dtype=torch.int32) - bounds[rows.long()]
    arguments = (logits, None, drafts, bounds, torch.arange(9), reqs, rows, place, zeros, zeros.long(), 2)
    tokens, counts = patches.greedy_rejection_sample(*arguments)
    assert tokens.tolist() == [[5, 6, 7], [3, -1, -1], [2, 1, -1], [4, -1, -1]]
    # The last kernel draws the token behind the drafts that all stood; Triton's interpreter cannot run it.
    monkeypatch.setattr(kernels, "resample", lambda sampled, num_sampled, *args, **kwargs: num_sampled.add_(1))
    sampled, num_sampled = REAL["rejection_sample"](*arguments)
    assert torch.equal(num_sampled, counts)
    for r, (stood, tried) in enumerate(zip((counts - 1).tolist(), (torch.diff(bounds) - 1).tolist())):
        n = min(stood + 1, tried)
        assert torch.equal(sampled[r, :n], tokens[r, :n])


def test_index_quantisation():
    x = rand(9, 3, 128).bfloat16()
    for want, got in zip(REAL["quantize_mxfp4_indexer"](x), sparse_a5.quantize_index(x)):
        assert torch.equal(want, got)


def test_index_cache_and_folding():
    slots = torch.tensor([[1, 5], [-1, -1], [2, 0], [1, 6], [0, 15]], dtype=torch.int32)
    x = rand(5, 128, seed=1).bfloat16()
    results = []
    for write, fold in (
        (REAL["write_mxfp4_indexer_cache"], REAL["fold_indexer_cache_rows"]),
        (sparse_a5.write_index, sparse_a5.fold_index),
    ):
        data, scale = torch.zeros(3, 16, 1, 64, dtype=torch.uint8), torch.zeros(3, 16, 1, 4, dtype=torch.uint8)
        folded = torch.zeros(3, 2, 1, sparse_a5.FOLDED_ROW, dtype=torch.uint8)
        write(x, slots, data, scale)
        fold((data, scale), folded, slots)
        results.append((data, scale, folded))
    assert all(torch.equal(want, got) for want, got in zip(*results))


def real_compressor(kv, scores, ring, meta, out, *, max_query_len, num_cores):
    """The two launches of `compressor_from_projected`, which itself insists on an NPU tensor."""
    import vllm_ascend.ops.triton.compressor.compressor_triton as triton_compressor

    out.zero_()
    n, groups, writes = meta.shape[1], (max_query_len + 1) // 2, min(max_query_len, 32)
    triton_compressor._pool_kernel[(min(num_cores, n * groups),)](
        *(out, kv, scores, ring, out, meta, meta[4], n * groups, groups, n),
        CACHE_SIZE=32,
        HEAD_DIM=kv.shape[1],
        RATIO=2,
        RATIO_PAD=2,
        CHUNK_ROWS=2,
        eps=0.0,
        SINGLE_BLOCK=True,
        NO_PAD=True,
        TOKEN_ALIGNED=True,
        NUM_CACHE_BLOCKS=ring.shape[0],
    )
    triton_compressor._cache_update_kernel[(min(num_cores, n * writes),)](
        *(kv, scores, ring, meta, meta[4], n * writes, writes, n),
        CACHE_SIZE=32,
        HEAD_DIM=kv.shape[1],
        PROTECT_NULL=True,
        NUM_CACHE_BLOCKS=ring.shape[0],
    )


@pytest.mark.parametrize("start", [0, 1, 5])
def test_ring_compressor(start):
    width, n = 64, 37
    meta = torch.tensor([[start, 4], [n, 3], [0, n], [0, n], [2, 1]], dtype=torch.int32)
    kv, score = rand(n + 3, width, seed=start), rand(n + 3, width, seed=start + 10)
    ring = rand(4, 32, 2 * width, seed=start + 20)
    results = []
    for fn in (real_compressor, caches.compress_ring):
        own, out = ring.clone(), torch.empty((n + 3, width), dtype=torch.bfloat16)
        fn(kv, score, own, meta, out, max_query_len=n, num_cores=2)
        results.append((own, out))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], atol=2**-8, rtol=2**-7)


@pytest.mark.parametrize("skip", [False, True])
def test_ring_metadata(skip):
    bounds, lens = torch.tensor([0, 5, 6, 17], dtype=torch.int32), torch.tensor([5, 41, 30], dtype=torch.int32)
    positions = torch.cat((torch.arange(5), torch.tensor([40]), torch.arange(19, 30), torch.zeros(3, dtype=torch.long)))
    table = torch.tensor([[3, 9], [4, 9], [7, 9]], dtype=torch.int32)
    cos, sin = rand(64, 1, 1, 8), rand(64, 1, 1, 8, seed=1)
    results = []
    for fn in (REAL["build_c2_ring_metadata"], caches.ring_metadata):
        out = {
            "ring_metadata_output": torch.full((5, 3), -7, dtype=torch.int32),
            "complete_mask_output": torch.zeros(20, dtype=torch.bool),
            "source_positions_output": torch.full((20,), -7),
            "cos_output": torch.zeros(20, 1, 1, 8),
            "sin_output": torch.zeros(20, 1, 1, 8),
        }
        fn(bounds, lens, positions, table, cos, sin, 3, 20, 3, 17, skip_update=skip, **out)
        results.append(out)
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name]), name


# ---- judged by plain formulas ---------------------------------------------------------------------------------------


def test_int8_quantisation_keeps_values():
    x = rand(4, 2, 128).bfloat16()
    q, scale = sparse_a2.quantize_query(x)
    assert q.dtype == torch.int8
    assert scale.dtype == torch.half
    assert int(q.abs().max()) == 127
    assert ((q.double() * scale.double().unsqueeze(-1) - x.double()).abs() <= scale.double().unsqueeze(-1)).all()


def test_packed_rows_read_back_close_to_what_was_written():
    x = rand(7, 512, seed=3).bfloat16()
    for kind, step in ((sparse_a5.WINDOW, 2**-4), (sparse_a5.COMPRESSED, 2**-1)):
        rows = sparse_a5.encode(x, kind)
        back = sparse_a5.decode(rows, 512, kind)
        assert ((back - x.double()).abs() <= step * x.double().abs().amax()).all()
        again = sparse_a5.encode(back, kind)
        assert torch.equal(sparse_a5.decode(again, 512, kind), back)


def test_fp4_codes_round_to_the_nearest_value():
    x = torch.linspace(-6.5, 6.5, 401, dtype=torch.float64)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    grid = torch.cat((grid, -grid))
    for ties_even in (True, False):
        got = sparse_a5.fp4_values(sparse_a5.fp4_codes(x, ties_even))
        best = (x.unsqueeze(-1) - grid).abs().amin(-1)
        assert torch.equal((x - got).abs(), best)


def test_window_attention_equals_plain_softmax():
    """One request, window 8, no compressed side, against dense softmax attention with a sink."""
    n, length, heads, width = 5, 21, 2, 16
    q = rand(n, heads, width, seed=4).bfloat16()
    cache, table = rand(9, 4, 1, width, seed=5).bfloat16(), torch.tensor([[3, 1, 8, 0, 5, 2]], dtype=torch.int32)
    sinks, lens = rand(heads, seed=6), torch.tensor([length], dtype=torch.int32)
    got, _ = sparse_a2.sparse_flash_mla(
        q,
        ori_kv=cache,
        ori_block_table=table,
        cu_seqlens_q=torch.tensor([0, n]),
        seqused_ori_kv=lens,
        sinks=sinks,
        softmax_scale=0.25,
        ori_mask_mode=4,
        ori_win_left=7,
        ori_win_right=0,
        layout_q="TND",
        layout_kv="PA_BBND",
    )
    rows = torch.stack([cache[table[0, p // 4], p % 4, 0] for p in range(length)]).double()
    for i in range(n):
        p = length - n + i
        keys = rows[max(p - 7, 0) : p + 1]
        logits = torch.cat((q[i].double() @ keys.t() * 0.25, sinks.double().unsqueeze(1)), 1)
        want = logits.softmax(1)[:, :-1] @ keys
        assert torch.equal(got[i], want.bfloat16())


def test_rotary_undoes_itself():
    x = rand(3, 1, 2, 16).double()
    angle = rand(3, 1, 1, 4, seed=1).double()
    cos, sin = angle.cos().repeat_interleave(2, -1), angle.sin().repeat_interleave(2, -1)
    y = x.clone()
    numerics.partial_rotary_(y, cos, sin, "interleave", [8, 16])
    assert not torch.equal(y, x)
    numerics.partial_rotary_(y, cos, sin, "interleave", [8, 16], negate_sin=True)
    torch.testing.assert_close(y, x, atol=1e-14, rtol=0)


def test_mixing_matrix_is_doubly_stochastic():
    hc, width = 4, 8
    x = rand(5, hc, width)
    fn, scale, base = rand(6 * hc, hc * width, seed=1), rand(3, seed=2), rand(6 * hc, seed=3)
    *_, comb, _ = numerics.hc_pre(x, fn, scale, base)
    torch.testing.assert_close(comb.sum(-2), torch.ones(5, hc), atol=1e-4, rtol=0)
    torch.testing.assert_close(comb.sum(-1), torch.ones(5, hc), atol=1e-2, rtol=0)


# ---- strictness -----------------------------------------------------------------------------------------------------


def test_writing_one_slot_twice_raises():
    cache, rows = torch.zeros(2, 4, 8), rand(2, 8)
    with pytest.raises(AssertionError, match="two rows write one cache slot"):
        caches.scatter_nd_update_sk(cache, torch.tensor([[1, 2], [1, 2]]), rows)
    packed = torch.zeros(2, 4, 1, 512 + 32, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="two rows write one cache slot"):
        sparse_a5.kv_compress_epilog_v2(packed, rand(2, 512), torch.tensor([3, 3]))


def test_a_slot_out_of_range_raises():
    with pytest.raises(AssertionError, match="out of range"):
        caches.scatter_nd_update_sk(torch.zeros(2, 4, 8), torch.tensor([[2, 0]]), rand(1, 8))
    with pytest.raises(AssertionError, match="out of range"):
        caches.gather_paged(torch.zeros(2, 4, 8), torch.tensor([0, 2]), torch.tensor([5]))


def test_padded_slots_write_nothing():
    cache = torch.zeros(2, 4, 8)
    caches.scatter_nd_update_sk(cache, torch.tensor([[-1, -1]]), rand(1, 8))
    assert not cache.any()


def test_a_split_made_from_other_lengths_raises():
    lens = torch.tensor([20], dtype=torch.int32)
    split = sparse_a2.sparse_flash_mla_metadata(2, 1, 16, cu_seqlens_q=torch.tensor([0, 5]), seqused_ori_kv=lens)
    sparse_a2.check_split("mla", split, torch.tensor([0, 5]), lens, None, None)
    with pytest.raises(RuntimeError, match="other lengths"):
        sparse_a2.check_split("mla", split, torch.tensor([0, 5]), lens + 1, None, None)


def test_schemas_fit_their_implementations():
    for schema, fn in operators.C_ASCEND.items():
        parsed = torch._C.parse_schema("_C_ascend::" + schema)
        names = list(inspect.signature(fn).parameters.values())
        takes_any = any(p.kind is p.VAR_KEYWORD for p in names)
        assert takes_any or len(names) == len(parsed.arguments), schema


# ---- the engine on it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [48, 512])
def test_chunked_prefill_and_decode(max_tokens):
    s = Session(Rank(make_vllm_config(max_tokens=max_tokens)))
    prompts = {"a": tokens(300, 1), "b": tokens(71, 2), "c": tokens(7, 3)}
    s.run(prompts, arrivals={"b": 1, "c": 3}, max_tokens=6)
    for name in prompts:
        r = report(s, name)
        assert r.bounded <= TIE, (name, r)


def test_window_of_128():
    s = Session(Rank(make_vllm_config(max_tokens=300, sliding_window=128)))
    s.run({"a": tokens(450, 1), "b": tokens(140, 2)}, max_tokens=4)
    for name in "ab":
        r = report(s, name)
        assert r.bounded <= TIE, (name, r)


def test_cache_profile():
    rank = Rank(make_vllm_config())
    packed = rank.text.layers[0].self_attn.packed_cache_ops is not None
    assert packed == ON_A5
