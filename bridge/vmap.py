"""The rule for vmap: fold the mapped axis into the batch where that is right, else take one after another."""

from collections.abc import Callable, Sequence
from typing import Any

from bridge.signature import ELLIPSIS

Position = int | None  # where the batch stands in an array's shape; None for an array without one


def position(batch: str | None, dims: Sequence[str]) -> Position:
    return dims.index(batch) if batch in dims else None


def unmapped(shape: Sequence[int], axis: int | None) -> tuple[int, ...]:
    """A shape without the mapped axis, as the mapped function sees it."""
    return tuple(shape) if axis is None else (*shape[:axis], *shape[axis + 1 :])


def rule(
    xp: Any,
    each: Callable[[Callable[..., Sequence[Any]], Sequence[Any]], Sequence[Any]],
    batch: str | None,
    apply: Callable[..., Sequence[Any]],
    size: int,
    axes: Sequence[int | None],
    arrays: Sequence[Any],
    inside: Sequence[Position],
    outside: Sequence[Position],
) -> tuple[list[Any], list[int]]:
    """Results of a mapped call and their mapped axes. `xp` has broadcast_to, moveaxis and reshape.

    `axes` are the mapped axes of `arrays` (None for one that isn't mapped), `inside` and `outside` the positions of the
    batch in the arguments and results of `apply`. What has no batch is shared by the whole batch, so a mapped argument
    without one (weights that differ) or a result without one (the gradient of weights) can't be folded: then
    each(f, arrays) runs f on one slice after another.
    """
    mapped = [(p, axis) for p, axis in zip(inside, axes, strict=True) if axis is not None]
    positions = [p for p in outside if p is not None]
    if all(p is not None for p, _ in mapped) and len(positions) == len(outside):
        merge = batch != ELLIPSIS  # leading dimensions need no merging: the mapped axis is one more of them
        folded = [a if p is None else _fold(xp, a, axis, p, size, merge) for a, axis, p in zip(arrays, axes, inside, strict=True)]
        results = apply(*folded)
        if not merge:
            return list(results), [0] * len(results)
        # The batch of one slice; not from the results, since there may be no slices.
        count = next(
            unmapped(a.shape, axis)[p] for a, axis, p in zip(arrays, axes, inside, strict=True) if axis is not None and p is not None
        )
        unfolded = [xp.reshape(r, (*r.shape[:p], size, count, *r.shape[p + 1 :])) for r, p in zip(results, positions, strict=True)]
        return unfolded, positions
    slices = [xp.moveaxis(a, axis, 0) for a, axis in zip(arrays, axes, strict=True) if axis is not None]

    def one(*current):
        items = iter(current)
        return apply(*(a if axis is None else next(items) for a, axis in zip(arrays, axes, strict=True)))

    results = each(one, slices)
    return list(results), [0] * len(results)


def _fold(xp, array, axis, p, size, merge):
    if array is None:
        return None
    if axis is None:
        shape = (*array.shape[:p], size, *array.shape[p:])
        array = xp.broadcast_to(xp.reshape(array, (*array.shape[:p], 1, *array.shape[p:])), shape)
    else:
        array = xp.moveaxis(array, axis, p)
    return xp.reshape(array, (*array.shape[:p], size * array.shape[p + 1], *array.shape[p + 2 :])) if merge else array
