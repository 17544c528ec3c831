"""The warning of an unpadded module that runs padded."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.models import PaddedRunWarning
from maskwise.models.report import warn_once


def caught(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in found if each.category is PaddedRunWarning]


MESSAGE = "unpad: this Linear runs padded, because a cache is requested. Hint: use_cache=False."


def warn(module, reason="a cache is requested", change="use_cache=False"):
    return caught(lambda: warn_once(module, reason, change))


def test_each_module_warns_once_for_each_reason():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert warn(one) == [MESSAGE]
    assert warn(one) == []
    assert warn(one, "of something else") != []
    assert warn(other) == [MESSAGE]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_has_warned_for_what_its_original_warned_for(copied):
    module = nn.Linear(2, 2)
    warn(module)
    twin = copied(module)
    assert warn(twin) == []
    assert warn(twin, "of something else") != []
    # And the original knows nothing of its copy.
    assert warn(module, "of something else") != []


def test_a_warning_that_is_an_error_is_raised_once():
    module = nn.Linear(2, 2)
    with pytest.raises(PaddedRunWarning, match="a cache is requested"):
        warn_once(module, "a cache is requested", "use_cache=False")
    warn_once(module, "a cache is requested", "use_cache=False")


def test_neither_parameters_nor_the_state_dict_change():
    module = nn.Linear(2, 2)
    before = list(module.state_dict())
    warn(module)
    assert list(module.state_dict()) == before


class Caller(nn.Module):
    def forward(self, x):
        warn_once(self, "a cache is requested", "use_cache=False")
        return x + 1


def test_a_compiled_module_warns_while_it_is_compiled_and_never_again():
    module = Caller()
    compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=False)
    assert len(caught(lambda: compiled(torch.ones(2)))) == 1
    with torch.compiler.set_stance("fail_on_recompile"):
        assert caught(lambda: compiled(torch.ones(2))) == []
    # Another shape is another graph, and the same module.
    assert caught(lambda: compiled(torch.ones(3))) == []


def test_the_warning_names_the_line_of_the_call():
    module = Caller()
    with pytest.warns(PaddedRunWarning) as found:
        module(torch.ones(2))
    assert found[0].filename == __file__


def test_repad_lets_a_module_warn_again():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x, padding = torch.ones(2, 3, 8), mw.Mask.from_lengths([3, 1]).to_key_padding()

    def call():
        return caught(lambda: mw.unpad(attention)(x, x, x, key_padding_mask=padding))

    assert [len(call()), len(call())] == [1, 0]
    mw.models.repad(attention)
    assert len(call()) == 1
