"""`python -m tests.sharded.ranks SIZE FOLDER`: SIZE ranks over gloo exchange the rows of every batch and compare.

Each rank compares with what it computes alone from whole states, bit for bit, and writes its findings as JSON. Imports
no vLLM, so that eight ranks start in seconds.
"""

import json
import multiprocessing
import os
import sys

import torch
import torch.distributed as dist

from tests.sharded.batches import named, random_batches
from vllm_ascend_replay.layouts import WHOLE, GroupRanks, QueryRows, TokenShards, owned_rows, share_of

NUM_RANDOM = 45
CAPACITY = 700


def same(a, b):
    """Whether two tensors are equal in every bit."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def _bytes(x):
    return torch.cat((x.flatten(), x.new_empty(0))).view(torch.uint8)


def chunk_of(value, rank, size, poison):
    """This rank's chunk of a whole tensor; what lies beyond is ``poison``, as padding rows of a step may be."""
    share = share_of(value.shape[0], size)
    mine = value[rank * share : (rank + 1) * share]
    out = value.new_full((share, *value.shape[1:]), poison)
    out[: len(mine)] = mine
    return out


def check(batch, seed, shards, query_rows, rank, size):
    """What differs, by name."""
    rows, states = batch.rows(), batch.states(seed)
    share, kept_share = share_of(batch.num_rows, size), share_of(batch.num_padded, size)
    mine = [chunk_of(s, rank, size, float("nan") if s.is_floating_point() else -77) for s in states]
    compact = list(WHOLE.gather(states, rows))
    expected = [chunk_of(c, rank, size, 0) for c in compact]
    ways = {"device": None}
    if not batch.moved:
        ways["host"] = owned_rows(batch.plan, batch.boundaries, share, size)
    wrong = []
    for way, owned in ways.items():
        got = shards.gather(mine, rows, owned)
        wrong += [f"gather, {way}, state {i}" for i, (a, b) in enumerate(zip(got, expected)) if not same(a, b)]
        # Back: final hidden states and two aux states of other dtypes, then into the step's rows.
        values = [got[0][:, 0], got[1], got[0][:, 1].float()]
        whole = shards.collect(values, batch.num_padded)
        for i, (value, want) in enumerate(zip(whole, (compact[0][:, 0], compact[1], compact[0][:, 1].float()))):
            if not same(value, want):
                wrong.append(f"collect, {way}, value {i}")
        out, want = (torch.zeros(batch.num_rows, 6, dtype=torch.bfloat16) for _ in range(2))
        real = rows >= 0
        out[rows[real]] = whole[0][real]
        want[rows[real]] = states[0][rows[real], 0]
        if not same(out, want):
            wrong.append(f"scatter, {way}")
        # DSA-CP's buffers are as long as the largest step and keep what lies behind the chunk.
        buffers = [torch.full((CAPACITY, 1, 5), -9, dtype=torch.int32), torch.full((CAPACITY,), -9, dtype=torch.int32)]
        for buffer, state in zip(buffers, (mine[3], mine[3][:, 0, 0])):
            buffer[:share] = state
        query_rows.move(buffers, batch.num_rows, rows, owned)
        for buffer, state in zip(buffers, (expected[3], expected[3][:, 0, 0])):
            if not same(buffer[:kept_share], state) or not bool((buffer[max(share, kept_share) :] == -9).all()):
                wrong.append(f"query rows, {way}")
    if not same(shards.collect(mine[:1], batch.num_rows)[0], states[0]):
        wrong.append("collect of one state")
    if not same(shards.shard(states[1], 3.0), chunk_of(states[1], rank, size, 3.0)):
        wrong.append("shard")
    partial = (states[3].flatten(1) % 1000 + rank).float()
    total = chunk_of((states[3].flatten(1) % 1000).float() * size + size * (size - 1) // 2, rank, size, 0)
    if not same(shards.reduce(partial), total):
        wrong.append("reduce")
    return wrong


def run(rank, size, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store{size}", size), rank=rank, world_size=size)
    ranks = GroupRanks(dist.group.WORLD)
    shards, query_rows = TokenShards(ranks), QueryRows(ranks)
    found = {}
    batches = named() + random_batches(NUM_RANDOM)
    for seed, batch in enumerate(batches):
        wrong = check(batch, seed, shards, query_rows, rank, size)
        if wrong:
            found[batch.name] = wrong
    with open(f"{folder}/{size}.{rank}.json", "w") as file:
        json.dump({"batches": len(batches), "wrong": found}, file)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def main():
    size, folder = int(sys.argv[1]), sys.argv[2]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run, args=(rank, size, folder)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(abs(rank.exitcode) for rank in ranks))


if __name__ == "__main__":
    main()
