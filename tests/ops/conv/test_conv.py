"""Convolutions of regions, by every route, against torch's own in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

import maskwise as mw
from maskwise.ops.conv import Geometry, direct, routes, rows, tiles
from maskwise.plan.dispatch import decide
from tests.gpu.guard import cuda_without_cuda
from tests.ops.conv.truth import ROUTES, Case, random_case, with_gradients

# Torch's own, of even kernels.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
#: In float64, of sums of some hundred terms.
EXACT = {"rtol": 1e-10, "atol": 1e-10}
X, W = torch.randn(2, 3, 20, 18), torch.randn(4, 3, 3, 3)
MASK = torch.zeros(2, 20, 18, dtype=torch.bool)
MASK[0, 3:9, 2:17] = MASK[1, 15:, :5] = True


def strides(x):
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


@pytest.mark.kernel
@pytest.mark.parametrize("route", [None, *ROUTES])
@pytest.mark.parametrize("seed", range(80))
def test_a_convolution_and_its_gradients_are_torchs_of_what_is_valid(seed, route):
    case = random_case(seed)
    for ours, truth in zip(with_gradients(case, case.ours(route)), with_gradients(case, case.truth()), strict=True):
        torch.testing.assert_close(ours, truth, **EXACT)


@pytest.mark.parametrize("route", [None, *ROUTES])
@pytest.mark.parametrize("seed", range(0, 80, 2))
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_what_is_not_valid_reaches_nothing(seed, route, poison):
    case = random_case(seed)
    if case.mask is None:
        case.mask = torch.rand(case.x.shape[-case.dims :], generator=torch.Generator().manual_seed(seed)) < 0.5
        case.outputs = None
    clean = with_gradients(case, case.ours(route))
    with torch.no_grad():
        case.x.copy_(torch.where(case.mask.unsqueeze(-case.dims - 1), case.x, poison))
    out = case.ours(route)
    # What is not wanted may come back as anything, too.
    wanted = torch.ones_like(out, dtype=torch.bool) if (w := case.wanted(out)) is None else w.unsqueeze(-case.dims - 1)
    weights = torch.linspace(-1.0, 2.0, out.numel(), dtype=out.dtype).reshape(out.shape)
    grads = torch.autograd.grad(out, case.leaves[:2], weights, allow_unused=True)
    poisoned = torch.autograd.grad(
        case.ours(route), case.leaves[:2], torch.where(wanted, weights, poison), allow_unused=True
    )
    torch.testing.assert_close(out.detach(), clean[0], rtol=0, atol=0)
    for got, same, expected in zip(grads, poisoned, clean[1:3], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        torch.testing.assert_close(same, expected, rtol=0, atol=0)
    assert (grads[0][(~case.mask.unsqueeze(-case.dims - 1)).expand(case.x.shape)] == 0).all()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_it_can_be_differentiated_twice(route, is_transposed, groups):
    generator = torch.Generator().manual_seed(0)
    x, w, b = (
        torch.randn(s, generator=generator, dtype=torch.float64) for s in ((1, 2, 5, 4), (2, 2 // groups, 3, 3), (2,))
    )
    mask, outputs = (torch.rand(1, 5, 4, generator=generator) < 0.6 for _ in range(2))
    fn = mw.conv_transpose2d if is_transposed else mw.conv2d
    leaves = [t.requires_grad_() for t in (x, w, b)]

    def call(x, w, b):
        with mw.force(route):
            return fn(x, w, b, padding=1, groups=groups, mask=mask, outputs=outputs)

    with mw.force(route):
        assert gradcheck(call, leaves)
        assert gradgradcheck(call, leaves)


@pytest.mark.parametrize(
    "options",
    [
        {"kernel": 3, "padding": 1},
        {"kernel": 4, "padding": "same"},
        {"kernel": 3, "padding": 2, "dilation": 2},
        {"kernel": 5, "padding": 2, "groups": 2},
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("given", ["mask", "mask and outputs"])
def test_gradients_that_share_their_tiles_are_those_of_each_by_itself(options, has_bias, given, monkeypatch):
    options = dict(options)
    kernel, groups = options.pop("kernel"), options.get("groups", 1)
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((2, 4, 20, 18), (6, 4 // groups, kernel, kernel))
    )
    bias = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_() if has_bias else None
    leaves = [x, w, *([] if bias is None else [bias])]
    calls = []
    shared = tiles.gradients
    monkeypatch.setattr(tiles, "gradients", lambda *args: calls.append(1) or shared(*args))

    def gradients(create_graph):
        with mw.force("tiles"):
            out = mw.conv2d(x, w, bias, **options, mask=MASK, outputs=MASK if given != "mask" else None)
        return torch.autograd.grad(out.cos().sum(), leaves, create_graph=create_graph)

    for ours, alone in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(ours, alone.detach(), **EXACT)
    assert calls == [1]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)])
def test_lower_precision_is_close_to_float64(route, dtype, tolerance):
    # Relative to sums of 27 products of about 1: a few units of the dtype's precision.
    with mw.force(route):
        ours = mw.conv2d(X.to(dtype), W.to(dtype), padding=1, mask=MASK)
    truth = mw.conv2d(X.to(dtype).double(), W.to(dtype).double(), padding=1, mask=MASK)
    assert ours.dtype is dtype
    torch.testing.assert_close(ours.double(), truth, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_results_and_gradients_lie_in_memory_as_torchs_do(route, layout):
    x = X.clone(memory_format=layout).requires_grad_()
    with mw.force(route):
        out = mw.conv2d(x, W, padding=1, mask=MASK)
        (dx,) = torch.autograd.grad(out.square().sum(), x)
    assert strides(out) == strides(F.conv2d(x, W, padding=1))
    assert out.is_contiguous(memory_format=layout)
    assert dx.is_contiguous(memory_format=layout)


def test_without_masks_it_is_torchs_own():
    torch.testing.assert_close(mw.conv2d(X, W, None, 2, "valid"), F.conv2d(X, W, None, 2, "valid"), rtol=0, atol=0)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("shape", [(2, 1, 20, 18), (1, 20, 18), (20, 18), (2, 20, 1), (18,)])
def test_masks_line_up_with_positions(route, shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    full = (mask.squeeze(1) if len(shape) == 4 else mask).expand(2, 20, 18)
    with mw.force(route):
        torch.testing.assert_close(
            mw.conv2d(X, W, padding=1, mask=mask, outputs=mask),
            mw.conv2d(X, W, padding=1, mask=full.contiguous(), outputs=full.contiguous()),
        )


@pytest.mark.parametrize("route", ROUTES)
def test_a_mask_of_lengths_gives_what_its_bits_give(route):
    x, w = torch.randn(3, 4, 70), torch.randn(4, 1, 31)
    mask = mw.Mask.from_lengths([70, 12, 0], max_len=70)
    with mw.force(route):
        ours = mw.conv1d(x, w, padding="same", groups=4, mask=mask)
    torch.testing.assert_close(ours, mw.conv1d(x, w, padding="same", groups=4, mask=mask.to_bool()))
    assert (ours[1, :, 12:] == 0).all()
    assert (ours[2] == 0).all()
    # A sequence without its padding gives the same.
    torch.testing.assert_close(
        ours[1, :, :12], F.conv1d(x[1, :, :12], w, padding="same", groups=4), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("byte", [2, 128, 255])
@pytest.mark.parametrize("route", ROUTES)
def test_any_byte_but_zero_keeps(route, byte):
    odd = (MASK.to(torch.uint8) * byte).view(torch.bool)
    with mw.force(route):
        torch.testing.assert_close(
            mw.conv2d(X, W, padding=1, mask=odd), mw.conv2d(X, W, padding=1, mask=MASK), rtol=0, atol=0
        )


@pytest.mark.parametrize("call", [mw.conv2d, mw.conv_transpose2d])
def test_a_compiled_graph_gives_what_eager_gives(call):
    weight = W if call is mw.conv2d else W.transpose(0, 1).contiguous()
    compiled = torch.compile(lambda x, mask: call(x, weight, padding=1, mask=mask), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(X, MASK), call(X, weight, padding=1, mask=MASK), rtol=1e-4, atol=1e-5)


def test_vmap_maps_over_inputs_and_masks():
    mapped = torch.vmap(lambda x, mask: mw.conv2d(x, W, padding=1, mask=mask))(X, MASK)
    torch.testing.assert_close(mapped, mw.conv2d(X, W, padding=1, mask=MASK), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("route", ROUTES)
def test_autocast_lowers_what_torch_lowers(route):
    with torch.autocast("cpu", torch.bfloat16), mw.force(route):
        assert mw.conv2d(X, W, padding=1, mask=MASK).dtype is torch.bfloat16


def test_explain_reports_tiles_their_halo_and_what_is_skipped():
    x, w, mask = torch.randn(1, 16, 128, 128), torch.randn(16, 16, 3, 3), torch.zeros(128, 128, dtype=torch.bool)
    mask[:16, :8] = True
    with mw.explain() as log, mw.force("tiles"):
        mw.conv2d(x, w, padding=1, mask=mask)
    call = log.calls[0]
    assert call.route == "tiles"
    assert "2 of 256 tiles of 8 x 8, whose halo reads 1.56 x their positions" in call.reason
    assert (call.elements, call.computed) == (128 * 128, 128)
    assert call.skipped_flops == (128 * 128 - 128) * 2 * 9 * 16 * 16


def test_few_positions_are_gathered_and_dense_maps_are_not():
    x, w = torch.empty(1, 64, 256, 256), torch.empty(64, 64, 3, 3)
    few = torch.zeros(256, 256, dtype=torch.bool)
    few[::16, ::16] = True
    tiled = torch.zeros(256, 256, dtype=torch.bool)
    tiled[:64, :64] = True

    def route(mask):
        return mw.plan(mw.conv2d, x, w, padding=1, mask=mask).route

    assert [route(few), route(tiled), route(torch.ones_like(few))] == ["pixels", "tiles", "plain"]


# -- the kernels -------------------------------------------------------------------------------------------------------
def layouts(x):
    yield x.contiguous()
    yield x.contiguous(memory_format=torch.channels_last)
    yield x.transpose(2, 3).contiguous().transpose(2, 3)
    yield torch.cat([x, x], 1)[:, ::2]


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_kernels_of_tiles_move_what_their_references_move(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    b, c, h, w = 2, (1, 3, 4, 17, 64, 70)[seed], (1, 7, 23, 40, 9, 16)[seed], (13, 1, 40, 23, 16, 8)[seed]
    x = torch.randn(b, c, h, w, generator=generator).to(dtype)
    target, source = (torch.rand(b, h, w, generator=generator) < p for p in (0.1, 0.3))
    ops = torch.ops.maskwise
    for size in ((1, 1), (8, 8), (3, 5), (1, 64)):
        reads = [*size, -1, -2, size[0] + 2, size[1] + 3]
        for bits in ((target, None), (target, source), (None, source), (None, None), (torch.zeros_like(target), None)):
            found, count = ops.conv_active(*bits, [b, h, w], size, reads)
            expected, expected_count = tiles._active(*bits, [b, h, w], list(size), reads)
            assert count == expected_count
            assert torch.equal(found, expected)
            for each in layouts(x):
                windows = ops.conv_gather(each, bits[1], found, reads)
                assert torch.equal(windows, tiles._gather(each, bits[1], found, reads))
            batch = windows.contiguous(memory_format=torch.channels_last)
            for other in (0.0, -0.0, 7.0):
                for last in (False, True):
                    args = (
                        batch,
                        found,
                        bits[0],
                        torch.tensor(other, dtype=dtype),
                        [b, c, h, w],
                        list(size),
                        [1, 2],
                        last,
                    )
                    out, truth = ops.conv_scatter(*args), tiles._scatter(*args)
                    assert torch.equal(out, truth)
                    assert torch.equal(out.signbit(), truth.signbit())
                    assert strides(out) == strides(truth)


@pytest.mark.kernel
@pytest.mark.parametrize("edge", [False, True])
@pytest.mark.parametrize("fill", [None, 7.0, float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_windows_repeat_the_edge_or_hold_a_value_around_a_map(dtype, fill, edge):
    generator = torch.Generator().manual_seed(0)
    value = None if fill is None else torch.tensor(fill, dtype=dtype)
    for channels, size in ((3, (1, 1)), (37, (1, 1)), (37, (5, 2)), (64, (13, 11))):
        x = torch.randn(2, channels, 13, 11, generator=generator).to(dtype)
        bits = torch.rand(2, 13, 11, generator=generator) < 0.6
        reads = [*size, -2, -1, size[0] + 3, size[1] + 2]
        found, _ = torch.ops.maskwise.conv_active(bits, None, [2, 13, 11], list(size), reads)
        for kept in (None, bits):
            for each in layouts(x):
                got = torch.ops.maskwise.conv_gather(each, kept, found, reads, value, edge)
                assert torch.equal(got, tiles._gather(each, kept, found, reads, value, edge))


@pytest.mark.kernel
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-11), (torch.bfloat16, 5e-2)]
)
@pytest.mark.parametrize("seed", range(8))
def test_kernels_of_rows_give_what_their_references_give(seed, dtype, tolerance, channels_last):
    generator = torch.Generator().manual_seed(seed)
    b, c, h, w = (
        2,
        (1, 3, 8, 17, 33, 64, 5, 2)[seed],
        (1, 7, 23, 40, 1, 16, 5, 90)[seed],
        (130, 1, 40, 23, 65, 8, 5, 70)[seed],
    )
    kernel, dilation = ((1, 31), (7, 7), (3, 3), (2, 5), (1, 1), (3, 1), (5, 5), (7, 9))[seed], (1, 1 + seed % 2)
    stride = (1 + seed % 2, 1 + (seed % 3 == 0 and channels_last))
    before = (kernel[0] // 2, dilation[1] * (kernel[1] - 1) // 2)
    coarse = [(h - 1) // stride[0] + 1, (w - 1) // stride[1] + 1]
    numbers = [*kernel, *stride, *before, *dilation]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(b, c, h, w, generator=generator).to(dtype).contiguous(memory_format=layout)
    grad = torch.randn(b, c, *coarse, generator=generator).to(dtype).contiguous(memory_format=layout)
    weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((c, 1, *kernel), (c,)))
    valid, wanted = torch.rand(b, h, w, generator=generator) < 0.7, torch.rand(b, *coarse, generator=generator) < 0.6
    wanted[0] = wanted[0].cummax(-1).values
    other = torch.tensor(7.0, dtype=dtype)
    for of_input, of_result in ((valid, wanted), (None, wanted), (valid, None), (valid, torch.zeros_like(wanted))):
        arguments = (x, weight, bias, of_input, of_result, other, numbers, coarse, channels_last)
        torch.testing.assert_close(
            torch.ops.maskwise.conv_rows(*arguments), rows._rows(*arguments), rtol=tolerance, atol=tolerance
        )
        of_grad = (x, grad, of_input, of_result, numbers, channels_last)
        # Sums of up to some thousand products.
        for got, truth in zip(torch.ops.maskwise.conv_rows_weight(*of_grad), rows._rows_weight(*of_grad), strict=True):
            torch.testing.assert_close(got, truth, rtol=4 * tolerance, atol=40 * tolerance)


@pytest.mark.kernel
def test_a_large_result_reads_as_zeros_where_nothing_is_written():
    x, w = torch.ones(1, 1, 768, 768), torch.ones(16, 1, 3, 3)
    mask = torch.zeros(768, 768, dtype=torch.bool)
    mask[100:110, 700:768] = True
    with mw.force("tiles"):
        out = mw.conv2d(x, w.contiguous(memory_format=torch.channels_last), padding=1, mask=mask)
    assert torch.equal(out, F.conv2d(x * mask, w, padding=1) * mask)


def test_a_case_prints_its_shapes():
    assert str(Case(2, False, X, W, None, None, None, None)) == "conv2d-2x3x20x18-4x3x3x3"


# -- on a device -------------------------------------------------------------------------------------------------------
def on_device(mask, monkeypatch):
    """The plan of a convolution of a CUDA tensor, and what its tiles are found from."""
    from maskwise.ops.conv import call
    from maskwise.ops.conv.arguments import Options

    # Of tensors without data nothing is convolved by tiles; the plan is made as if they had some.
    monkeypatch.setattr(call, "has_dispatch_modes", lambda: False)
    options = Options("conv2d", 2, 1, 1, 1, 1)
    with cuda_without_cuda(), FakeTensorMode(allow_non_fake_inputs=True):
        x, weight = (torch.empty(shape, device="cuda") for shape in ((8, 64, 256, 256), (64, 64, 3, 3)))
        found = call._check(options, x, weight, None, mask, None, None)
    # Outside of the mode, in which even what lies on the host would be fake.
    return found.facts, call._on_host(options, x, found, mask, None) if found.facts.detail.is_known else None


def test_tiles_of_a_mask_of_the_host_are_found_there(monkeypatch):
    facts, host = on_device(mw.Mask.from_lengths([[9] * 256] * 8, max_len=256, device="cuda"), monkeypatch)
    job = routes.Job(facts, None, None, host=host)
    assert routes._serves(facts) is None
    assert {bits.device.type for bits in host} == {"cpu"}
    tiling = tiles.tiling_of(facts.detail.geometry, (8, 8), False)
    # Two of 32 columns of tiles, of which each has 32, for each of 8 maps.
    assert tiles.find(job.host[1], None, 8, facts.detail.geometry, tiling, False)[0].shape == (8 * 2 * 32, 3)
    plan = decide(
        facts._replace(detail=facts.detail._replace(wanted=8 * 9 * 256, tiles=8 * 2 * 32)), routes.ROUTES
    ).plan
    assert plan.route == "tiles"


def test_a_mask_of_the_device_is_convolved_densely_which_says_why(monkeypatch):
    with cuda_without_cuda(), FakeTensorMode():
        bits = torch.empty(8, 256, 256, dtype=torch.bool, device="cuda")
        facts, host = on_device(bits, monkeypatch)
    assert host is None
    plan = decide(facts, routes.ROUTES).plan
    assert plan.route == "plain"
    assert "the mask lies on the device, where finding its tiles would be a host-device sync" in {
        each.reason for each in plan.refused
    }


@pytest.mark.kernel
@pytest.mark.parametrize("seed", range(30))
def test_convolutions_that_read_their_map_in_place_are_those_of_gathered_tiles(seed):
    generator = torch.Generator().manual_seed(seed)

    def pick(*values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    channels, outputs, size = pick(8, 9, 24), pick(1, 31, 32, 50), (pick(1, 3, 8), pick(1, 4, 8))
    kernel, stride, dilation = pick((3, 3), (1, 1), (2, 5)), (pick(1, 2), pick(1, 3)), (pick(1, 2), 1)
    before = (pick(0, 1, 2), pick(0, 1))
    x = torch.randn(2, channels, 19, 23, generator=generator).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(outputs, channels, *kernel, generator=generator)
    bias = pick(None, torch.randn(outputs, generator=generator))
    coarse = tuple(
        (n + 2 * b - d * (k - 1) - 1) // s + 1
        for n, b, d, k, s in zip((19, 23), before, dilation, kernel, stride, strict=True)
    )
    geometry = Geometry(kernel, stride, before, dilation, 1, (19, 23), coarse)
    tiling = tiles.tiling_of(geometry, size, False)
    wanted = torch.rand(2, *coarse, generator=generator) < pick(0.0, 0.1, 1.0)
    valid = pick(None, torch.rand(2, 19, 23, generator=generator) < 0.5)
    found, _ = tiles.find(wanted, None, 2, geometry, tiling, False)
    expected = F.conv2d(
        tiles.gather(x.double(), valid, found, tiling.reads), weight.double(), None if bias is None else bias.double(),
        stride, 0, dilation,
    )  # fmt: skip
    if valid is not None:
        x.permute(0, 2, 3, 1)[~valid] = float("nan")
    ours = direct.convolve(x, valid, found, direct.pack(weight), bias, geometry, tiling, outputs)
    assert ours.is_contiguous(memory_format=torch.channels_last) or ours.numel() == 0 or 1 in ours.shape
    # Sums of some hundred products in float32.
    torch.testing.assert_close(ours, expected.float(), rtol=1e-4, atol=1e-4)


def test_the_reference_of_tiles_read_in_place_is_torchs_convolution():
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1, (20, 18), (20, 18))
    tiling = tiles.tiling_of(geometry, (4, 4), False)
    found, _ = tiles.find(MASK, None, 2, geometry, tiling, False)
    x, weight = torch.randn(2, 8, 20, 18), torch.randn(40, 8, 3, 3)
    arguments = (tiling.reads, [4, 4], [3, 3, 1, 1, 1, 1], 40)
    ours = direct._direct(x, MASK, found, direct.pack(weight), None, *arguments)
    expected = F.conv2d(tiles.gather(x, MASK, found, tiling.reads), weight)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda: mw.conv2d(X, torch.zeros(0, 3, 3, 3), mask=MASK),
        lambda: mw.conv2d(X, torch.zeros(4, 3, 0, 3), mask=MASK),
        lambda: mw.conv2d(X, W, groups=True, mask=MASK),
    ],
)
def test_weights_without_channels_or_taps_are_refused_with_a_hint(call):
    with pytest.raises(mw.MaskwiseError, match=r"must.*Hint"):
        call()


@pytest.mark.parametrize("route", ["tiles", "rows", "dense"])
def test_a_mask_that_is_modified_before_the_backward_pass_is_an_error(route):
    x, mask = X.clone().requires_grad_(), MASK.clone()
    with mw.force(route):
        out = mw.conv2d(x, W[:3, :1].contiguous(), padding=1, groups=3, mask=mask)
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_mask_of_inference_mode_has_gradients():
    with torch.inference_mode():
        mask = MASK.clone()
    x = X.clone().requires_grad_()
    with mw.force("tiles"):
        mw.conv2d(x, W, padding=1, mask=mask).sum().backward()
    assert x.grad.isfinite().all()


def test_a_complex_value_for_what_is_not_wanted_is_refused():
    mw.conv2d(X, W, padding=1, mask=MASK, other=torch.zeros(1))
    with pytest.raises(mw.MaskwiseError, match=r"other.*must fit x's dtype.*Hint"):
        mw.conv2d(X, W, padding=1, mask=MASK, other=torch.zeros(1, dtype=torch.complex64))
