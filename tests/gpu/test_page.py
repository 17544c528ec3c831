from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="the kernels for GPUs are written in Triton")

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def test_the_page_on_gpus_tells_what_the_launchers_and_the_compiler_do():
    from tests.gpu.page import page

    text = PAGE.read_text(encoding="utf-8")
    if f"compiled by Triton {triton.__version__}," not in text:
        pytest.skip(f"the page was made with another Triton than {triton.__version__}: registers would differ")
    assert text == page(), "stale: make gpu-page"
