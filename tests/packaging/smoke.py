"""Check an installed Maskwise in a clean environment, without pytest: `python -I smoke.py compiled|pure`.

`make wheel` runs it as "compiled": the wheel must bring a kernel that loads. `make test-pure` runs it as "pure":
without the extension everything works on plain torch, and the first use says so, once, with the command that fixes it.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path


def main(expected: str) -> None:
    """Run every check; an AssertionError is the report."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch

        import maskwise as mw
        from maskwise.ops import backends

        x = torch.arange(12.0).reshape(3, 4).requires_grad_()
        mask = mw.Mask.from_lengths([2, 4, 0], max_len=4)
        for _ in range(2):
            result = mw.sum(x, mask, dim=-1)
        # Large enough that no plan prefers the plain idiom.
        large = mw.sum(torch.ones(512, 512), torch.ones(512, 512, dtype=torch.bool), dim=-1)

    assert Path(__file__).parents[2] / "src" not in Path(mw.__file__).parents, (
        f"the checkout was imported, not the install: {mw.__file__}"
    )
    assert result.tolist() == [1.0, 22.0, 0.0], result
    assert large.eq(512).all()
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert torch.equal(gradient.bool(), mask.to_bool())

    status = backends.status()
    told = [str(w.message) for w in caught if "maskwise" in str(w.message).lower()]
    if expected == "compiled":
        assert status.loaded, status
        assert Path(status.path).name.endswith(".abi3.so"), status.path
        assert told == [], told
    else:
        assert not status.loaded, status
        assert status.path is None, status
        assert len(told) == 1, f"one warning at first use was expected, got {told}"
        assert status.fix in told[0], f"the warning does not hold the fix {status.fix!r}: {told[0]}"

    for command in (["--version"], ["doctor", "--json"], ["bench", "--quick", "--filter", "4x8", "--json"]):
        subprocess.run([sys.executable, "-I", "-m", "maskwise.cli", *command], check=True, stdout=subprocess.DEVNULL)
    print(f"smoke test passed: {expected}, {status}")


if __name__ == "__main__":
    main(sys.argv[1])
