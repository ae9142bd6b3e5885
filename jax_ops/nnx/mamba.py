"""The Mamba block (Gu and Dao, arXiv 2312.00752, figure 3)."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from bridge.models import MambaConfig
from jax_ops import selective_scan, selective_scan_step
from jax_ops.nnx.params import axes, narrow, wide_dtype


class MambaCache(NamedTuple):
    """What a block hands on from one time step to the next."""

    conv: jax.Array
    """b k-1 d: the last inputs of the convolution."""
    state: jax.Array
    """b d n, float32 (float64 in a model of that): the state of the scan."""


class MambaBlock(nnx.Module):
    """Projection, causal depthwise convolution, selective scan, gate, projection: b t m -> b t m.

    Calling it takes a whole sequence, `prefill` too and returns what `decode` goes on from, one time step a call. Whatever
    `dtype` and `param_dtype`, A, D, the bias of the step sizes and the states are computed with in float32; where either is
    float64, the whole scan is.
    """

    def __init__(self, config: MambaConfig, *, dtype: Any = None, param_dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.config, self.dtype, self.param_dtype = config, dtype, param_dtype
        m, d, n, r, k = config.d_model, config.d_inner, config.d_state, config.rank, config.d_conv
        new: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        shrunk = nnx.initializers.variance_scaling(1 / (3 * config.n_layer), "fan_in", "uniform")
        self.in_proj = nnx.Linear(
            m, 2 * d, use_bias=config.bias, kernel_init=narrow, kernel_metadata=axes("embed", "inner"), bias_metadata=axes("inner"), **new
        )
        self.conv1d = nnx.Conv(
            d, d, k, feature_group_count=d, padding="VALID", use_bias=config.conv_bias, kernel_init=narrow,
            bias_init=_uniform(k**-0.5), kernel_metadata=axes(None, None, "inner"), bias_metadata=axes("inner"), **new,
        )  # fmt: skip
        self.x_proj = nnx.Linear(d, r + 2 * n, use_bias=False, kernel_init=narrow, kernel_metadata=axes("inner", None), **new)
        largest = config.dt_scale * r**-0.5
        dt_init = nnx.initializers.constant(largest) if config.dt_init == "constant" else _uniform(largest)
        self.dt_proj = nnx.Linear(
            r, d, kernel_init=dt_init, bias_init=_step_sizes(config), kernel_metadata=axes(None, "inner"), bias_metadata=axes("inner"),
            **new,
        )  # fmt: skip
        A = jnp.broadcast_to(jnp.arange(1, n + 1), (d, n))
        self.A_log = nnx.Param(jnp.log(A).astype(param_dtype), **axes("inner", None))
        self.D = nnx.Param(jnp.ones(d, param_dtype), **axes("inner"))
        out_init = shrunk if config.rescale_prenorm_residual else narrow
        self.out_proj = nnx.Linear(
            d, m, use_bias=config.bias, kernel_init=out_init, kernel_metadata=axes("inner", "embed"), bias_metadata=axes("embed"), **new
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """x and the result: b t m."""
        steps, weights, _ = self._inputs(x, self.init_cache(x.shape[0]))
        return self.out_proj(selective_scan(**steps, **weights, delta_softplus=True))

    def prefill(self, x: jax.Array, cache: MambaCache | None = None) -> tuple[jax.Array, MambaCache]:
        """The same, going on from `cache` where there is one, and the cache behind the last step."""
        cache = cache or self.init_cache(x.shape[0])
        steps, weights, conv = self._inputs(x, cache)
        state = cache.state.astype(weights["A"].dtype)
        y, state = selective_scan(**steps, **weights, initial_state=state, delta_softplus=True, return_final_state=True)
        return self.out_proj(y), MambaCache(conv, state)

    def decode(self, x: jax.Array, cache: MambaCache) -> tuple[jax.Array, MambaCache]:
        """One time step. x and the result: b m."""
        steps, weights, conv = self._inputs(x[:, None], cache)
        state, now = cache.state.astype(weights["A"].dtype), {name: v[:, 0] for name, v in steps.items()}
        y, state = selective_scan_step(state, **now, **weights, delta_softplus=True)
        return self.out_proj(y), MambaCache(conv, state)

    def init_cache(self, batch: int) -> MambaCache:
        """The cache before the first step."""
        d, dtype = self.config.d_inner, self.dtype or wide_dtype(self.param_dtype)
        return MambaCache(
            jnp.zeros((batch, self.config.d_conv - 1, d), dtype), jnp.zeros((batch, d, self.config.d_state), self._exact(dtype))
        )

    def _inputs(self, x: jax.Array, cache: MambaCache) -> tuple[dict[str, jax.Array], dict[str, jax.Array], jax.Array]:
        """What the scan takes, with time and without; the last inputs of the convolution."""
        u, gate = jnp.split(self.in_proj(x), 2, -1)
        padded = jnp.concatenate([cache.conv.astype(u.dtype), u], 1)
        u = nnx.silu(self.conv1d(padded))
        r, n = self.config.rank, self.config.d_state
        delta, B, C = jnp.split(self.x_proj(u), [r, r + n], -1)
        # The bias of dt_proj is added in the scan, in float32.
        delta = jnp.matmul(*promote_dtype((delta, self.dt_proj.kernel[...]), dtype=self.dtype))
        steps, exact = {"x": u, "delta": delta, "B": B, "C": C, "z": gate}, self._exact(u.dtype)
        if exact == jnp.float64:  # which doesn't mix with others
            steps = {name: v.astype(exact) for name, v in steps.items()}
        assert self.dt_proj.bias is not None
        A_log, D, bias = (v[...].astype(exact) for v in (self.A_log, self.D, self.dt_proj.bias))
        return steps, {"A": -jnp.exp(A_log), "D": D, "delta_bias": bias}, padded[:, x.shape[1] :]

    def _exact(self, dtype: Any) -> Any:
        """What A, D, the bias and the states have where activations have this dtype."""
        return jnp.promote_types(wide_dtype(dtype), wide_dtype(self.param_dtype))


def _uniform(largest: float) -> nnx.Initializer:
    return lambda key, shape, dtype=jnp.float32, out_sharding=None: jax.random.uniform(key, shape, dtype, -largest, largest)


def _step_sizes(config: MambaConfig) -> nnx.Initializer:
    """Step sizes between dt_min and dt_max, evenly over the logarithm; the bias is the inverse of softplus at them."""

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        steps = jnp.exp(jax.random.uniform(key, shape, wide_dtype(dtype), math.log(config.dt_min), math.log(config.dt_max)))
        steps = jnp.maximum(steps, config.dt_init_floor)
        return (steps + jnp.log(-jnp.expm1(-steps))).astype(dtype)

    return init
