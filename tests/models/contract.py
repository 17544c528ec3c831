"""Padded ≡ packed, for any module: outputs at kept positions, and the gradient of every parameter."""

import torch

import maskwise as mw

# Packing changes the order of float32 sums, nothing else: some units in the last place, through a few layers.
TOLERANCE = 2e-5


def masks(batch=5, length=11):
    """Right padding, left padding, a hole, a single token, and a row of which nothing is dropped."""
    keep = torch.ones(batch, length, dtype=torch.bool)
    keep[0, 6:] = False
    keep[1, :4] = False
    keep[2, 3:5] = False
    keep[3, 1:] = False
    return keep


def weighted(x):
    """A loss in which every element counts differently: after a layer norm, plain sums have no gradient."""
    return (x * torch.sin(torch.arange(float(x.numel())).view_as(x))).sum()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_equal_gradients(padded, packed):
    largest = max(each.abs().max().item() for each in padded.values() if each is not None)
    for name, expected in padded.items():
        if expected is None or packed[name] is None:
            assert expected is packed[name] is None, name
        else:
            # Some gradients are zero but for rounding (a key's bias): the tolerance is that of the largest.
            torch.testing.assert_close(packed[name], expected, rtol=1e-4, atol=TOLERANCE * largest, msg=name)


def routes(log):
    return [call.route for call in log]


def assert_packed_equals_padded(model, call, keep, *, training=True, first=True):
    """Run ``call(model)``, which returns outputs by token and others, padded and unpadded."""
    model.train(training)
    by_token, others = call(model)
    wanted = gradients(model, weighted(by_token * keep[..., None]) + sum(weighted(each) for each in others))
    mw.unpad(model)
    with mw.explain() as log:
        found, found_others = call(model)
    assert routes(log) == ["packed"]
    torch.testing.assert_close(found[keep], by_token[keep], rtol=1e-4, atol=TOLERANCE)
    watched = torch.zeros_like(keep)
    watched[:, 0] = first
    assert found[~keep & ~watched].abs().max() == 0
    for mine, theirs in zip(found_others, others, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=TOLERANCE)
    loss = weighted(found * keep[..., None]) + sum(weighted(each) for each in found_others)
    assert_equal_gradients(wanted, gradients(model, loss))
    mw.models.repad(model)
    again, _ = call(model)
    torch.testing.assert_close(again, by_token, rtol=0, atol=0)
