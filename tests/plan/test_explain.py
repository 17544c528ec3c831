"""mw.explain() tells each call's plan, and costs nothing when nobody listens."""

import json

import torch

import maskwise as mw


def test_each_call_is_logged_with_its_shape_mask_and_route():
    x = torch.ones(4, 6)
    with mw.explain() as log:
        mw.sum(x, torch.ones(6, dtype=torch.bool), 0)
        mw.sum(x, mw.Mask.from_lengths([1, 2, 3, 4], max_len=6))
    first, second = log
    assert (first.op, first.shape, first.mask, first.skipped) == ("sum", (4, 6), "bool tensor (6,)", None)
    assert second.mask == "intervals (4, 6)"
    assert (second.elements, second.skipped) == (24, 14)
    assert {first.route, second.route} == {"bare"}


def test_a_broadcast_mask_skips_in_every_row():
    with mw.explain() as log:
        mw.sum(torch.ones(5, 4), mw.Mask.from_lengths(3, max_len=4))
    assert log.calls[0].skipped == 5


def test_nothing_is_logged_outside_the_block_and_blocks_nest():
    x, mask = torch.ones(3), torch.ones(3, dtype=torch.bool)
    with mw.explain() as outer:
        mw.sum(x, mask)
        with mw.explain() as inner:
            mw.sum(x, mask)
    mw.sum(x, mask)
    assert (len(outer), len(inner)) == (2, 1)


def test_a_block_that_raises_stops_listening():
    from maskwise.plan.explain import listeners

    try:
        with mw.explain():
            raise RuntimeError
    except RuntimeError:
        pass
    assert listeners == []


def test_the_log_prints_as_a_table_and_as_json():
    with mw.explain() as log:
        mw.sum(torch.ones(3), torch.ones(3, dtype=torch.bool))
    assert "sum" in str(log)
    assert "1 masked call" in str(log)
    (call,) = json.loads(log.to_json())
    assert call["route"] == "bare"
    assert call["refused"][0][0] == "plain"
