"""mw.explain() records the plan of each call, and costs nothing without an observer."""

import json
from dataclasses import replace

import torch

import maskwise as mw
from maskwise.plan.explain import Log, Tabular


def test_each_call_is_logged_with_its_shape_mask_and_route():
    x = torch.ones(4, 6)
    with mw.explain() as log:
        mw.sum(x, torch.ones(6, dtype=torch.bool), 0)
        mw.sum(x, mw.Mask.from_lengths([1, 2, 3, 4], max_len=6))
    first, second = log
    assert (first.op, first.shape, first.mask) == ("sum", (4, 6), "bool tensor (6,)")
    assert second.mask == "intervals (4, 6)"
    assert (second.elements, second.density) == (24, 10 / 24)
    assert {first.route, second.route} == {"bare"}


def test_a_broadcast_mask_drops_in_every_row():
    with mw.explain() as log:
        mw.pack(torch.ones(4, 5), mw.Mask.from_lengths(3, max_len=4))
    assert log.calls[0].skipped == 5


def test_uncounted_masks_are_reported_as_such():
    with mw.explain() as log:
        mw.pack(torch.ones(4, 64), torch.ones(4, dtype=torch.bool))
    assert (log.calls[0].skipped, log.calls[0].skipped_bytes, log.calls[0].skipped_flops) == (None, None, None)
    assert "elements not counted" in " ".join(str(log).split())


def test_nothing_is_logged_outside_the_block_and_blocks_nest():
    x, mask = torch.ones(3), torch.ones(3, dtype=torch.bool)
    with mw.explain() as outer:
        mw.sum(x, mask)
        with mw.explain() as inner:
            mw.sum(x, mask)
    mw.sum(x, mask)
    assert (len(outer), len(inner)) == (2, 1)


def test_a_block_that_raises_stops_recording():
    from maskwise.plan.dispatch import observers

    try:
        with mw.explain():
            raise RuntimeError
    except RuntimeError:
        pass
    assert observers.values() == ()


def test_the_log_prints_as_a_table_and_as_json():
    with mw.explain() as log:
        mw.sum(torch.ones(3), torch.ones(3, dtype=torch.bool))
    assert "sum" in str(log)
    assert "1 masked call" in str(log)
    (call,) = json.loads(log.to_json())
    assert call["route"] == "bare"
    assert call["refused"][0][0] == "plain"


def test_skipped_work_is_reported_in_elements_flops_and_bytes():
    q = torch.rand(2, 2, 128, 16)
    with mw.explain() as log:
        mw.attention(q, q, q, mw.Mask.from_lengths([32, 32], max_len=128))
        mw.sum(torch.ones(512, 512), mw.Mask.causal(512), -1)
        mw.pack(torch.ones(4, 8), mw.Mask.from_lengths([2, 2, 2, 2], max_len=8))
        mw.apply(lambda rows: rows, torch.ones(4, 8), mask=mw.Mask.from_lengths([2, 2, 2, 2], max_len=8))
    attention, total, packed, applied = log
    # Two products of 2 FLOPs for each feature: of (2 x 2 x 128) queries with 96 keys that nobody keeps.
    assert (attention.route, attention.skipped_flops) == ("bare", 4 * 16 * (2 * 2 * 128 * 96))
    # Nothing is read behind the diagonal.
    above = 512 * 511 // 2
    assert (total.route, total.density) == ("bare", 513 / 1024)
    assert (total.skipped, total.skipped_bytes, total.skipped_flops) == (above, 4 * above, above)
    assert (packed.route, packed.density, packed.skipped) == ("kept", 0.25, 24)
    # fn gets a quarter of 32 elements, which lie in one line of memory with the others; what it computes nobody knows.
    assert (applied.skipped, applied.skipped_bytes, applied.skipped_flops) == (24, 0, None)


def test_the_dense_route_skips_no_work():
    with mw.force("dense"), mw.explain() as log:
        mw.sum(torch.ones(512, 512), mw.Mask.causal(512), -1)
    assert (log.calls[0].skipped_flops, log.calls[0].skipped_bytes) == (0, 0)


def test_steps_of_a_function_are_not_logged_as_calls():
    mask = mw.Mask.from_lengths([1, 3], max_len=4)
    with mw.explain() as log:
        packed = mw.pack(torch.ones(2, 4), mask)
        packed + torch.ones(2, 4)
        mw.apply(torch.neg, torch.ones(2, 4), mask=mw.Mask.from_lengths([1, 0], max_len=4))
    assert [call.op for call in log] == ["pack", "apply"]


class Words(Tabular):
    """A table of one row, of what HTML and rich treat as markup."""

    def table(self):
        from rich.markup import escape
        from rich.table import Table

        table = Table(title="<a> & b", show_footer=True)
        table.add_column("name", "all")
        table.add_column("number", "2", justify="right")
        table.add_row(escape("x[mask] < 1"), "[bold]2[/bold]")
        return table


def test_a_notebook_shows_a_table_as_plain_escaped_html():
    assert Words()._repr_html_() == (
        "<table><caption>&lt;a&gt; &amp; b</caption>"
        '<thead><tr><th style="text-align: left">name</th><th style="text-align: right">number</th></tr></thead>'
        '<tbody><tr><td style="text-align: left">x[mask] &lt; 1</td><td style="text-align: right">2</td></tr></tbody>'
        '<tfoot><tr><th style="text-align: left">all</th><th style="text-align: right">2</th></tr></tfoot></table>'
    )


def test_a_log_without_calls_is_a_table_without_rows():
    with mw.explain() as log:
        pass
    assert "<caption>0 masked calls</caption>" in log._repr_html_()
    assert "<tbody></tbody>" in log._repr_html_()
    with mw.explain() as log:
        mw.sum(torch.ones(2, 3), torch.ones(2, 3) > 0)
    assert "<td" in log._repr_html_()


def test_brackets_in_a_reason_are_printed_as_they_are():
    with mw.explain() as log:
        mw.sum(torch.ones(2, 3), torch.ones(2, 3) > 0)
    shown = Log([replace(log.calls[0], reason="give x[mask] or [/x]")])
    assert "x[mask]" in " ".join(str(shown).split())
    assert "give x[mask] or [/x]" in shown._repr_html_()
