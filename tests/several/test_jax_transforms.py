"""JAX's transforms against what the loop gives for each part by itself. Those of tests/test_transforms.py are tried here with an
op that doesn't ship, the others with every op."""

import pytest
from common import by_name
from jax_settings import ALL, close, loss, setting

jax = pytest.importorskip("jax")
import jax.numpy as jnp
import numpy as np

own_op = pytest.mark.parametrize("op", ALL[-1:], ids=by_name)
each_op = pytest.mark.parametrize("op", ALL, ids=by_name)


def with_batch(op, argument):
    return any(op.batch in dim.split("|") for dim in argument.forms[0])


def mappings(s):
    """Names of mapped arguments: those with the batch, the first alone, the last alone (a weight, often), all."""
    names = list(s.values)
    return {tuple(i.name for i in s.inputs if with_batch(s.op, i)), (names[0],), (names[-1],), tuple(names)}


def stacked(values, mapped, scales=(1.0, 0.9)):
    return {name: jnp.stack([x * scale for scale in scales]) if name in mapped else x for name, x in values.items()}


def axes(values, mapped):
    return ({name: 0 if name in mapped else None for name in values},)


def at(values, mapped, i):
    return {name: x[i] if name in mapped else x for name, x in values.items()}


def stack(parts):
    return jax.tree.map(lambda *x: np.stack(x), *map(jax.device_get, parts))


@own_op
def test_jit_and_grad(op, covers):
    s = setting(op)
    for transform in ("jit", "grad"):
        covers("jax", transform, op.name)
    close(jax.jit(s.kernels)(s.values), s.loop(s.values))
    close(jax.value_and_grad(loss(s.kernels))(s.values), s.gradient(s.values))
    close(jax.vjp(loss(s.kernels), s.values)[1](2.0)[0], jax.tree.map(lambda g: 2 * g, s.gradient(s.values)[1]))


@own_op
def test_jacrev(op, covers):
    """The derivative of the sum of each output's rows, row by row, is the derivative of that row."""
    s = setting(op)
    covers("jax", "jacrev", op.name)
    found = jax.jit(jax.jacrev(lambda values: [o.sum(tuple(range(1, o.ndim))) for o in s.kernels(values)]))(s.values)
    one = jax.jit(jax.vjp(s.loop, s.values)[1])
    outputs = s.loop(s.values)
    for k, o in enumerate(outputs):
        for row in (0, o.shape[0] - 1):
            cotangents = tuple(jnp.zeros_like(p).at[row].set(1.0) if i == k else jnp.zeros_like(p) for i, p in enumerate(outputs))
            close(jax.tree.map(lambda x: x[row], found[k]), one(cotangents)[0])  # noqa: B023


@own_op
def test_grad_of_grad(op, covers):
    s = setting(op)
    covers("jax", "grad of grad", op.name)

    def second(f):
        return jax.jit(jax.grad(lambda values: sum(jnp.sin(g).sum() for g in jax.tree.leaves(jax.grad(loss(f))(values)))))

    close(second(s.kernels)(s.values), second(s.loop)(s.values))


@own_op
def test_vmap(op, covers):
    """Over every choice of arguments: outputs, gradients of each part, and the gradient of all parts together."""
    s = setting(op)
    for transform in ("vmap", "vmap of grad", "grad of vmap"):
        covers("jax", transform, op.name)
    for mapped in mappings(s):
        values = stacked(s.values, mapped)
        parts = [at(values, mapped, i) for i in range(2)]
        one_by_one = stack([s.gradient(p)[1] for p in parts])
        mapping = jax.vmap(s.kernels, axes(values, mapped))
        close(jax.jit(mapping)(values), stack([s.loop(p) for p in parts]))
        close(jax.jit(jax.vmap(jax.grad(loss(s.kernels)), axes(values, mapped)))(values), one_by_one)
        together = {name: g if name in mapped else g.sum(0) for name, g in one_by_one.items()}
        close(jax.jit(jax.grad(loss(mapping)))(values), together)


@each_op
def test_vmap_of_vmap(op, covers):
    s = setting(op)
    covers("jax", "vmap of vmap", op.name)
    first, everything = (next(iter(s.values)),), tuple(s.values)
    values = stacked(stacked(s.values, first, (1.0, 0.7, 1.1)), everything)
    # The outer one maps all, and behind its axis the first argument has another.
    function, alone = s.derived
    found = jax.jit(jax.vmap(jax.vmap(function, axes(values, first)), axes(values, everything)))(values)
    expected = [stack([alone(at(at(values, everything, i), first, j)) for j in range(3)]) for i in range(2)]
    close(found, stack(expected))


@each_op
def test_loops(op, covers):
    s = setting(op)
    covers("jax", "scan", op.name)
    covers("jax", "while_loop", op.name)

    def twice(values):
        return jax.lax.scan(lambda sum, _: (sum + loss(s.f)(values), None), 0.0, None, length=2)[0]

    def until(values):
        return jax.lax.while_loop(lambda state: state[0] < 2, lambda state: (state[0] + 1, state[1] + loss(s.f)(values)), (0, 0.0))[1]

    value, gradient = s.gradient(s.values)
    close(jax.jit(jax.value_and_grad(twice))(s.values), (2 * value, jax.tree.map(lambda g: 2 * g, gradient)))
    close(jax.jit(until)(s.values), 2 * value)


@each_op
def test_remat(op, covers):
    """A policy that keeps what has the op's name leaves no second forward pass; others leave one."""
    s = setting(op)
    covers("jax", "remat", op.name)
    options = {**{name: option.default for name, option in op.options.items()}, **s.case.options}
    kept = [f"{op.name}.{name}" for name in op.saves(options)]
    keep = jax.checkpoint_policies.save_only_these_names
    passes = {}
    for policy in (keep(*kept), keep("another"), None):
        gradient = jax.grad(lambda values, policy=policy: sum(o.sum() for o in jax.checkpoint(s.f, policy=policy)(values)))
        text = str(jax.make_jaxpr(gradient)(s.values))
        passes[policy] = [text.count(f"{op.name}_{name}[") for name in ("forward", "backward")]
    expected = jax.jit(jax.grad(lambda values: sum(o.sum() for o in s.loop(values))))(s.values)
    close(jax.jit(gradient)(s.values), expected)
    again = [2 if kept else 1, 1]  # what keeps nothing has nothing to compute again
    assert list(passes.values()) == [[1, 1], again, again]


@each_op
def test_export(op, covers):
    s = setting(op)
    covers("jax", "export", op.name)
    exported = jax.export.export(jax.jit(jax.value_and_grad(loss(s.f))))(s.values).serialize()
    close(jax.export.deserialize(exported).call(s.values), s.gradient(s.values))


@each_op
def test_donation_and_cost(op, covers):
    s = setting(op)
    covers("jax", "donation", op.name)
    covers("jax", "cost", op.name)
    values = jax.tree.map(jnp.array, s.values)
    compiled = jax.jit(s.f, donate_argnums=0).lower(values).compile()
    assert "input_output_alias" in compiled.as_text()
    assert compiled.cost_analysis()["flops"] > 0
    close(compiled(values), s.loop(s.values))


@each_op
def test_forward_mode(op, covers):
    s = setting(op)
    covers("jax", "forward mode", op.name, "an error that says what to use")
    message = f"{op.name}: has no forward mode .*jax.vjp, jax.grad, jax.jacrev"
    with pytest.raises(TypeError, match=message):
        jax.jvp(s.f, (s.values,), (s.values,))
    with pytest.raises(TypeError, match=message):
        jax.jacfwd(s.f)(s.values)
    with pytest.raises(TypeError, match="custom_vjp"):  # in a compiled program JAX finds it later
        jax.jit(lambda values: jax.jvp(s.f, (values,), (values,)))(s.values)
