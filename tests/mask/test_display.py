"""What a printed mask looks like."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from maskwise.mask import Mask


def test_a_matrix_is_drawn_row_by_row():
    assert str(Mask.causal(3)) == (
        "Mask (3, 3)  intervals  6 of 9 kept (66.7 %)\n"
        "0 █··\n"
        "1 ██·\n"
        "2 ███\n"
        "█ kept  · dropped"
    )  # fmt: skip


def test_one_dim_is_one_row():
    assert str(Mask.from_indices([0, 3], 5)) == (
        "Mask (5,)  indices  2 of 5 kept (40.0 %)\n"
        "█··█·\n"
        "█ kept  · dropped"
    )  # fmt: skip


def test_more_than_two_dims_show_the_first_slices():
    assert str(Mask.from_lengths([[1], [2], [0], [1]])) == (
        "Mask (4, 1, 2)  intervals  4 of 8 kept (50.0 %)\n"
        "[0]\n"
        "0 █·\n"
        "[1]\n"
        "0 ██\n"
        "… and 2 more slices\n"
        "█ kept  · dropped"
    )  # fmt: skip


def test_nothing_to_draw_is_only_a_headline():
    assert str(Mask.full(())) == "Mask ()  constant  1 of 1 kept (100.0 %)"
    assert str(Mask.full((0, 3))) == "Mask (0, 3)  constant  0 of 0 kept"


def test_row_labels_are_aligned():
    lines = str(Mask.full((11, 1))).split("\n")
    assert lines[1] == " 0 █"
    assert lines[11] == "10 █"


def test_a_large_mask_is_summarised_in_shades():
    lines = str(Mask.causal(6400)).split("\n")
    assert lines[0] == "Mask (6400, 6400)  intervals  20,483,200 of 40,960,000 kept (50.0 %)"
    assert len(lines) == 1 + 32 + 1
    assert lines[1] == "   0 ▓░" + "·" * 62
    assert lines[32] == "6200 " + "█" * 62 + "▓░"
    assert lines[33] == "█ kept  ▓▒░ in part  · dropped   a cell samples up to 200 x 100 positions"


def test_the_density_of_a_huge_function_is_estimated():
    mask = Mask.from_function(lambda q, k: k % 2 == q % 2, (1_000_000, 1_000_000))
    assert str(mask).startswith("Mask (1000000, 1000000)  function  about ")


def test_masks_without_values_have_a_headline_without_a_count():
    assert str(Mask(torch.ones(2, dtype=torch.bool, device="meta"))) == "Mask (2,)  dense  meta"
    with FakeTensorMode():
        assert str(Mask(torch.ones(2, dtype=torch.bool))) == "Mask (2,)  dense"


def test_host_data_for_another_device_is_drawn_from_the_host():
    assert str(Mask.from_lengths([1, 2], device="meta")).split("\n")[:2] == [
        "Mask (2, 2)  intervals  meta  3 of 4 kept (75.0 %)",
        "0 █·",
    ]


def test_the_notebook_form_is_one_self_contained_element():
    html = Mask.from_lengths([[1], [2], [0]])._repr_html_()
    assert html.startswith("<div>")
    assert html.endswith("</div>")
    assert html.count("<svg") == 2
    # One run of cells for each row that keeps something.
    assert html.count('fill-opacity="1.00"') == 2
    assert "and 1 more slice" in html
    assert "http" not in html
    assert "<script" not in html


@pytest.mark.parametrize(
    ("mask", "width", "height"),
    [
        (Mask.causal(128), 512, 512),
        (Mask.from_lengths([1, 5, 2]), 80, 48),
        (Mask.full((256, 64)), 128, 512),
        # Eight rows are drawn, however long they are.
        (Mask.full((8, 4096)), 512, 64),
        (Mask.full((7,)), 112, 16),
    ],
    ids=["square", "small", "high", "wide", "row"],
)
def test_a_notebook_draws_each_position_as_high_as_wide(mask, width, height):
    assert f'<svg width="{width}" height="{height}"' in mask._repr_html_()


def test_a_notebook_draws_a_run_of_cells_at_once():
    html = Mask.from_lengths([3, 0, 2], 4)._repr_html_()
    drawn = re.findall(r'<rect x="(\d+)" y="(\d+)" width="(\d+)" height="(\d+)" fill-opacity="1.00"/>', html)
    assert drawn == [("0", "0", "48", "16"), ("0", "32", "32", "16")]
    assert len(Mask.causal(4096)._repr_html_()) < 20_000
