import os
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="the kernels for GPUs are written in Triton")

EVERYTHING = os.environ.get("MASKWISE_COMPILE") == "all"
PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def test_our_kernels_beside_those_of_inductor_are_the_ones_of_the_page():
    from tools.gpu_page import beside_told_by, cells_of

    text = PAGE.read_text(encoding="utf-8")
    if f"compiled by Triton {triton.__version__}," not in text:
        pytest.skip(f"the page was made with another Triton than {triton.__version__}: registers would differ")
    rows = list(beside_told_by(text).values())
    for name, layout, *cells in rows if EVERYTHING else rows[::13]:
        assert [cell.split(" / ")[0] for cell in cells] == cells_of(name, layout, "ours"), (name, layout)


def test_the_page_on_gpus_tells_what_the_launchers_and_the_compiler_do():
    from tools.gpu_page import ALONG, BESIDE, beside_told_by, page, told_by

    text = PAGE.read_text(encoding="utf-8")
    if f"compiled by Triton {triton.__version__}," not in text:
        pytest.skip(f"the page was made with another Triton than {triton.__version__}: registers would differ")
    told = told_by(text)
    assert len(told) > 40
    # The default run compiles every sixth kernel alone; `make test-gpu-compile` compiles all.
    asked = list(told) if EVERYTHING else list(told)[::6]
    beside = beside_told_by(text)
    assert len(beside) == len(ALONG) * len(BESIDE)
    # Both sides, Inductor's from a process of its own, which takes half a minute a row: some rows, and only there.
    compared = list(beside)[3::29] if EVERYTHING else []
    taken = {row: cells for row, cells in beside.items() if row not in compared}
    made = page({row: of_row for row, of_row in told.items() if row not in asked}, taken)
    assert text == made, "stale: make gpu-page"
