"""mw.force and mw.explain are context-local: they apply to a thread, an asyncio task, a block, and nowhere else."""

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import maskwise as mw
from maskwise.plan import dispatch
from maskwise.plan.dispatch import observers

X, KEEP = torch.rand(64, 64), torch.rand(64, 64) < 0.5
#: One call of every family whose decisions are cached, with its forced route and the usual one.
CALLS = {
    "sum": lambda: mw.sum(X, KEEP),
    "softmax": lambda: mw.softmax(X, KEEP, -1),
    "fill": lambda: mw.fill(X, KEEP, 0.0),
    "count": lambda: mw.count(KEEP, 0),
    "loss": lambda: mw.loss(F.mse_loss, X, X, KEEP),
    "apply": lambda: mw.apply(torch.nn.functional.softplus, X, mask=KEEP),
    "attention": lambda: mw.attention(*[X.reshape(1, 1, 64, 64)] * 3, KEEP[None, None]),
    "linear": lambda: mw.linear(X, X, KEEP),
}


def route(call=CALLS["sum"]):
    with mw.explain() as log:
        call()
    return log.calls[0].route


def in_threads(*functions):
    """Run functions side by side, and return what they return, or raise what they raise."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(function) for function in functions]]


def test_interleaved_blocks_of_threads_leave_nothing_forced():
    began, ended = threading.Barrier(2, timeout=60), threading.Event()

    def first():
        with mw.force("dense"):
            began.wait()  # Both are forced ...
            began.wait()
        ended.set()  # ... and the one that began first ends first.
        return dispatch.forced(), route()

    def second():
        with mw.force("kernel"):
            began.wait()
            inside = dispatch.forced(), route()
            began.wait()
            assert ended.wait(60)
        return inside, dispatch.forced(), route()

    (after_first, (inside, *after_second)) = in_threads(first, second)
    assert inside == ("kernel", "bare")
    assert after_first == (None, "bare")
    assert after_second == [None, "bare"]
    assert dispatch.forced() is None
    assert route() == "bare"


@pytest.mark.parametrize("name", CALLS)
def test_a_forced_choice_is_not_found_in_the_caches_of_another_thread(name):
    call, both = CALLS[name], threading.Barrier(2, timeout=60)
    usual = route(call)

    def dense():
        with mw.force("dense"):
            both.wait()
            found = [route(call) for _ in range(3)]
            both.wait()  # The other calls while this block is open and its decisions are cached.
            both.wait()
        return [*found, route(call)]

    def other():
        both.wait()
        found = [route(call)]
        both.wait()
        found += [route(call) for _ in range(3)]
        both.wait()
        return found

    forced, free = in_threads(dense, other)
    assert forced == ["plain"] * 3 + [usual]
    assert free == [usual] * 4


def test_a_layer_keeps_plans_of_threads_apart():
    layer = mw.nn.MaskedLinear(64, 64, gate=KEEP).eval().requires_grad_(False)
    layer(X)
    both = threading.Barrier(2, timeout=60)

    def calls(forced):
        with mw.force(forced), mw.explain() as log:
            for _ in range(20):
                both.wait()
                layer(X)
        return {call.route for call in log}

    dense, sparse = in_threads(lambda: calls("dense"), lambda: calls("kernel"))
    assert (dense, sparse) == ({"plain"}, {"sparse"})


def test_a_log_records_its_own_thread_only():
    both = threading.Barrier(2, timeout=60)

    def listen(call, times):
        with mw.explain() as log:
            both.wait()
            for _ in range(times):
                call()
            both.wait()
        return [each.op for each in log]

    sums, fills = in_threads(lambda: listen(CALLS["sum"], 2), lambda: listen(CALLS["fill"], 3))
    assert (sums, fills) == (["sum"] * 2, ["fill"] * 3)
    assert observers.values() == ()


def test_a_dry_run_does_not_stop_calls_of_other_threads():
    with mw.explain() as log:
        (total,) = in_threads(lambda: float(mw.sum(torch.ones(3), torch.ones(3) > 0)))
        assert mw.plan(mw.sum, X, KEEP).route == "bare"
    assert (total, len(log)) == (3.0, 0)


def test_interleaved_tasks_keep_their_own_routes_and_logs():
    async def calls(name, turns):
        with mw.force(name), mw.explain() as log:
            for _ in range(turns):
                CALLS["sum"]()
                await asyncio.sleep(0)  # The other tasks run here, inside of this block.
        return [call.route for call in log], dispatch.forced()

    async def main():
        return await asyncio.gather(calls("dense", 3), calls("kernel", 5), calls(None, 2))

    assert asyncio.run(main()) == [(["plain"] * 3, None), (["bare"] * 5, None), (["bare"] * 2, None)]
    assert dispatch.forced() is None


def test_a_task_has_the_block_in_which_it_was_started_until_the_block_ends():
    async def main():
        inside, outside = asyncio.Event(), asyncio.Event()

        async def task():
            first = route()
            inside.set()
            await outside.wait()
            return first, dispatch.forced(), observers.values()

        with mw.force("dense"), mw.explain() as log:
            running = asyncio.create_task(task())
            await inside.wait()
        outside.set()
        return await running, len(log)

    ((first, *after), heard) = asyncio.run(main())
    assert (first, heard) == ("plain", 1)
    # A task may live as long as the program: a block that has ended is not left behind in it.
    assert after == [None, ()]


def test_work_in_a_thread_with_a_copied_context_is_forced_and_recorded():
    async def main():
        with mw.force("dense"), mw.explain() as log:
            await asyncio.to_thread(CALLS["sum"])
        return [call.route for call in log]

    assert asyncio.run(main()) == ["plain"]


def test_blocks_nest_and_end_by_exceptions():
    found = []

    @mw.force("kernel")
    def fails():
        with mw.force(None):
            found.append(dispatch.forced())
            raise ZeroDivisionError

    with mw.force("dense"):
        found.append(dispatch.forced())
        with pytest.raises(ZeroDivisionError):
            fails()
        found.append(dispatch.forced())
    assert found == ["plain", None, "plain"]
    assert dispatch.forced() is None


def forcing(name):
    with mw.force(name), mw.explain() as log:
        while True:
            yield log


def test_generators_whose_blocks_end_in_another_order_leave_nothing_forced():
    first, second = forcing("dense"), forcing("kernel")
    log, other = next(first), next(second)
    assert dispatch.forced() == "kernel"
    first.close()
    assert dispatch.forced() == "kernel"
    CALLS["sum"]()
    second.close()
    assert (len(log), len(other)) == (0, 1)
    assert dispatch.forced() is None
    assert observers.values() == ()


def test_a_generator_that_ends_in_another_thread_leaves_nothing_forced():
    generator = forcing("dense")
    next(generator)
    assert dispatch.forced() == "plain"
    in_threads(generator.close)
    assert dispatch.forced() is None
    assert route() == "bare"


def test_a_context_that_was_copied_inside_of_a_block_forces_nothing_after_it():
    with mw.force("dense"):
        copy = contextvars.copy_context()
        assert copy.run(dispatch.forced) == "plain"
    assert copy.run(dispatch.forced) is None


def test_a_backward_pass_inside_of_a_block_is_forced_as_its_forward_pass():
    x, weight = X.clone().requires_grad_(), X.clone().requires_grad_()
    grads = []
    for name in ("dense", "kernel"):
        with mw.force(name), mw.explain() as log:
            out = mw.softmax(mw.linear(x, weight, KEEP), KEEP, -1)
            grads.append(torch.autograd.grad(out.square().sum(), (x, weight)))
        assert log.calls[-1].route == {"dense": "plain", "kernel": "fused"}[name]
    for dense, kernel in zip(*grads, strict=True):
        # Sums of 64 products of values around 1 in float32, in another order.
        torch.testing.assert_close(dense, kernel, rtol=1e-4, atol=1e-5)


def test_a_compiled_graph_keeps_the_route_with_which_it_was_traced():
    torch._dynamo.reset()
    with mw.force("dense"):
        dense = torch.compile(lambda x: mw.sum(x, KEEP), fullgraph=True, backend="aot_eager")
        inside = dense(X)
    torch.testing.assert_close(inside, dense(X), rtol=0.0, atol=0.0)
    torch.testing.assert_close(inside, mw.sum(X, KEEP))
