"""Measuring on a GPU, with a device that is made up: what is timed, in what order, and what is refused."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import maskwise as mw
from benchmarks import cuda
from benchmarks.case import Case, Side, at_least, never_slower
from benchmarks.command import app
from benchmarks.run import run_case
from maskwise.ops.gpu.launch import launch
from maskwise.plan.measure import event_timer


class Device:
    """A device that notes what it is asked for; each call takes it 3 ms."""

    def __init__(self):
        self.log = []
        self.now = 0.0
        self.current = "cuda:0"
        self.recorded_on = set()

    def event(self, enable_timing):
        assert enable_timing
        device = self

        class Event:
            def record(self):
                device.log.append("event")
                device.recorded_on.add(device.current)
                self.at = device.now

            def elapsed_time(self, other):
                return other.at - self.at

        return Event()

    def call(self):
        self.log.append("call")
        self.now += 3.0
        return torch.ones(2)


@pytest.fixture
def device(monkeypatch):
    made_up = Device()
    real_empty = torch.empty

    class Scratch:
        def zero_(self):
            made_up.log.append("flush")

    class Current:
        """As torch's: one object can be entered often."""

        def __init__(self, name):
            self.name, self.entered = name, []

        def __enter__(self):
            self.entered.append(made_up.current)
            made_up.current = self.name

        def __exit__(self, *_):
            made_up.current = self.entered.pop()

    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(torch.cuda, "Event", made_up.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: made_up.log.append("wait"))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("P", (), {"L2_cache_size": 50 * 2**20})
    )
    on_device = lambda k: str(k.get("device")).startswith("cuda")
    monkeypatch.setattr(torch, "empty", lambda *a, **k: Scratch() if on_device(k) else real_empty(*a, **k))
    return made_up


def test_a_call_is_timed_by_events_after_a_flush_and_waited_for_once(device):
    seconds = event_timer("cuda")(device.call, 2)
    assert seconds == pytest.approx(6e-3)
    assert device.log == ["flush", "event", "call", "event"] * 2 + ["wait"]


def test_another_device_than_the_current_one_records_its_own_events(device):
    timer = event_timer("cuda:1")
    timer(device.call, 1)
    timer(device.call, 1)
    assert device.recorded_on == {"cuda:1"}
    assert device.current == "cuda:0"


def test_a_case_is_measured_with_the_device_time(device, monkeypatch):
    monkeypatch.setattr(cuda, "moved", lambda inputs, device: inputs)
    case = Case("family", "fn", "variant", lambda case: None, (Side("ours", lambda i: device.call, "ours"),))
    result = run_case(case, quick=True, device="cuda")
    assert result.ours.median == pytest.approx(3e-3)


def test_the_roofline_of_a_call_is_its_bytes_at_the_speed_of_the_device(monkeypatch):
    x, out = torch.empty(1 << 20), torch.empty(1 << 20)

    class Kernel:
        arg_names = ("x", "out")

        def __getitem__(self, grid):
            return lambda **_: None

    def call():
        for _ in range(2):
            launch(Kernel(), 1, {"x": x, "out": out}, reads={"x": 1}, writes=("out",))
        launch(Kernel(), 1, {"x": x[:1], "out": out[:1]}, reads={"x": 1}, writes=("out",))

    # 5 GHz of 1,024 bits, twice a clock: 1.28 TB/s.
    properties = SimpleNamespace(memory_clock_rate=5_000_000, memory_bus_width=1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert cuda.roofline(call, "cuda") == pytest.approx(2 * (8 << 20) / 1.28e12 + cuda.SHORTEST)
    assert cuda.roofline(lambda: None, "cuda") is None
    properties.memory_clock_rate = 0
    assert cuda.bandwidth("cuda") == 1.5e12


def test_every_tensor_mask_and_module_of_the_inputs_is_moved():
    @dataclass(frozen=True)
    class Inputs:
        x: torch.Tensor
        mask: mw.Mask
        more: dict
        dim: int

    more = {"layers": [torch.nn.Linear(2, 2)], "names": SimpleNamespace(y=torch.ones(2), size=3)}
    inputs = Inputs(torch.ones(2), mw.Mask.full((2,)), more, -1)
    there = cuda.moved(inputs, "meta")
    assert there.x.device.type == there.mask.device.type == "meta"
    assert there.more["layers"][0].weight.device.type == "meta"
    assert there.more["names"].y.device.type == "meta"
    assert (there.more["names"].size, there.dim) == (3, -1)
    assert cuda.moved(inputs, "cpu") is inputs


def test_on_a_gpu_only_never_to_be_slower_is_promised():
    side = Side("ours", lambda i: lambda: None, "ours")
    peer = Side("idiom", lambda i: lambda: None)
    case = Case("reduce", "fn", "", lambda c: None, (side, peer), targets=(at_least(15, "idiom"), never_slower()))
    assert cuda.for_device(case, "cuda").targets == (never_slower(),)
    assert cuda.for_device(case, "cpu") is case


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("name", "told"), [("cuda", "no GPU to measure on"), ("tpu", "not on 'tpu'")])
def test_without_a_gpu_it_says_so_before_anything_is_measured(name, told):
    result = CliRunner().invoke(app, ["--device", name, "--filter", "sum 4x8"])
    assert result.exit_code == 2
    assert told in " ".join(result.output.replace("│", " ").split())
