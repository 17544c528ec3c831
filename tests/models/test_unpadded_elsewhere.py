"""Unpadded Hugging Face models in other processes, replicas, graphs and wrappers, and as parts of others."""

import pickle
import subprocess
import sys
from types import MethodType

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.models import PaddedRunWarning, UnsupportedModelError

from .contract import TOLERANCE, routes
from .zoo import BERT, SIZE, build, config, transformers

KEEP = torch.arange(12) < torch.tensor([12, 7, 4])[:, None]
GIVEN = {
    "input_ids": torch.randint(5, 90, (3, 12), generator=torch.Generator().manual_seed(0)),
    "attention_mask": KEEP.long(),
}

READ = """
import pickle, sys
import torch
import maskwise as mw
model, given = pickle.load(open(sys.argv[1], "rb"))
with mw.explain() as log, torch.no_grad():
    out = model(**given)
assert [call.route for call in log] == ["packed"], list(log)
torch.save(out[0], sys.argv[2])
"""


def expected(model, **more):
    with torch.no_grad():
        return model(**GIVEN, **more)[0]


@pytest.mark.parametrize("name", ["bert", "mpnet", "deberta-v3"])
def test_a_pickle_runs_packed_in_a_process_that_has_unpadded_nothing(name, tmp_path):
    model = mw.unpad(build(name).eval())
    with open(tmp_path / "model", "wb") as file:
        pickle.dump((model, GIVEN), file)
    command = [sys.executable, "-c", READ, str(tmp_path / "model"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "out"), expected(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "mpnet", "deberta-v3"])
def test_a_replica_of_data_parallel_runs_on_its_own_weights(name):
    model = mw.unpad(build(name).eval())
    replica = model._replicate_for_data_parallel()
    assert replica.forward.__self__ is replica
    for child in model.modules():
        for attribute in vars(child._replicate_for_data_parallel()).values():
            assert getattr(attribute, "__self__", None) is not child


def test_an_exported_model_runs_padded_and_says_so():
    model = build("bert").eval()
    wanted = expected(model)
    mw.unpad(model)
    with pytest.warns(PaddedRunWarning, match="compiled"):
        graph = torch.export.export(model, (), dict(GIVEN), strict=False)
    torch.testing.assert_close(graph.module()(**GIVEN)[0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_traced_model_runs_padded_and_says_so():
    class Encode(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask):
            return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]

    model = build("bert").eval()
    wanted = expected(model)
    mw.unpad(model)
    with pytest.warns(PaddedRunWarning, match="traced"):
        traced = torch.jit.trace(Encode(model), tuple(GIVEN.values()), check_trace=False)
    torch.testing.assert_close(traced(*GIVEN.values()), wanted, rtol=1e-5, atol=1e-6)


def test_a_forward_that_is_bound_a_second_time_is_called_with_the_model_once():
    # accelerate's unwrap_model does this with whatever stands in the place of forward.
    model = mw.unpad(build("bert").eval())
    wanted = expected(model)
    model.forward = MethodType(model.forward, model)
    assert torch.equal(expected(model), wanted)


def test_a_forward_that_wraps_ours_is_undone_by_repad():
    model = build("bert").eval()
    wanted = expected(model)
    mw.unpad(model)
    assert torch.equal(mw.models.repad(model)(**GIVEN)[0], wanted)


class Towers(nn.Module):
    def __init__(self, kind, settings):
        super().__init__()
        self.left, self.right = kind(settings), kind(settings)

    def forward(self, **given):
        return [self.left(**given)[0], self.right(**given)[0]]


def test_two_towers_of_one_config_are_both_packed_and_both_undone():
    settings = config("Bert", **BERT)
    model = Towers(transformers.BertModel, settings).eval()
    with torch.no_grad():
        wanted = model(**GIVEN)
    mw.unpad(model)
    with mw.explain() as log, torch.no_grad():
        found = model(**GIVEN)
    assert routes(log) == ["packed", "packed"]
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine[KEEP], theirs[KEEP], rtol=1e-4, atol=TOLERANCE)
    mw.models.repad(model)
    assert settings._attn_implementation == "sdpa"
    with torch.no_grad():
        assert all(torch.equal(*pair) for pair in zip(model(**GIVEN), wanted, strict=True))


class OwnMask(transformers.PreTrainedModel):
    """Hands its text model a mask of its own making, as some models of text and images do."""

    config_class = transformers.LlamaConfig

    def __init__(self, settings):
        super().__init__(settings)
        self.text = transformers.LlamaModel(settings)

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        size = input_ids.shape[1]
        sees = attention_mask[:, None, None].bool() & torch.ones(size, size, dtype=torch.bool).tril()
        return self.text(input_ids, sees, **kwargs)


def test_a_model_whose_parts_would_never_run_packed_is_refused_and_left_as_it_was():
    model = OwnMask(config("Llama", **SIZE)).eval()
    implementation = model.config._attn_implementation
    wanted = expected(model, use_cache=False)
    with pytest.raises(UnsupportedModelError, match="masks that are made elsewhere"):
        mw.unpad(model)
    assert torch.equal(expected(model, use_cache=False), wanted)
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.config._attn_implementation == implementation


class Dismembered(transformers.PreTrainedModel):
    """Calls the parts of a text model one by one; needs more than text, so that nothing can be tried."""

    config_class = transformers.BertConfig

    def __init__(self, settings):
        super().__init__(settings)
        self.text = transformers.BertModel(settings)

    def forward(self, input_ids=None, attention_mask=None, pixel_values=None):
        hidden = self.text.embeddings(input_ids) + pixel_values[:, None]
        sees = attention_mask[:, None, None].bool()
        for layer in self.text.encoder.layer:
            hidden = layer(hidden, sees)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return (hidden,)


def test_a_model_that_calls_only_parts_of_the_models_in_it_says_so():
    model = Dismembered(config("Bert", **BERT)).eval()
    pixels = torch.ones(3, 32)
    wanted = expected(model, pixel_values=pixels)
    with pytest.warns(UserWarning, match="could not be compared with its padded self"):
        mw.unpad(model)
    with pytest.warns(PaddedRunWarning, match="only parts of them"):
        found = expected(model, pixel_values=pixels)
    assert torch.equal(found, wanted)


def test_a_part_that_turns_out_not_to_work_is_named_while_others_are_served():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.served = build("bert")
            self.refused = transformers.LayoutLMModel(config("LayoutLM", **BERT))

    model = Both()
    with pytest.warns(PaddedRunWarning, match=r"LayoutLMModel runs padded.*mask from elsewhere"):
        mw.unpad(model)
    assert "forward" in vars(model.served)
    assert not any("forward" in vars(module) for module in model.refused.modules())


@pytest.mark.parametrize("order", ["inner first", "outer first", "two heads"])
def test_a_trunk_that_is_unpadded_twice_is_packed_once_and_undone_whole(order):
    settings = config("Bert", **BERT)
    model = nn.ModuleList([transformers.BertForMaskedLM(settings), transformers.BertForTokenClassification(settings)])
    model[1].bert = model[0].bert
    model.eval()
    attributes = [set(vars(module)) for module in model.modules()]
    wanted = [expected(each) for each in model]
    if order == "inner first":
        mw.unpad(model[0].bert)
    mw.unpad(model)
    if order == "outer first":
        mw.unpad(model[0].bert)
    for each, theirs in zip(model, wanted, strict=True):
        with mw.explain() as log:
            mine = expected(each)
        assert routes(log) == ["packed"]
        torch.testing.assert_close(mine[KEEP], theirs[KEEP], rtol=1e-4, atol=TOLERANCE)
    mw.models.repad(model)
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert all(torch.equal(expected(each), theirs) for each, theirs in zip(model, wanted, strict=True))


class Observer(nn.Module):
    """Keeps what it saw, in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        return x


def test_trying_a_model_takes_back_what_it_wrote_into_buffers():
    model = build("bert").eval()
    dense = model.encoder.layer[0].output.dense
    model.encoder.layer[0].output.dense = nn.Sequential(dense, Observer())
    mw.unpad(model)
    assert model.encoder.layer[0].output.dense[1].largest == 0


def test_every_hook_fires_as_often_as_in_the_padded_model():
    def count(model):
        calls = []
        handles = []
        for name, module in model.named_modules():
            handles += [
                module.register_forward_pre_hook(lambda *_, name=name: calls.append(("before", name))),
                module.register_forward_hook(lambda *_, name=name: calls.append(("after", name))),
            ]
            # Backward hooks take modules that return tensors.
            if isinstance(module, (nn.Linear, nn.LayerNorm)):
                handles.append(
                    module.register_full_backward_pre_hook(lambda *_, name=name: calls.append(("back", name)))
                )
        handles.append(nn.modules.module.register_module_forward_hook(lambda *_: calls.append(("any", ""))))
        model(**GIVEN).last_hidden_state.sum().backward()
        for handle in handles:
            handle.remove()
        return sorted(calls)

    model = build("bert").eval()
    wanted = count(model)
    assert count(mw.unpad(model)) == wanted


def test_trying_a_model_leaves_no_trace_on_it():
    settings = {**SIZE, "max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}
    settings["rope_parameters"]["rope_theta"] = 1e4
    model = transformers.LlamaModel(config("Llama", **settings)).train()
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    parameters = {name: value.clone() for name, value in model.named_parameters()}
    attributes = [set(vars(module)) for module in model.modules()]
    random = torch.get_rng_state()
    mw.models.repad(mw.unpad(model))
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert all(torch.equal(buffers[name], value) for name, value in model.named_buffers())
    assert all(torch.equal(parameters[name], value) for name, value in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in model.modules())
