"""`maskwise draw`: a small language for masks, which is never evaluated, and points at errors."""

import contextlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from maskwise import Mask
from maskwise.cli.app import app
from maskwise.cli.expressions import EXAMPLES, OPERATORS, ExpressionError, parse_mask


def invoke(*arguments):
    return CliRunner().invoke(app, ["draw", *arguments])


KEYS = Mask.from_lengths([2, 3], max_len=4)[:, None, :]
MEANINGS = {
    "causal(4)": Mask.causal(4),
    "causal(3, 5)": Mask.causal(3, 5),
    "causal(3, k=5, offset=2)": Mask.causal(3, 5, offset=2),
    "window(5, 1, right=2)": Mask.window(5, 1, right=2),
    "segments(0, 0, 1, -1)": Mask.from_segments(torch.tensor([0, 0, 1, -1])),
    "segments([[0, 1], [2, 2]])": Mask.from_segments(torch.tensor([[0, 1], [2, 2]])),
    "lengths(2, 4, 3, max_len=5)": Mask.from_lengths([2, 4, 3], max_len=5),
    "lengths([2, 4])": Mask.from_lengths([2, 4]),
    "lengths(3, max_len=5, side=left)": Mask.from_lengths(3, max_len=5, side="left"),
    "lengths(3, max_len=5, side='left')": Mask.from_lengths(3, max_len=5, side="left"),
    "indices(2, 5, size=8)": Mask.from_indices([2, 5], size=8),
    "indices(5, size=8)": Mask.from_indices([5], size=8),
    "indices([[0, 1], [1, 2]], size=(2, 3))": Mask.from_indices([[0, 1], [1, 2]], size=(2, 3)),
    "values([[7, 0], [3, 7]], 7, 3)": Mask.from_values(torch.tensor([[7, 0], [3, 7]]), [7, 3]),
    "values([7, 0], [0])": Mask.from_values(torch.tensor([7, 0]), [0]),
    "full(3, 5)": Mask.full((3, 5)),
    "none(4)": Mask.none(4),
    "full([2, 2])": Mask.full((2, 2)),
    "~causal(4)": ~Mask.causal(4),
    "~~causal(4)": Mask.causal(4),
    "causal(4).T": Mask.causal(4).T,
    "lengths(1, 2).T": Mask.from_lengths([1, 2]).T,
    # As in Python: - binds before &, & before ^, ^ before |, and ~ before all.
    "causal(4) | window(4, 1) & ~causal(4)": Mask.causal(4) | (Mask.window(4, 1) & ~Mask.causal(4)),
    "full(4) & causal(4) - window(4, 0)": Mask.full(4) & (Mask.causal(4) - Mask.window(4, 0)),
    "full(4, 4) - causal(4) - window(4, 0)": (Mask.full((4, 4)) - Mask.causal(4)) - Mask.window(4, 0),
    "(causal(4) | full(4)) ^ window(4, 1)": (Mask.causal(4) | Mask.full(4)) ^ Mask.window(4, 1),
    # Lengths are those of keys beside pairs, and as long as those.
    "causal(4) & lengths(2, 3)": Mask.causal(4) & KEYS,
    "lengths(2, 3) & causal(4)": Mask.causal(4) & KEYS,
    "causal(4) & ~lengths(2, 3)": Mask.causal(4) & ~KEYS,
    "lengths(2) | lengths(5)": Mask.from_lengths(2, max_len=5) | Mask.from_lengths(5),
}


@pytest.mark.parametrize("text", MEANINGS)
def test_an_expression_means_what_python_would(text):
    made, expected = parse_mask(text), MEANINGS[text]
    assert made.shape == expected.shape
    assert torch.equal(made.to_bool(), expected.to_bool())


def test_every_example_of_the_hints_is_one():
    assert all(parse_mask(example).numel() > 0 for example in EXAMPLES)


def test_the_drawing_of_the_readme_is_printed():
    result = invoke("causal(16) & lengths(5,9)")
    assert result.exit_code == 0
    assert "Mask (2, 16, 16)" in result.stdout
    assert "15 █████····" in result.stdout


def test_json_tells_shape_count_and_positions():
    found = json.loads(invoke("lengths(1, 2)", "--json").stdout)
    assert found["shape"] == [2, 2]
    assert (found["kept"], found["density"], found["kind"]) == (3, 0.75, "intervals")
    assert found["positions"] == [[1, 0], [1, 1]]


def test_masks_that_fit_no_memory_are_drawn_and_counted_but_not_listed():
    found = json.loads(invoke("causal(1000000)", "--json").stdout)
    assert (found["kept"], found["positions"]) == (500000500000, None)
    assert invoke("causal(1000000)").exit_code == 0


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_written_and_opened_on_demand(tmp_path, monkeypatch, suffix):
    pytest.importorskip("matplotlib")
    opened = []
    monkeypatch.setattr("typer.launch", opened.append)
    path = tmp_path / f"mask.{suffix}"
    result = invoke("causal(4) & lengths(2, 3)", "--plot", str(path), "--open")
    assert result.exit_code == 0, result.output
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    assert opened == [str(path)]
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


WRONG = [
    ("", 0, "a mask was expected", "causal(16)"),
    ("causal(4) &", 11, "a mask was expected", "causal(16)"),
    ("lenghts(2)", 0, "there is no mask `lenghts`", "lengths(5, 9"),
    ("from_lengths(2)", 0, "there is no mask `from_lengths`", "lengths(5, 9"),
    ("__import__('os')", 0, "there is no mask `__import__`", "one of causal"),
    ("causal(4).__class__", 10, "only `.T`", ".T transposes"),
    ("causal(4) causal(4)", 10, "an operator was expected", "& (both)"),
    ("causal(4))", 9, "an operator was expected", "& (both)"),
    ("(causal(4)", 10, "`)` is missing", ""),
    ("causal", 6, "`(` is missing", "causal(...)"),
    ("causal(", 7, "a number, a list or a name", "full"),
    ("causal(x=4)", 0, "causal takes q=, k=, offset=, not x=", "causal(16)"),
    ("lengths(max_len=3, 2)", 19, "positional arguments come before named", ""),
    ("causal(4, k=2, k=3)", 15, "`k` is given twice", ""),
    ("window(3)", 0, "the arguments do not fit", "window(16, 3"),
    ("causal(-1)", 0, "must be an int of 0 or more, got -1", ""),
    ("full(3) & lengths(5)", 10, "only values from 0 to 3, got 5", "max_len"),
    ("full(3, 5) & full(4)", 11, "shapes (3, 5) and (4,) do not fit", "from the right"),
    ("causal(4.5)", 8, "`)` was expected", ""),
    ("causal(1e9)", 8, "`)` was expected", ""),
    ("causal(99999999999999999999)", 7, "no mask is that large", ""),
    ("(" * 60 + "causal(4)", 51, "nested more than 50 deep", ""),
    ("causal(" + "[" * 60, 58, "nested more than 50 deep", ""),
]


@pytest.mark.parametrize(("text", "place", "what", "hint"), WRONG, ids=[text[:25] for text, *_ in WRONG])
def test_a_mistake_is_shown_at_its_place_with_a_hint(text, place, what, hint):
    with pytest.raises(ExpressionError) as raised:
        parse_mask(text)
    error = raised.value
    assert what in error.what
    assert hint in error.hint
    assert error.start == place
    _, shown, carets, *_ = str(error).splitlines()
    assert shown == f"  {text}"
    assert carets.index("^") == place + 2


def test_a_wrong_expression_ends_with_code_2_and_keeps_its_carets():
    result = invoke("causal(4) & lenghts(2)")
    assert result.exit_code == 2
    assert "\n  causal(4) & lenghts(2)\n              ^^^^^^^\n  Hint: lengths" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plot", "mask.gif"], "--plot writes .png or .svg"),
        (["--open"], "add --plot picture.png"),
    ],
)
def test_options_that_cannot_work_are_refused(arguments, message):
    result = invoke("causal(4)", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_a_picture_of_too_many_positions_is_refused(tmp_path):
    result = invoke("causal(100000)", "--plot", str(tmp_path / "mask.png"))
    assert result.exit_code == 2
    assert "a picture shows 1 to 16,777,216 positions" in result.stderr
    assert list(tmp_path.iterdir()) == []


@given(st.text(alphabet="causlwindow()[]&|^-~.T,= 0123'\"", max_size=40))
def test_no_text_whatever_raises_anything_else(text):
    with contextlib.suppress(ExpressionError):
        assert isinstance(parse_mask(text), Mask)


trees = st.recursive(
    st.sampled_from(["causal(3)", "window(3, 1)", "full(3)", "none(3, 3)", "segments(0, 0, 1)"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(sorted(OPERATORS)), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda t: f"~{t}"),
    ),
    max_leaves=5,
)
NAMES = {
    "causal": Mask.causal,
    "window": Mask.window,
    "full": Mask.full,
    "none": lambda *shape: Mask.none(shape),
    "segments": lambda *ids: Mask.from_segments(torch.tensor(ids)),
}


@given(trees)
def test_random_expressions_agree_with_python(text):
    expected = eval(text, {"__builtins__": {}}, NAMES)
    made = parse_mask(text)
    assert torch.equal(made.to_bool(), expected.to_bool())
