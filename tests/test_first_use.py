"""The functions are imported at first use, wherever that is."""

import subprocess
import sys

SCRIPT = """
import sys, torch, maskwise as mw
assert "maskwise.ops.reduce" not in sys.modules
def both(x, m):
    return mw.softmax(x, m, -1) + mw.sum(x, m, -1, keepdim=True)
call = torch.compile(both, fullgraph=True, backend="aot_eager")
print(call(torch.zeros(1, 2), torch.tensor([True, False])).tolist())
"""


def test_the_first_use_may_be_inside_of_a_graph_that_is_being_traced():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[[1.0, 0.0]]"


def test_every_public_name_is_there_and_no_other():
    import pytest

    import maskwise as mw

    assert all(hasattr(mw, name) for name in mw.__all__)
    assert set(mw.__all__) <= set(dir(mw))
    with pytest.raises(AttributeError, match="module 'maskwise' has no attribute 'summ'"):
        mw.summ
