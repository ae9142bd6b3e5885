"""Manifold-constrained hyper-connections (mHC, arXiv 2512.24880)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bridge.models.mixing import initial_logits
from jax_ops import sinkhorn
from jax_ops.nnx.params import axes, wide, wide_dtype

EXACT = jax.lax.Precision.HIGHEST  # float32, and not the TensorFloat32 that a GPU takes for it by default


class Mix(NamedTuple):
    """How a layer's output and the residual streams are put together."""

    post: jax.Array
    """... n: how much of the output each stream gets."""
    residual: jax.Array
    """... n n, doubly stochastic: from stream (-2) to stream (-1)."""


class SinkhornMixing(nnx.Module):
    """n residual streams around a layer, in the place of one: ... n m -> ... n m.

        x = sum of pre[i] streams[i]
        new[j] = post[j] layer(x) + sum over i of R[i, j] streams[i]

    pre = sigmoid + eps, post = 2 sigmoid and R = sinkhorn of logits that have a static part, and a dynamic one that is linear in
    the normalised streams: logits = alpha * (phi @ rms_norm(all streams)) + static, in float32. Order, eps and direction are
    those of DeepSeek's models (docs/sinkhorn.md). At first the layer reads nearly the mean of the streams, each stream
    gets nearly its whole output, and R is near the identity.

    Parameters, in the order pre, post, R: phi n(n+2) x nm, static n(n+2), alpha 3.
    """

    def __init__(
        self, d_model: int, streams: int = 4, *, iters: int = 20, eps: float = 1e-6, norm_eps: float = 1e-6,
        alpha: float = 0.01, param_dtype: Any = jnp.float32, rngs: nnx.Rngs,
    ):  # fmt: skip
        self.d_model, self.streams, self.iters, self.eps = d_model, streams, iters, eps
        n, width = streams, streams * d_model
        self.norm = nnx.RMSNorm(width, epsilon=norm_eps, use_scale=False, dtype=wide_dtype(param_dtype), rngs=rngs)
        self.phi = nnx.Param(nnx.initializers.normal(width**-0.5)(rngs.params(), (n * (n + 2), width), param_dtype), **axes(None, "embed"))
        self.static = nnx.Param(jnp.asarray(initial_logits(n), param_dtype), **axes(None))
        self.alpha = nnx.Param(jnp.full(3, alpha, param_dtype), **axes(None))

    def __call__(self, streams: jax.Array, layer: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """streams and the result: ... n m. layer: ... m -> ... m."""
        x, mix = self.read(streams)
        return self.write(streams, layer(x), mix)

    def read(self, streams: jax.Array) -> tuple[jax.Array, Mix]:
        """The layer's input, ... m, and what `write` needs."""
        n, lead = self.streams, streams.shape[:-2]
        flat = wide(streams).reshape(*lead, n * self.d_model)
        dynamic = jnp.matmul(self.norm(flat), wide(self.phi[...]).T, precision=EXACT)
        cuts = [n, 2 * n]
        pre, post, mixed = (
            alpha * x + static
            for alpha, x, static in zip(
                wide(self.alpha[...]), jnp.split(dynamic, cuts, -1), jnp.split(wide(self.static[...]), cuts), strict=True
            )
        )
        pre = nnx.sigmoid(pre) + self.eps
        residual = sinkhorn(mixed.reshape(*lead, n, n), iters=self.iters, eps=self.eps, order="row_col")
        x = jnp.einsum("...n,...nm->...m", pre, wide(streams), precision=EXACT)
        return x.astype(streams.dtype), Mix(2 * nnx.sigmoid(post), residual)

    def write(self, streams: jax.Array, y: jax.Array, mix: Mix) -> jax.Array:
        """streams and the result: ... n m. y, the layer's output: ... m."""
        mixed = jnp.einsum("...ij,...im->...jm", mix.residual, wide(streams), precision=EXACT)
        return (mixed + mix.post[..., None] * wide(y)[..., None, :]).astype(streams.dtype)
