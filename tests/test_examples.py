"""The examples run, and what they print is what they promise."""

import contextlib
import io
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def printed(request):
    pytest.importorskip("sklearn", reason="two of the examples train on scikit-learn's digits")
    out = io.StringIO()
    with torch.random.fork_rng(), contextlib.redirect_stdout(out):
        runpy.run_path(str(EXAMPLES / f"{request.param}.py"), run_name="__main__")
    return out.getvalue()


def numbers(pattern, text):
    found = re.search(pattern, text)
    assert found, f"{pattern!r} is not in:\n{text}"
    return [float(group.replace(",", "")) for group in found.groups()]


@pytest.mark.parametrize("printed", ["padded_text_classification"], indirect=True)
def test_the_mean_of_real_tokens_classifies_better_than_one_with_padding(printed):
    (masked,) = numbers(r"real tokens: +([\d.]+)%", printed)
    (padded,) = numbers(r"with the padding: +([\d.]+)%", printed)
    assert masked > padded + 10


@pytest.mark.parametrize("printed", ["recommender_topk"], indirect=True)
def test_places_that_nothing_is_allowed_for_stay_empty(printed):
    empty, places, forbidden = numbers(r"leaves (\d+) of (\d+) places.* recommend (\d+) forbidden", printed)
    assert 0 < empty < places
    assert forbidden == empty


@pytest.mark.parametrize("printed", ["pruned_mlp"], indirect=True)
def test_a_compressed_network_is_as_right_as_the_pruned_one(printed):
    (pruned,) = numbers(r"5% of the weights: +([\d.]+)% right", printed)
    compressed, difference = numbers(r"compressed: +([\d.]+)% right, largest difference (\S+)", printed)
    before, after = numbers(r"parameters: +([\d,]+) → ([\d,]+)", printed)
    # Rounding may turn one of 497 digits that lies on the border between two classes.
    assert compressed == pytest.approx(pruned, abs=0.21)
    assert difference < 1e-4
    assert pruned > 80
    assert after < before


@pytest.mark.parametrize("printed", ["masked_autoencoder_digits"], indirect=True)
def test_hidden_patches_are_drawn_better_than_by_the_mean_image(printed):
    error, mean, seen = numbers(r"patches ([\d.]+), of the mean image ([\d.]+); the encoder saw (\d+)%", printed)
    assert error < 0.9 * mean
    assert seen == 50


@pytest.mark.parametrize("printed", ["segment_packed_lm"], indirect=True)
def test_packed_documents_have_the_loss_that_they_have_alone(printed):
    together, alone = numbers(r"rows ([\d.]+), of the documents one by one ([\d.]+)", printed)
    # Means of thousands of losses, added in another order.
    assert together == pytest.approx(alone, rel=1e-4)
    first, last = numbers(r"step  0: ([\d.]+)[\s\S]*step 30: ([\d.]+)", printed)
    assert last < first / 2


@pytest.mark.parametrize("printed", ["masked_image_modelling"], indirect=True)
def test_a_convnet_on_visible_patches_draws_the_hidden_ones(printed):
    error, mean = numbers(r"hidden pixels: ([\d.]+), of the mean image ([\d.]+)", printed)
    assert error < 0.8 * mean
    assert numbers(r"computed (\d+) %", printed) == [38]


@pytest.mark.parametrize("printed", ["conformer_padding"], indirect=True)
def test_padding_does_not_reach_the_frames_of_a_conformer(printed):
    (without,) = numbers(r"without a mask: .*largest (\S+)", printed)
    (masked,) = numbers(r"with a mask: .*largest (\S+)", printed)
    assert masked < 1e-5
    assert without > 0.05
    assert numbers(r"(\d+)% are computed \(rows\)", printed) == [40]


@pytest.mark.parametrize("printed", ["video_stream"], indirect=True)
def test_frames_of_a_stream_compute_what_has_changed(printed):
    share, difference = numbers(r"([\d.]+) % of all positions were computed; largest difference (\S+)", printed)
    assert share < 5
    assert difference < 1e-5
    assert numbers(r"first.0 +\w+ +([\d.]+) %", printed) == [0.3]


# Plain Python runs the cells, so that the tests need no Jupyter: they print and use no magics.
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_prints_what_is_stored_in_it(path):
    names = {"__name__": "__main__"}
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    with torch.random.fork_rng():
        for cell in cells:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("".join(cell["source"]), f"{path.name}[{cell['execution_count']}]", "exec"), names)
            assert out.getvalue() == "".join(text for output in cell["outputs"] for text in output["text"])
    assert sum(len(cell["outputs"]) for cell in cells) > 5


def test_every_example_says_how_it_is_run():
    for path in EXAMPLES.glob("*.py"):
        assert f"python examples/{path.name}" in path.read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.ipynb"):
        assert f"jupyter lab examples/{path.name}" in path.read_text(encoding="utf-8")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_two_ranks_with_one_denominator_train_as_one_process_and_with_means_they_do_not():
    # In a process of its own, since the ranks import it by its name.
    program = [sys.executable, str(EXAMPLES / "distributed_denominator.py")]
    printed = subprocess.run(program, check=True, capture_output=True, text=True, timeout=300).stdout
    (means,) = numbers(r"means of micro-batches and ranks: .* by at most (\S+)", printed)
    (windows,) = numbers(r"one denominator: .* by at most (\S+)", printed)
    assert means > 1e-2
    assert windows < 1e-12
