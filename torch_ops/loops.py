"""The references as torch runs them: the array namespace and the scan that they are written in."""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.utils.checkpoint import checkpoint

from bridge.dtypes import wide
from bridge.op import FUNCTIONS, Op
from torch_ops.tensors import DTYPES, NAMES


def _repeat(count: int, step, x):
    for _ in range(count):
        x = step(x)
    return x


xp = SimpleNamespace(
    **{name: getattr(torch, name) for name in FUNCTIONS},
    arange=lambda count, like: torch.arange(count, dtype=like.dtype, device=like.device),
    max=torch.amax,
    moveaxis=torch.movedim,  # torch.moveaxis can't be mapped
    put=lambda x, index, rows: x.index_copy(0, index.long(), rows),
    repeat=_repeat,
    stop_gradient=torch.Tensor.detach,
    zeros=lambda shape, like: torch.zeros(shape, dtype=like.dtype, device=like.device),
)


def scan(step, carry, xs):
    """Run `step` over the second axis of each of `xs`; memory of a backward pass grows with the square root of its length.

    Stretches of about sqrt(t) steps are checkpointed, unless a function transform forbids it (torch.func does not
    support the hooks that checkpointing needs).
    """
    steps = xs[0].shape[1]
    if not steps:
        _, out = step(carry, tuple(x.new_zeros((x.shape[0], *x.shape[2:])) for x in xs))
        return carry, out.unsqueeze(1)[:, :0]
    stretch = math.isqrt(steps - 1) + 1
    recompute = torch.is_grad_enabled() and _hooks_allowed()
    pieces = []
    for start in range(0, steps, stretch):
        now = [x[:, start : start + stretch] for x in xs]
        if recompute:  # nothing here is random, and the state of what is random can't be read within a CUDA graph
            carry, out = checkpoint(_steps, step, carry, now, use_reentrant=False, preserve_rng_state=False)
        else:
            carry, out = _steps(step, carry, now)
        pieces.append(out)
    return carry, torch.cat(pieces, 1)


def _hooks_allowed() -> bool:
    enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return enabled and not torch._C._are_functorch_transforms_active()


def _steps(step, carry, xs):
    outs = []
    for now in zip(*(x.unbind(1) for x in xs), strict=True):
        carry, out = step(carry, now)
        outs.append(out)
    return carry, torch.stack(outs, 1)


def run(op: Op, inputs, options) -> tuple[torch.Tensor, ...]:
    """The op by its loop. Arithmetic is done in float32 (float64 for float64), results have the op's dtypes."""
    dtypes = {i.name: NAMES[x.dtype] for i, x in zip(op.signature.inputs, inputs, strict=True) if x is not None}
    outputs = op.reference(xp, scan, *map(widen, inputs), **dict(zip(op.options, options, strict=True)))
    return tuple(value.to(DTYPES[o.dtype(dtypes)]) for o, value in zip(op.signature.outputs, outputs, strict=True))


def gradients(op: Op, inputs, options, cotangents, needs) -> tuple[torch.Tensor, ...]:
    """The gradients of the inputs that `needs` marks, by the loop. Not differentiable."""
    with _autograd():
        leaves = [x if x is None else x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
        wanted = [x for x, need in zip(leaves, needs, strict=True) if need and x is not None]
        own = _own_gradients(op, leaves, options, cotangents)
        if own is not None:
            return tuple(g.detach() for g, need in zip(own, needs, strict=True) if need)
        outputs = [(o, c) for o, c in zip(run(op, leaves, options), cotangents, strict=True) if o.requires_grad]
        if not outputs:  # a loop over nothing, since autograd is on
            return tuple(torch.zeros_like(x) for x in wanted)
        results, given = zip(*outputs, strict=True)
        return torch.autograd.grad(results, wanted, given, allow_unused=True, materialize_grads=True)


def second_gradients(op: Op, inputs, options, cotangents, needs, seconds):
    """The gradients of <gradients, seconds> with respect to inputs and cotangents. Differentiable again."""
    present = [i for i, x in enumerate(inputs) if x is not None and x.is_floating_point()]

    def place(values, among) -> list:
        """`among`, with `values` for the floating-point inputs that are there."""
        placed = list(among)
        for i, value in zip(present, values, strict=True):
            placed[i] = value
        return placed

    nothing = [None] * len(inputs)

    def first(*values):
        values, given = values[: len(present)], values[len(present) :]
        found = _own_gradients(op, place(values, inputs), options, given)
        if found is None:
            found = place(torch.func.vjp(lambda *values: run(op, place(values, inputs), options), *values)[1](given), nothing)
        return tuple(g for g, need in zip(found, needs, strict=True) if need)

    pull = torch.func.vjp(first, *(inputs[i] for i in present), *cotangents)[1]
    pulled = pull(tuple(seconds))
    return place(pulled[: len(present)], nothing), list(pulled[len(present) :])


@contextmanager
def _autograd():
    """Autograd within the implementation of a dispatcher op, also where a dispatch mode or a tensor subclass called that: they
    stand below autograd, and keep it off."""
    keys, here = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    off = here - torch._C.DispatchKeySet(keys.AutogradFunctionality) - torch._C.DispatchKeySet(keys.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), off), torch.enable_grad():
        yield


def widen(x: torch.Tensor | None) -> torch.Tensor | None:
    return x if x is None or not x.is_floating_point() else x.to(DTYPES[wide(NAMES[x.dtype])])


def _own_gradients(op: Op, inputs, options, cotangents):
    """The gradients as the op itself defines them, or None where they are the derivative of its loop."""
    if op.reference_backward is None:
        return None
    wider = tuple(map(widen, cotangents))
    found = op.reference_backward(xp, scan, tuple(map(widen, inputs)), wider, **dict(zip(op.options, options, strict=True)))
    return found and tuple(None if x is None else g.to(x.dtype) for g, x in zip(found, inputs, strict=True))
