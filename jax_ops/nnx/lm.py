"""The Mamba language model, with the names that its checkpoints have."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bridge.models import MambaConfig, files
from jax_ops.nnx.checkpoint import load_state_dict, state_dict
from jax_ops.nnx.mamba import MambaBlock, MambaCache
from jax_ops.nnx.mixing import SinkhornMixing
from jax_ops.nnx.params import axes, narrow, wide, wide_dtype

Caches = list[MambaCache]


def _norm(config: MambaConfig, param_dtype: Any, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.d_model, epsilon=config.norm_eps, dtype=wide_dtype(param_dtype), param_dtype=param_dtype, scale_metadata=axes("embed"),
        rngs=rngs,
    )  # fmt: skip


class MambaLayer(nnx.Module):
    """A block with its norm, and what goes around it: a residual, or several streams that are mixed."""

    def __init__(self, config: MambaConfig, *, dtype: Any = None, param_dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.norm = _norm(config, param_dtype, rngs)
        self.mixer = MambaBlock(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        several = config.streams > 1
        self.mixing = SinkhornMixing(config.d_model, config.streams, param_dtype=param_dtype, rngs=rngs) if several else None

    def __call__(self, h: jax.Array) -> jax.Array:
        """h and the result: b t m, or b t n m where there are n streams."""
        return self._around(h, lambda x: (self.mixer(x), None))[0]

    def prefill(self, h: jax.Array, cache: MambaCache | None) -> tuple[jax.Array, MambaCache]:
        return self._around(h, lambda x: self.mixer.prefill(x, cache))

    def decode(self, h: jax.Array, cache: MambaCache) -> tuple[jax.Array, MambaCache]:
        return self._around(h, lambda x: self.mixer.decode(x, cache))

    def _around(self, h: jax.Array, mixer: Callable[[jax.Array], tuple[jax.Array, Any]]) -> tuple[jax.Array, Any]:
        if self.mixing is None:
            y, cache = mixer(self.norm(h))
            return h + y.astype(h.dtype), cache
        x, mix = self.mixing.read(h)
        y, cache = mixer(self.norm(x))
        return self.mixing.write(h, y, mix), cache


class Mamba(nnx.Module):
    """Embedding, layers, norm: tokens b t -> b t m."""

    def __init__(self, config: MambaConfig, *, dtype: Any = None, param_dtype: Any = jnp.float32, rngs: nnx.Rngs):
        new: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.config = config
        self.embeddings = nnx.Embed(
            config.vocab_size, config.d_model, embedding_init=nnx.initializers.normal(config.init_std),
            embedding_metadata=axes("vocab", "embed"), **new,
        )  # fmt: skip
        self.layers = nnx.List(MambaLayer(config, **new) for _ in range(config.n_layer))
        self.norm_f = _norm(config, param_dtype, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self._through(tokens, lambda layer, h, _: (layer(h), None), self.layers)[0]

    def prefill(self, tokens: jax.Array, caches: Caches | None) -> tuple[jax.Array, Caches]:
        return self._through(tokens, MambaLayer.prefill, caches or [None] * len(self.layers))

    def decode(self, token: jax.Array, caches: Caches) -> tuple[jax.Array, Caches]:
        return self._through(token, MambaLayer.decode, caches)

    def _through(self, tokens: jax.Array, layer: Callable[..., Any], caches: Any) -> tuple[jax.Array, list[Any]]:
        h = self.embeddings(tokens)
        if self.config.residual_in_fp32:
            h = wide(h)
        if self.config.streams > 1:
            h = jnp.repeat(h[..., None, :], self.config.streams, -2)
        after = []
        for module, cache in zip(self.layers, caches, strict=True):
            h, cache = layer(module, h, cache)
            after.append(cache)
        if self.config.streams > 1:
            h = h.mean(-2)
        return self.norm_f(h), after


class MambaLM(nnx.Module):
    """A Mamba language model: tokens b t, integers below v -> logits b t v, of the token that comes next.

    Its modules are named as in `transformers`' MambaForCausalLM; jax_ops.nnx.state_dict gives its weights under the names there.
    """

    def __init__(self, config: MambaConfig, *, dtype: Any = None, param_dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        new: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.backbone = Mamba(config, **new)
        self.lm_head = (
            None
            if config.tie_embeddings
            else nnx.Linear(
                config.d_model, config.vocab_size, use_bias=False, kernel_init=narrow, kernel_metadata=axes("embed", "vocab"), **new
            )
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self._head(self.backbone(tokens))

    def prefill(self, tokens: jax.Array, caches: Caches | None = None) -> tuple[jax.Array, Caches]:
        """The logits b t v of a sequence that goes on from `caches`, if any, and the caches behind it."""
        h, caches = self.backbone.prefill(tokens, caches)
        return self._head(h), caches

    def decode(self, token: jax.Array, caches: Caches) -> tuple[jax.Array, Caches]:
        """One time step. token: b; logits: b v."""
        h, caches = self.backbone.decode(token, caches)
        return self._head(h), caches

    def init_cache(self, batch: int) -> Caches:
        """The caches before the first token."""
        return [layer.mixer.init_cache(batch) for layer in self.backbone.layers]

    def generate(self, prompt: jax.Array, steps: int, *, temperature: float = 0.0, key: jax.Array | None = None) -> jax.Array:
        """`steps` tokens that follow the prompt: the likeliest at temperature 0, drawn with `key` above. prompt: b t; result:
        b steps. It is one compiled function, and compiles again for other shapes, and other numbers of steps."""
        if temperature and key is None:
            raise ValueError(f"generate: temperature {temperature} needs key=, a jax.random.key")
        if steps == 0:
            return jnp.zeros((prompt.shape[0], 0), prompt.dtype)
        return _generate(self, prompt, jax.random.key(0) if key is None else key, temperature, steps, bool(temperature))

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, dtype: Any = None, param_dtype: Any = jnp.float32) -> "MambaLM":
        """From a folder with config.json and model.safetensors (or several files and their index), as `transformers` writes it.

        Raises FileNotFoundError, and ValueError for weights that don't fit the config.
        """
        from safetensors.flax import load_file

        config = files.read_config(folder)
        model = nnx.eval_shape(lambda: cls(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0)))
        read: dict[str, jax.Array] = {}
        for path in files.weight_files(folder):
            read |= load_file(path)
        model.load_state_dict(read)
        return model

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes such a folder."""
        from safetensors.flax import save_file

        save_file(state_dict(self), files.write_config(folder, self.config), metadata=files.METADATA)

    def load_state_dict(self, arrays: Mapping[str, Any]) -> None:
        """Takes these weights, named as in checkpoints, from numpy or JAX. Raises ValueError where names or shapes don't fit."""
        nnx.update(self, load_state_dict(nnx.state(self, nnx.Param), self.config, arrays))

    def _head(self, h: jax.Array) -> jax.Array:
        return self.backbone.embeddings.attend(h) if self.lm_head is None else self.lm_head(h)


@partial(jax.jit, static_argnames=("steps", "drawn"))
def _generate(model: MambaLM, prompt: jax.Array, key: jax.Array, temperature: jax.Array, steps: int, drawn: bool) -> jax.Array:
    def choose(logits, key):
        chosen = jax.random.categorical(key, wide(logits) / temperature) if drawn else jnp.argmax(logits, -1)
        return chosen.astype(prompt.dtype)

    def step(carry, key):
        token, caches = carry
        logits, caches = model.decode(token, caches)
        token = choose(logits, key)
        return (token, caches), token

    first, *rest = jax.random.split(key, steps)
    logits, caches = model.prefill(prompt)
    token = choose(logits[:, -1], first)
    _, tokens = jax.lax.scan(step, (token, caches), jnp.stack(rest) if rest else jax.random.split(key, 0))
    return jnp.concatenate([token[:, None], tokens.T], 1)
