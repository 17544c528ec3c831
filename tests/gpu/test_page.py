import os
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="the kernels for GPUs are written in Triton")

EVERYTHING = os.environ.get("MASKWISE_COMPILE") == "all"
PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def test_the_page_on_gpus_tells_what_the_launchers_and_the_compiler_do():
    from tools.gpu_page import beside_told_by, page, told_by

    text = PAGE.read_text(encoding="utf-8")
    if f"compiled by Triton {triton.__version__}," not in text:
        pytest.skip(f"the page was made with another Triton than {triton.__version__}: registers would differ")
    told = told_by(text)
    assert len(told) > 40
    # In the default run the compiler is asked for every sixth kernel alone; `make test-gpu-compile` asks for all.
    asked = list(told) if EVERYTHING else list(told)[::6]
    beside = beside_told_by(text)
    assert len(beside) > 40
    # Inductor chooses other tiles in other processes: its table is that of one run of `make gpu-page`.
    made = page({row: of_row for row, of_row in told.items() if row not in asked}, beside)
    assert text == made, "stale: make gpu-page"
