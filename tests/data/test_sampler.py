"""The batch sampler: budgets kept, nothing lost, the same batches for the same seed and epoch, shares for processes."""

import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import maskwise as mw
from maskwise.data.sampler import bucket, first_fit
from maskwise.errors import ArgumentError, DtypeError, ShapeError

METHODS = ["first_fit", "bucket"]
every_method = pytest.mark.parametrize("method", METHODS)


def lengths(n=500, longest=64, seed=0):
    return torch.randint(1, longest + 1, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def first_fit_by_a_loop(sizes, budget, most):
    """First-fit decreasing as the textbook writes it: one sequence at a time."""
    batches = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        for batch in batches:
            if sum(sizes[j] for j in batch) + sizes[i] <= budget and (most is None or len(batch) < most):
                batch.append(i)
                break
        else:
            batches.append([i])
    return batches


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 50), st.one_of(st.none(), st.integers(1, 4)))
def test_first_fit_matches_the_textbook_loop(sizes, budget, most):
    got = [batch.tolist() for batch in first_fit(torch.tensor(sizes, dtype=torch.int64), budget, most)]
    assert got == first_fit_by_a_loop(sizes, budget, most)


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 50), st.one_of(st.none(), st.integers(1, 4)))
def test_buckets_fit_when_padded_and_are_maximal(sizes, budget, most):
    batches = [batch.tolist() for batch in bucket(torch.tensor(sizes, dtype=torch.int64), budget, most)]
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    assert [sizes[i] for batch in batches for i in batch] == sorted(sizes, reverse=True)
    for batch in batches:
        assert max(sizes[i] for i in batch) * len(batch) <= budget
    for batch in batches[:-1]:
        assert max(sizes[i] for i in batch) * (len(batch) + 1) > budget or len(batch) == most


@every_method
@pytest.mark.parametrize("pool", [None, 100])
@pytest.mark.parametrize("max_sequences", [None, 5])
def test_every_sequence_comes_once_and_no_batch_passes_the_budget(method, pool, max_sequences):
    sizes = lengths()
    sampler = mw.TokenBudgetSampler(sizes, 256, method=method, pool=pool, max_sequences=max_sequences)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    for batch in batches:
        total = sum(sizes[i] for i in batch)
        padded = max(sizes[i] for i in batch) * len(batch)
        assert (padded if method == "bucket" else total) <= 256
        assert len(batch) <= (max_sequences or len(sizes))


@every_method
@pytest.mark.parametrize("pool", [None, 50])
def test_seed_and_epoch_decide_and_nothing_else_does(method, pool):
    def batches(seed, epoch, before=()):
        sampler = mw.TokenBudgetSampler(lengths(), 256, method=method, pool=pool, seed=seed)
        for other in before:
            sampler.set_epoch(other)
            list(sampler)
        sampler.set_epoch(epoch)
        torch.manual_seed(torch.seed())
        return list(sampler)

    assert batches(0, 3) == batches(0, 3, before=(0, 1, 2))
    assert len({str(batches(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_without_shuffling_every_epoch_is_the_same():
    sampler = mw.TokenBudgetSampler(lengths(), 256, shuffle=False)
    first = list(sampler)
    sampler.set_epoch(5)
    assert list(sampler) == first


def test_a_pool_changes_batches_from_epoch_to_epoch():
    sizes = list(range(1, 65))
    for pool, differ in ((None, False), (16, True)):
        sampler = mw.TokenBudgetSampler(sizes, 64, pool=pool)
        found = set()
        for epoch in range(4):
            sampler.set_epoch(epoch)
            found.add(frozenset(frozenset(batch) for batch in sampler))
        assert (len(found) > 1) is differ


def test_its_waste_is_what_the_batches_waste():
    sizes = lengths()
    for method in METHODS:
        sampler = mw.TokenBudgetSampler(sizes, 256, method=method)
        batches = list(sampler)
        waste = sampler.waste
        padded = sum(max(sizes[i] for i in batch) * len(batch) for batch in batches)
        assert (waste.batches, waste.tokens, waste.padded) == (len(batches), sum(sizes), padded)
        assert waste.padding == pytest.approx(1 - sum(sizes) / padded)
        assert waste.unused == pytest.approx(1 - sum(sizes) / (256 * len(batches)))


def test_each_method_wastes_little_of_what_it_is_for():
    sizes = lengths(n=2000)
    fit, buckets = (mw.TokenBudgetSampler(sizes, 512, method=method).waste for method in METHODS)
    # 2000 lengths in 1..64 leave no hole that a short sequence does not fill; neighbours differ by one token or two.
    assert fit.unused < 0.01
    assert buckets.padding < 0.02


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("replicas", [2, 3, 7])
def test_ranks_share_the_batches_equally(replicas, drop_last):
    sizes = lengths()
    alone = mw.TokenBudgetSampler(sizes, 256)
    samplers = [
        mw.TokenBudgetSampler(sizes, 256, num_replicas=replicas, rank=rank, drop_last=drop_last)
        for rank in range(replicas)
    ]
    for sampler in (alone, *samplers):
        sampler.set_epoch(2)
    shares = [list(sampler) for sampler in samplers]
    assert len({len(share) for share in shares}) == 1
    merged = [batch for batches in zip(*shares, strict=True) for batch in batches]
    whole = list(alone)
    assert len(merged) == len(whole) // replicas * replicas if drop_last else -(-len(whole) // replicas) * replicas
    assert merged[: len(whole)] == whole[: len(merged)]
    assert all(batch in whole for batch in merged)
    assert samplers[0].waste == alone.waste


def test_more_processes_than_batches_all_get_one():
    shares = [list(mw.TokenBudgetSampler([1, 2], 3, num_replicas=5, rank=rank)) for rank in range(5)]
    assert [len(share) for share in shares] == [1] * 5


SCRIPT = """
import torch, maskwise as mw, tempfile, os
store = torch.distributed.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
sampler = mw.TokenBudgetSampler([1, 2, 3], 3)
print(sampler.num_replicas, sampler.rank, mw.TokenBudgetSampler([1], 1, num_replicas=4, rank=3).rank)
torch.distributed.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
def test_num_replicas_defaults_to_the_world_size():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1", "0", "3"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_takes_it(workers):
    data = [torch.full((n,), float(i)) for i, n in enumerate(lengths(n=40))]
    sampler = mw.TokenBudgetSampler([len(row) for row in data], 128, method="bucket")
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=torch.nn.utils.rnn.pad_sequence, num_workers=workers)
    seen = [int(i) for batch in loader for i in batch[0]]
    assert sorted(seen) == list(range(40))
    assert len(loader) == len(sampler)


def test_a_capacity_of_the_budget_fits_every_batch():
    data = [torch.randn(n, 2) for n in lengths(n=40)]
    for batch in mw.TokenBudgetSampler([len(row) for row in data], 128):
        rows = [data[i] for i in batch]
        mask = mw.Mask.from_lengths([len(row) for row in rows])
        packed = mw.pack(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), mask, capacity=128)
        assert packed.values.shape == (128, 2)
        assert torch.equal(packed.values[: mask.count()], torch.cat(rows))


def test_no_sequences_make_no_batches():
    sampler = mw.TokenBudgetSampler([], 8)
    assert list(sampler) == []
    assert (sampler.waste.padding, sampler.waste.unused) == (0.0, 0.0)


@every_method
def test_sequences_of_no_tokens_come_too(method):
    assert sorted(i for batch in mw.TokenBudgetSampler([0, 3, 0], 3, method=method) for i in batch) == [0, 1, 2]


def test_lengths_may_be_a_tensor_and_are_copied():
    sizes = torch.tensor([1, 2, 3], dtype=torch.int32)
    sampler = mw.TokenBudgetSampler(sizes, 3, shuffle=False)
    sizes.fill_(3)
    assert list(sampler) == [[2], [1, 0]]


def test_it_can_be_pickled():
    sampler = mw.TokenBudgetSampler(lengths(), 256)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)


def test_iterating_does_not_expose_the_cached_batches():
    sampler = mw.TokenBudgetSampler(lengths(), 256)
    next(iter(sampler)).clear()
    assert all(sampler)


ERRORS = [
    (lambda: mw.TokenBudgetSampler([3, 9, 10], 8), ArgumentError, r"the budget 8, got 9 at index 1.*budget=10"),
    (lambda: mw.TokenBudgetSampler([3, -1], 8), ArgumentError, r"at least 0, got -1 at index 1"),
    (lambda: mw.TokenBudgetSampler([3], 0), ArgumentError, r"`budget` must be at least 1, got 0"),
    (lambda: mw.TokenBudgetSampler([3], 8.0), DtypeError, r"`budget` must be an int, got float"),
    (lambda: mw.TokenBudgetSampler([1.5], 8), DtypeError, r"be ints, got torch.float32"),
    (lambda: mw.TokenBudgetSampler(["a"], 8), DtypeError, r"be ints, got list"),
    (lambda: mw.TokenBudgetSampler([[1]], 8), ShapeError, r"one dim, got \(1, 1\)"),
    (lambda: mw.TokenBudgetSampler([1], 8, method="best"), ArgumentError, r"one of 'first_fit', 'bucket'"),
    (lambda: mw.TokenBudgetSampler([1], 8, num_replicas=2), ArgumentError, r"`rank` must be given with num_replicas"),
    (lambda: mw.TokenBudgetSampler([1], 8, num_replicas=2, rank=2), ArgumentError, r"in \[0, 1\] for 2 replicas"),
    (lambda: mw.TokenBudgetSampler([1], 8, max_sequences=0), ArgumentError, r"`max_sequences` must be at least 1"),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_bad_arguments_raise_an_error_with_a_hint(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert str(caught.value).startswith("TokenBudgetSampler: ")
