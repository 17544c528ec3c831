"""The batch sampler: budgets kept, nothing lost, the same batches for the same seed and epoch, shares for processes."""

import pickle
import subprocess
import sys
from pydoc_data.topics import topics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import maskwise as mw
from maskwise.data import context_shares
from maskwise.data.sampler import bucket, even_buckets, even_fit, first_fit
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


# -- ranks -------------------------------------------------------------------------------------------------------------
def words():
    """The numbers of words of the paragraphs of Python's own documentation, at most 512: 2,608 real lengths."""
    paragraphs = [paragraph.split() for topic in topics.values() for paragraph in topic.split("\n\n")]
    return [min(512, len(paragraph)) for paragraph in paragraphs if paragraph]


def on_ranks(sizes, budget, replicas, epoch=0, **options):
    """The samplers of all ranks, and their steps: one batch for each rank."""
    samplers = [
        mw.TokenBudgetSampler(sizes, budget, num_replicas=replicas, rank=rank, **options) for rank in range(replicas)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers, list(zip(*samplers, strict=True))


def flat(steps):
    return [i for step in steps for batch in step for i in batch]


@every_method
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("pool", [None, 100])
@pytest.mark.parametrize("replicas", [2, 3, 7, 16])
def test_ranks_have_equally_many_batches_and_every_sequence_comes_once(replicas, method, pool, shuffle):
    sizes = lengths()
    samplers, steps = on_ranks(sizes, 256, replicas, 2, method=method, pool=pool, shuffle=shuffle, max_sequences=9)
    assert {len(sampler) for sampler in samplers} == {len(steps)}
    assert sorted(flat(steps)) == list(range(len(sizes)))
    for batch in (batch for step in steps for batch in step):
        total, longest = sum(sizes[i] for i in batch), max(sizes[i] for i in batch)
        assert (longest * len(batch) if method == "bucket" else total) <= 256
        assert 0 < len(batch) <= 9
    assert {sampler.waste for sampler in samplers} == {samplers[0].waste}


@pytest.mark.parametrize("replicas", [2, 3, 7])
def test_without_the_last_batches_those_that_are_left_come_once(replicas):
    sizes = lengths()
    _, steps = on_ranks(sizes, 256, replicas, drop_last=True)
    assert len(steps) == len(mw.TokenBudgetSampler(sizes, 256)) // replicas
    assert len(flat(steps)) == len(set(flat(steps)))


@pytest.mark.parametrize("budget", [512, 2048, 4096])
@pytest.mark.parametrize("replicas", [2, 8, 16])
@pytest.mark.parametrize("epoch", [0, 1])
def test_ranks_have_as_many_tokens_in_every_step_of_real_text(replicas, budget, epoch):
    sizes = words()
    (sampler, *_), steps = on_ranks(sizes, budget, replicas, epoch)
    tokens = [[sum(sizes[i] for i in batch) for batch in step] for step in steps]
    assert max(replicas * max(step) / sum(step) for step in tokens) <= 1.05
    totals = [sum(step[rank] for step in tokens) for rank in range(replicas)]
    assert replicas * max(totals) / sum(totals) <= 1.01
    expected = replicas * sum(map(max, tokens)) / sum(map(sum, tokens))
    assert sampler.waste.imbalance == pytest.approx(expected)
    # No more steps than the tokens take.
    assert len(steps) <= -(-len(mw.TokenBudgetSampler(sizes, budget)) // replicas)


@pytest.mark.parametrize(("replicas", "budget"), [(2, 512), (2, 4096), (8, 512), (8, 4096)])
def test_padded_batches_have_as_many_positions_on_all_ranks(replicas, budget):
    (sampler, *_), _ = on_ranks(words(), budget, replicas, method="bucket")
    assert 1.0 <= sampler.waste.imbalance <= 1.05


def test_no_rank_always_has_the_heaviest_batch():
    sizes = lengths(200)
    for shuffle in (True, False):
        _, steps = on_ranks(sizes, 300, 4, shuffle=shuffle, method="bucket")
        positions = [[max(sizes[i] for i in batch) * len(batch) for batch in step] for step in steps]
        heaviest = {step.index(max(step)) for step in positions}
        assert len(heaviest) > 1


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 9), st.sampled_from(METHODS), st.booleans())
def test_any_lengths_on_any_number_of_ranks(sizes, replicas, method, shuffle):
    _, steps = on_ranks(sizes, 20, replicas, method=method, shuffle=shuffle)
    found = flat(steps)
    assert set(found) == set(range(len(sizes)))
    # Where there are fewer sequences than batches, the rest of a single step is repeated.
    assert len(found) == len(sizes) or len(found) - len(sizes) < replicas
    assert all(batch for step in steps for batch in step)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(1, 12), st.sampled_from([None, 2]))
def test_even_batches_have_what_they_were_given(sizes, parts, most):
    for even, method in ((even_fit, first_fit), (even_buckets, bucket)):
        batches = even(torch.tensor(sizes), 25, parts, most)
        if batches is None:
            assert len(sizes) < parts or len(method(torch.tensor(sizes), 25, most)) >= parts or most or even is even_fit
            continue
        assert len(batches) == parts
        assert sorted(i for batch in batches for i in batch.tolist()) == list(range(len(sizes)))
        assert all(len(batch) <= (most or len(sizes)) for batch in batches)


def test_more_processes_than_sequences_all_get_one_batch():
    shares = [list(mw.TokenBudgetSampler([1, 2], 3, num_replicas=5, rank=rank)) for rank in range(5)]
    assert [len(share) for share in shares] == [1] * 5


# -- attention, and context parallelism --------------------------------------------------------------------------------
@every_method
def test_attention_is_balanced_where_that_is_chosen(method):
    sizes = words()
    balances = {}
    for balance in ("tokens", "attention"):
        _, steps = on_ranks(sizes, 1024, 4, balance=balance, method=method)
        assert sorted(flat(steps)) == list(range(len(sizes)))
        squares = [[sum(sizes[i] ** 2 for i in batch) for batch in step] for step in steps]
        balances[balance] = 4 * sum(map(max, squares)) / sum(map(sum, squares))
    # A few paragraphs have half of all squares: their batches are in steps of their own.
    assert balances["attention"] < 1.2
    assert balances["tokens"] > 1.8


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 6))
def test_context_shares_have_every_token_once(sizes, replicas):
    shares = context_shares(sizes, replicas)
    assert len(shares) == replicas
    assert sorted(i for share in shares for i in share.tolist()) == list(range(sum(sizes)))
    assert all(share.equal(share.sort().values) for share in shares)


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_context_shares_of_packed_text_have_as_many_tokens_and_as_much_attention(replicas):
    sizes = torch.tensor(words())
    for batch in list(mw.TokenBudgetSampler(sizes, 4096, balance="attention"))[:5]:
        lengths = sizes[batch]
        # What a token attends to: itself, and all before it in its sequence.
        seen = torch.cat([torch.arange(1, n + 1) for n in lengths.tolist()])
        shares = context_shares(lengths, replicas)
        for counts in ([len(share) for share in shares], [int(seen[share].sum()) for share in shares]):
            assert replicas * max(counts) / sum(counts) < 1.05


# -- interrupted runs --------------------------------------------------------------------------------------------------
@every_method
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_run_goes_on_with_the_batches_that_were_still_to_come(replicas, method):
    options = {"method": method, "pool": 200, "seed": 5}
    samplers, steps = on_ranks(lengths(), 256, replicas, epoch=4, **options)
    for rank, sampler in enumerate(samplers):
        iterator = iter(sampler)
        taken = [next(iterator) for _ in range(3)]
        state = sampler.state_dict()
        assert (state["epoch"], state["steps"]) == (4, [[replicas, 3]])
        assert state == sampler.state_dict(batches=3)
        again = mw.TokenBudgetSampler(lengths(), 256, num_replicas=replicas, rank=rank, **options)
        again.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert again.state_dict() == state
        again.set_epoch(4)
        assert taken + list(again) == [step[rank] for step in steps]
        # The next iteration is of the whole epoch, and the next epoch another.
        assert list(again) == [step[rank] for step in steps]
        again.set_epoch(5)
        sampler.set_epoch(5)
        assert list(again) == list(sampler) != [step[rank] for step in steps]


def test_a_run_goes_on_with_other_numbers_of_ranks_and_every_sequence_comes_once():
    sizes, seen, state = lengths(), [], None
    for replicas, count in ((4, 3), (2, 5), (2, 1), (5, 2), (1, 10_000)):
        samplers = [mw.TokenBudgetSampler(sizes, 256, num_replicas=replicas, rank=rank) for rank in range(replicas)]
        if state is not None:
            for sampler in samplers:
                sampler.load_state_dict(state)
        steps = [step for step, _ in zip(zip(*samplers, strict=True), range(count), strict=False)]
        seen += flat(steps)
        state = samplers[0].state_dict(batches=state["steps"][-1][1] + 1 if (replicas, count) == (2, 1) else len(steps))
    assert sorted(seen) == list(range(len(sizes)))


def test_the_state_of_another_dataset_or_budget_is_refused_and_nothing_changes():
    sampler = mw.TokenBudgetSampler(lengths(), 256)
    before = list(sampler)
    for other in (
        mw.TokenBudgetSampler(lengths()[::-1], 256),
        mw.TokenBudgetSampler(lengths(), 255),
        mw.TokenBudgetSampler(lengths(), 256, seed=1),
    ):
        other.set_epoch(3)
        with pytest.raises(ArgumentError, match=r"load_state_dict: `state` must be of a sampler with the same"):
            sampler.load_state_dict(other.state_dict())
    assert (sampler.epoch, list(sampler)) == (0, before)
    with pytest.raises(ArgumentError, match=r"state_dict: `batches` must be at least 0 and at most the"):
        sampler.state_dict(batches=len(sampler) + 1)


@pytest.mark.parametrize("state", [None, {}, {"epoch": 3}, {"epoch": 3, "steps": [], "arguments": {}}], ids=str)
def test_what_is_no_state_is_refused_and_nothing_changes(state):
    sampler = mw.TokenBudgetSampler(lengths(), 256)
    before = list(sampler)
    with pytest.raises(DtypeError, match=r"`state` must be a dict of TokenBudgetSampler.state_dict"):
        sampler.load_state_dict(state)
    assert (sampler.epoch, list(sampler)) == (0, before)


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
