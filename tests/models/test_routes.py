"""The routes of an unpadded module: packed or padded, in `mw.explain` and under `mw.force`, with a warning."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.models import PaddedRunWarning
from maskwise.models.routes import warn_once


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


def small_encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x, padding = torch.randn(2, 4, 8), mw.Mask.from_lengths([4, 2]).to_key_padding()
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval(), x, {"src_key_padding_mask": padding}


def small_bert():
    transformers = pytest.importorskip("transformers", reason="the extra maskwise[transformers] is not installed")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    ids = torch.arange(8).reshape(2, 4)
    return transformers.BertModel(config).eval(), ids, {"attention_mask": mw.Mask.from_lengths([4, 2]).to_bool().long()}


def tokens_of(output):
    return output if isinstance(output, torch.Tensor) else output.last_hidden_state


@pytest.mark.parametrize("made", [small_encoder, small_bert])
@pytest.mark.parametrize("name", ["padded", "dense", "packed", None])
def test_a_forced_route_is_the_one_that_runs_and_that_is_listed(made, name):
    model, x, mask = made()
    with torch.no_grad():
        expected = tokens_of(model(x, **mask))
        mw.unpad(model)
        with mw.force(name), mw.explain() as log:
            found = [tokens_of(model(x, **mask))]
            # The second decision comes from the cache.
            warned = caught(lambda: found.append(tokens_of(model(x, **mask))))
    route = "padded" if name in {"padded", "dense"} else "packed"
    calls = [call for call in log if call.op.startswith("unpad")]
    assert [(call.op, call.route) for call in calls] == [(f"unpad {type(model).__name__}", route)] * 2
    assert [call.reason for call in calls] == ["forced" if name else "only kept tokens are computed"] * 2
    assert not warned
    for each in found:
        torch.testing.assert_close(each[0], expected[0])
        torch.testing.assert_close(each[1, :2], expected[1, :2])
        # Only packed, a dropped token is 0.
        assert bool(each[1, 2:].any()) == (route == "padded")


def test_a_call_that_cannot_run_packed_runs_padded_whatever_is_forced_and_says_why():
    attention = mw.unpad(nn.MultiheadAttention(8, 2, batch_first=True))
    x, padding = torch.ones(2, 3, 8), mw.Mask.from_lengths([3, 1]).to_key_padding()
    with mw.force("packed"), mw.explain() as log:
        warned = caught(lambda: attention(x, x, x, key_padding_mask=padding))
    (call,) = log
    assert (call.route, call.reason) == ("padded", "the attention weights are requested")
    assert call.refused == (("packed", "the attention weights are requested"),)
    assert call.skipped == 0
    assert len(warned) == 1


def test_a_model_is_compared_packed_whatever_is_forced():
    model, x, mask = small_bert()
    with mw.force("dense"):
        mw.unpad(model)
    with torch.no_grad(), mw.explain() as log:
        model(x, **mask)
    assert [call.route for call in log if call.op == "unpad BertModel"] == ["packed"]


def test_the_report_of_a_model_with_a_head_lists_both_and_where_a_call_ran_padded():
    transformers = pytest.importorskip("transformers", reason="the extra maskwise[transformers] is not installed")
    bert, ids, mask = small_bert()
    model = mw.unpad(transformers.BertForSequenceClassification(bert.config).eval())
    with pytest.warns(PaddedRunWarning):
        model(ids, **mask, output_attentions=True)
    report = mw.models.report(model)
    assert [(row.name, row.adapter) for row in report] == [("", "transformers"), ("bert", "transformers")]
    assert report["bert"].padded == (("the attention weights are requested", "output_attentions=False"),)
