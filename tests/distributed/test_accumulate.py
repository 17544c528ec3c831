"""Windows in one process: what is counted, how totals are scaled, and what is logged."""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import maskwise as mw
from maskwise.errors import DeviceError

LENGTHS = mw.Mask.from_lengths([3, 0, 1], max_len=4)
LABELS = torch.tensor([[1, 2, -100, -100], [-100, -100, -100, -100]])


@pytest.mark.parametrize(
    ("entry", "tokens", "rows"),
    [
        (LENGTHS, 4, 2),
        (LENGTHS.to_bool(), 4, 2),
        (LENGTHS.to_bool().T, 4, 3),
        (LENGTHS & (torch.arange(4) != 1), 3, 2),
        (LENGTHS[0], 3, 3),
        (mw.Mask.from_lengths([5, 7], max_len=1_000_000_000), 12, 2),
        (mw.Mask.none((3, 4)), 0, 0),
        (torch.ones(0, 4, dtype=torch.bool), 0, 0),
        (torch.ones(2, 3, 4, dtype=torch.bool), 24, 2),
        (torch.tensor(True), 1, 1),
        (LABELS, 2, 1),
    ],
    ids=str,
)
def test_kept_elements_and_rows_that_keep_something_are_counted(entry, tokens, rows):
    window = mw.accumulate([entry, entry], ignore_index=-100)
    assert (window.count().item(), window.count("sequence").item()) == (2 * tokens, 2 * rows)
    assert window.count().dtype is torch.int64
    single = mw.accumulate(entry, ignore_index=-100)
    assert (single.count().item(), single.micro_batches) == (tokens, 1)


def test_plain_counts_are_summed_and_may_be_mixed_with_masks():
    assert mw.accumulate([3, torch.tensor(4), torch.tensor(5, dtype=torch.int32), LENGTHS]).count().item() == 16
    assert mw.accumulate(7).count().item() == 7
    assert mw.accumulate(entry for entry in (1, 2)).count().item() == 3
    # More than a float can count.
    assert mw.accumulate([2**53, 1, 1, 1]).count().item() == 2**53 + 3


def test_a_window_without_micro_batches_counts_nothing():
    with mw.accumulate([]) as window:
        pass
    assert window.result() == (0, 0)
    assert window.result().mean.item() == 0
    assert window.value().item() == 0


@pytest.mark.parametrize(("average", "factor"), [("ranks", 1), ("none", 1), (8, 8)])
def test_the_factor_that_undoes_an_average_can_be_read_and_is_not_logged(average, factor):
    with mw.accumulate([2, 2], average=average) as window:
        parts = window.scale(torch.tensor(6.0)), window.scale(torch.tensor(6.0), kind=3)
    assert window.factor == factor
    assert [part.item() for part in parts] == [6 / 4 * factor, 6 / 3 * factor]
    assert window.result() == (6, 4)
    assert window.value().item() == 6 / 4 + 6 / 3


def test_nothing_kept_anywhere_gives_zero_and_zero_gradients():
    x = torch.ones(2, 3, requires_grad=True)
    with mw.accumulate([mw.Mask.none((2, 3))] * 2) as window:
        loss = sum(mw.loss(F.mse_loss, x, torch.zeros(2, 3), mw.Mask.none((2, 3)), denominator=window) for _ in "ab")
        loss.backward()
    assert loss.item() == 0
    assert torch.equal(x.grad, torch.zeros(2, 3))
    assert window.value().item() == 0


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_totals_keep_their_dtype_but_halves_which_become_float32(dtype, expected):
    total = torch.tensor(3.0, dtype=dtype, requires_grad=True)
    with mw.accumulate([4]) as window:
        part = window.scale(total)
        part.backward()
    assert part.dtype is expected
    assert part.item() == 0.75
    assert total.grad.item() == 0.25
    assert window.result().sum.dtype is torch.float64


def test_what_is_logged_is_summed_in_float64():
    with mw.accumulate([1]) as window:
        for _ in range(3):
            window.scale(torch.tensor(2.0**24 + 2))
        window.scale(torch.tensor(1.0))
    assert window.result().sum.item() == 3 * (2**24 + 2) + 1


def test_clipping_after_the_window_sees_the_norm_of_the_whole_batch():
    torch.manual_seed(0)
    net = nn.Linear(4, 1).double()
    x, mask = torch.randn(6, 3, 4, dtype=torch.float64), mw.Mask.from_lengths([3, 1, 0, 2, 3, 1])
    target = torch.zeros(6, 3, 1, dtype=torch.float64)
    parts = (slice(0, 1), slice(1, 4), slice(4, 6))
    with mw.accumulate([mask[part] for part in parts]) as window:
        for part in parts:
            mw.loss(F.mse_loss, net(x[part]), target[part], mask[part][..., None], denominator=window).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    net.zero_grad()
    loss = mw.loss(F.mse_loss, net(x), target, mask[..., None])
    loss.backward()
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(net.parameters(), 0.01), rtol=1e-12, atol=0)
    torch.testing.assert_close(window.result().mean, loss.detach(), rtol=1e-12, atol=0)


def test_a_loader_is_cut_into_windows_and_can_be_iterated_again():
    rows = [torch.arange(n + 1) for n in range(5)]
    loader = DataLoader(rows, batch_size=1, collate_fn=lambda batch: batch[0])
    windows = mw.distributed.Windows(loader, 2, lambda x: x > 0)
    assert len(windows) == 3
    for _ in range(2):
        found = [([len(x) for x in batches], window.count().item()) for window, batches in windows]
        assert found == [([1, 2], 0 + 1), ([3, 4], 2 + 3), ([5], 4)]
    assert list(mw.distributed.Windows([], 2, len)) == []
    exact = mw.distributed.Windows(iter(rows[:4]), 2, len)
    assert [window.micro_batches for window, _ in exact] == [2, 2]


def test_a_trainer_finds_the_sampler_whose_epoch_it_sets():
    budget = mw.TokenBudgetSampler([3, 4], budget=9)
    by_batch = DataLoader([0, 1], batch_sampler=budget)
    assert mw.distributed.Windows(by_batch, 2, len).sampler is budget
    loader = DataLoader([0, 1], shuffle=True)
    assert mw.distributed.Windows(loader, 2, len).sampler is loader.sampler
    assert mw.distributed.Windows([0, 1], 2, len).sampler is None


class NoSync(TorchDispatchMode):
    """Raises where a tensor is read on the host, or where a shape depends on values."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        assert not any(part in name for part in ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select")), name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["token", "sequence", 8])
def test_neither_counting_nor_scaling_waits_for_the_device(kind):
    keep, total = LENGTHS.to_bool(), torch.ones(())
    with NoSync(), mw.accumulate([keep, keep != 0]) as window:
        part = window.scale(total, kind)
    with NoSync():
        result = window.result() if kind == 8 else window.result(kind)
        value = window.value()
    assert part.item() == value.item()
    assert result.count.item() == (4 if kind == "sequence" else 8)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoSync():
        total.item()


def test_counts_are_summed_on_the_accelerator_of_a_group_that_serves_it(monkeypatch):
    module = import_module("maskwise.distributed.accumulate")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    for served, device in (("cpu:gloo,cuda:nccl", "cuda:1"), ("cuda:nccl", "cuda:1"), ("cpu:gloo", "cpu")):
        monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group, served=served: served)
        assert module._device_of(object(), module._Tally()) == torch.device(device)


def test_a_loader_that_fails_raises_where_its_window_is_entered():
    def load():
        yield torch.ones(2)
        raise OSError("disk full")

    ((window, batches),) = mw.distributed.Windows(load(), 2, len)
    assert len(batches) == 1
    with pytest.raises(OSError, match="disk full"), window:
        pass


def test_a_window_says_what_it_is():
    window = mw.accumulate([1, 2], average=4)
    assert repr(window) == "Window(micro_batches=2, ranks=1, factor=4, new)"


def test_a_total_without_data_is_refused():
    with mw.accumulate([1]) as window, pytest.raises(DeviceError, match="scale: `total` must hold data"):
        window.scale(torch.ones((), device="meta"))
