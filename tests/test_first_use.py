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


def test_type_checkers_see_the_public_names_and_no_other():
    import ast
    from importlib import import_module
    from pathlib import Path

    import maskwise as mw

    tree = ast.parse(Path(mw.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
    seen = {"__version__"}
    for node in imports:
        module = import_module(node.module)
        for alias in node.names:
            # What a package re-exports by a star is what its modules list.
            everything = getattr(module, "__all__", None) or exported(module)
            seen |= set(everything) if alias.name == "*" else {alias.asname} - {None}
    assert sorted(seen) == mw.__all__


def exported(package):
    import ast
    from importlib import import_module
    from pathlib import Path

    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    stars = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.names[0].name == "*"]
    return [name for module in stars for name in import_module(module).__all__]
