"""A mistake on one rank is a clear error on every rank, and never a hang."""

import pytest
import torch

from tests.distributed import mistakes

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

DISAGREE = "ArgumentError: accumulate: `masks` must have as many micro-batches on every rank, got {} on this one, {} on"


def test_ranks_with_different_numbers_of_micro_batches_all_raise(ranks):
    found = ranks.run(mistakes.different_numbers)
    assert [text[: text.index(" all 4")] for text in found] == [DISAGREE.format(n, 9) for n in (2, 3, 2, 2)]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (mistakes.one_bad_mask, "DtypeError: accumulate: `masks` must hold masks, label tensors"),
        (mistakes.one_without_data, "DeviceError: accumulate: `masks` must hold data, got the device meta"),
        (mistakes.one_negative_count, "ArgumentError: accumulate: `masks` must not be a negative count, got -1"),
        (mistakes.one_bad_index, "DtypeError: accumulate: `ignore_index` must be an int, got str"),
    ],
)
def test_what_cannot_be_counted_on_one_rank_is_an_error_on_every_rank(mistake, message, ranks):
    found = ranks.run(mistake)
    assert found[2].startswith(message)
    others = "ArgumentError: accumulate: `masks` must be countable on every rank, got an error on 1 of 4."
    assert all(found[rank].startswith(others) for rank in (0, 1, 3))


def test_an_average_that_does_not_exist_on_one_rank_is_an_error_on_every_rank(ranks):
    found = ranks.run(mistakes.one_bad_average)
    assert found[3].startswith('ArgumentError: accumulate: `average` must be "ranks", "none" or a positive int')
    assert all("an error on 1 of 4" in text for text in found[:3])


@pytest.mark.parametrize(
    ("averages", "factors"),
    [
        (("ranks", "ranks", "none", "ranks"), (4, 4, 1, 4)),
        (("none", "none", "none", 2), (1, 1, 1, 2)),
        ((2, 1, 1, 2), (2, 1, 1, 2)),
        ((2**24 - 1, 2**24 - 2, 2**24 - 1, 2**24 - 1), (16777215, 16777214, 16777215, 16777215)),
    ],
)
def test_ranks_that_disagree_on_a_valid_average_all_raise(averages, factors, ranks):
    found = ranks.run(mistakes.different_averages, averages)
    for text, factor in zip(found, factors, strict=True):
        start = f"ArgumentError: accumulate: `average` must undo the same factor on every rank, got {factor} on this"
        assert text.startswith(f'{start} one, {sum(factors)} on all 4. Hint: average="ranks" on every rank')


def test_loaders_that_disagree_on_an_average_raise_on_every_rank(ranks):
    found = ranks.run(mistakes.loaders_of_different_averages)
    assert all("`average` must undo the same factor on every rank" in text for text in found)


def test_an_average_of_another_name_and_the_same_factor_is_accepted(ranks):
    # Totals 0 to 3, of two kept elements each.
    assert ranks.run(mistakes.different_averages, ("ranks", 4, 4, "ranks")) == [0.75] * 4
    assert ranks.run(mistakes.different_averages, ("none", 1, 1, "none")) == [0.75] * 4


def test_a_process_outside_of_the_group_raises_and_the_group_counts_without_it(ranks):
    found = ranks.run(mistakes.outside_of_the_group)
    # Totals 0, 1 and 2, of two kept elements each.
    assert found[:3] == [0.5] * 3
    assert found[3].startswith("ArgumentError: accumulate: `group` must be a group that this process is in, got one")


def test_a_mesh_counts_along_one_dim_alone(ranks):
    found = ranks.run(mistakes.outside_of_the_mesh)
    assert all(
        both.startswith("ArgumentError: accumulate: `group` must be a mesh of one dim, got 2") for both, _ in found
    )
    # Ranks 0 and 2 are data-parallel, and 1 and 3.
    assert [one for _, one in found] == [0.5, 1.0, 0.5, 1.0]


def test_a_window_that_is_used_twice_or_from_outside_raises_without_a_collective(ranks):
    for early, inside, late, again in ranks.run(mistakes.twice_and_outside):
        assert "must be open when a loss is scaled, got a window that is not entered yet" in early
        assert "must be left before its result is read" in inside
        assert "must be open when a loss is scaled, got a window that was left" in late
        assert "must be entered once, got a second use" in again


def test_rows_that_one_rank_does_not_know_are_an_error_on_every_rank(ranks):
    found = ranks.run(mistakes.rows_that_one_rank_does_not_know)
    assert all('`kind` must be "token" where plain counts were given' in text for text in found)


def test_counts_that_arrive_late_raise_when_the_window_is_left(ranks):
    for rank, (error, scaled, waited) in enumerate(ranks.run(mistakes.numbers_that_arrive_late)):
        # 10 micro-batches of two kept elements, and gradients that four ranks average.
        assert scaled == pytest.approx([4 / 20])
        assert waited[-1] is True
        assert error.startswith(DISAGREE.format(rank + 1, 10))


def test_a_loader_yields_windows_that_are_counted_ahead_the_last_one_partial(ranks):
    for seen, end in ranks.run(mistakes.loaders, (5, 5, 5, 5)):
        assert end is None
        # Rank r has only the value r + 1, as often on each rank.
        assert seen == [(2, 2.5), (2, 2.5), (1, 2.5)]


def test_loaders_of_different_lengths_raise_on_every_rank_in_the_same_window(ranks):
    for lengths in ((4, 4, 2, 4), (4, 4, 3, 4)):
        for seen, end in ranks.run(mistakes.loaders, lengths):
            assert seen == [(2, 2.5)]
            assert end.startswith("ArgumentError: accumulate: `masks` must have as many micro-batches on every rank")


def test_a_loader_that_fails_on_one_rank_is_an_error_on_every_rank(ranks):
    found = ranks.run(mistakes.loaders, (6, 6, 6, 6), 1)
    assert [seen for seen, _ in found] == [[(2, 2.5)]] * 4
    assert found[1][1] == "OSError: disk full"
    assert all("got an error on 1 of 4" in found[rank][1] for rank in (0, 2, 3))


def test_one_rank_may_read_the_result_alone(ranks):
    found = ranks.run(mistakes.one_reader)
    assert [read for read, _, _ in found] == [0 + 1 + 2 + 3, None, None, None]
    for _, failed, after in found:
        assert failed == "ZeroDivisionError: "
        assert "must be left before its result is read" in after
