"""The ladder of graph sizes, on odd sizes and its limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_replay.config import SettingError
from vllm_ascend_replay.ladder import bucket_for, check_sizes, default_sizes, fit_sizes, max_buckets, prompt_rows
from vllm_ascend_replay.plan import exact_rows, first_kept


def ladder(**changes):
    return default_sizes(**{**dict(window=128, keep_last=128, max_num_seqs=256, max_num_tokens=16384), **changes})


def test_window_steps_then_an_eighth_of_the_interval():
    assert ladder() == [128 * i for i in range(1, 17)]
    exact = ladder(keep_last=exact_rows(19, 128), max_num_seqs=512)
    assert exact == [*(128 * i for i in range(1, 17)), 2304, 2414, 2560, 2816, 3072]
    # A lone prompt runs no padding row.
    assert bucket_for(2414, exact) == 2414
    assert bucket_for(2415, exact) == 2560


def test_few_requests_need_few_sizes():
    assert ladder(max_num_seqs=1) == [128]
    assert ladder(max_num_seqs=4) == [128, 256, 384, 512]


def test_small_steps_bound_the_ladder():
    assert ladder(max_num_tokens=100) == [100]
    assert ladder(max_num_tokens=300, multiple=8) == [128, 256, 296]
    assert ladder(max_num_tokens=3, multiple=4) == []


@given(
    window=st.integers(1, 300),
    extra=st.integers(0, 3000),
    max_num_seqs=st.integers(1, 600),
    max_num_tokens=st.integers(1, 20000),
    align=st.sampled_from([1, 16, 128]),
    multiple=st.sampled_from([1, 2, 8, 7]),
    prompt=st.integers(1, 30000),
)
def test_ladder_properties(window, extra, max_num_seqs, max_num_tokens, align, multiple, prompt):
    keep = window + extra
    sizes = default_sizes(
        window=window,
        keep_last=keep,
        max_num_seqs=max_num_seqs,
        max_num_tokens=max_num_tokens,
        align=align,
        multiple=multiple,
    )
    limit = max_num_tokens // multiple * multiple
    assert sizes == sorted(set(sizes))
    assert all(0 < size <= limit and size % multiple == 0 for size in sizes)
    if not limit:
        return
    assert sizes[0] <= -(-window // multiple) * multiple
    assert sizes[-1] >= min(prompt_rows(keep, align), limit)
    # No prompt keeps more rows than `prompt_rows` says.
    assert prompt - int(first_kept([prompt], keep, align)[0]) <= prompt_rows(keep, align)


@given(count=st.integers(0, 60), limit=st.integers(0, 70), needed=st.integers(0, 8000))
def test_fit_keeps_the_ends(count, limit, needed):
    sizes = [128 * i for i in range(1, count + 1)]
    fitted = fit_sizes(sizes, limit, needed=needed)
    assert len(fitted) == min(count, limit)
    assert fitted == sorted(set(fitted))
    assert set(fitted) <= set(sizes)
    if count and limit >= 2:
        assert (fitted[0], fitted[-1]) == (sizes[0], sizes[-1])
    if count and limit == 1:
        assert fitted[0] >= min(needed, sizes[-1])
    assert fit_sizes(sizes, None, needed=needed) == sizes


def test_stream_budget():
    assert max_buckets(streams=None, pieces=22) is None
    assert max_buckets(streams=1800, pieces=22) == 81
    # (1800 - 40 G) / pieces / (1 + 2 G)
    assert max_buckets(streams=1800, pieces=22, comm_groups=2) == 1720 // (22 * 5)
    assert max_buckets(streams=1800, pieces=22, comm_groups=2, used=100) == (1720 - 500) // (22 * 5)
    assert max_buckets(streams=1800, pieces=22, comm_groups=2, used=400) == 0
    assert max_buckets(streams=10, pieces=22) == 0


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([], "ascending"),
        ([0, 128], "positive"),
        ([-5], "is '-5'"),
        ([256, 128], "is '256,128'"),
        ([128, 128], "each once"),
        ([128, 1025], "max_num_batched_tokens, 1024; 1025 is larger"),
        ([128, 130], "multiples of 4, the ranks that share the rows; 130 is none"),
    ],
)
def test_bad_sizes_name_the_value(sizes, words):
    with pytest.raises(SettingError, match="SIZES") as error:
        check_sizes("SIZES", sizes, max_num_tokens=1024, multiple=4)
    assert words in str(error.value)


def test_good_sizes_stay():
    assert check_sizes("SIZES", [1, 129, 1024], max_num_tokens=1024) == [1, 129, 1024]


@pytest.mark.parametrize(("rows", "bucket"), [(1, 8), (8, 8), (9, 128), (128, 128), (129, None)])
def test_bucket_for(rows, bucket):
    assert bucket_for(rows, [8, 128]) == bucket
    assert bucket_for(rows, []) is None
