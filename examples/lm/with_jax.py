"""The training step in JAX, with Flax and optax."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from bridge.models import layout
from jax_ops.nnx import MambaLM, load_state_dict, state_dict
from lm.checkpoint import Arrays
from lm.settings import Settings


class Trainer:
    def __init__(self, settings: Settings, arrays: Arrays | None = None, step: int = 0):
        self.settings, config = settings, settings.config
        if settings.dtype == "float32":
            jax.config.update("jax_default_matmul_precision", "float32")  # as PyTorch has it; JAX's default on a GPU is TF32

        def make(key):
            return MambaLM(config, dtype=jnp.dtype(settings.dtype), rngs=nnx.Rngs(key))

        build = partial(nnx.eval_shape, make) if arrays else jax.jit(make)  # nothing is drawn where weights are given
        self.graph, self.params = nnx.split(build(jax.random.key(settings.seed)))
        rates = jnp.asarray(settings.rates())
        decays = nnx.map_state(lambda path, p: layout.decays(layout.name_in_flax(path)[0], p.shape), self.params)
        b1, b2 = settings.betas
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(settings.clip),
            optax.adamw(lambda count: rates[count], b1, b2, settings.eps, weight_decay=settings.weight_decay, mask=decays),
        )
        if arrays:
            self.params = load_state_dict(self.params, config, arrays["weight"])
        self.state = self.optimizer.init(self.params)
        if step and arrays:
            first, second = (load_state_dict(self.params, config, arrays[kind]) for kind in ("first", "second"))
            restored = optax.tree_utils.tree_set(self.state, mu=first, nu=second, count=jnp.asarray(step, jnp.int32))
            self.state = jax.tree.map(jnp.copy, restored)  # two counts in one buffer can't be donated

    @partial(jax.jit, static_argnums=0)
    def loss(self, params, passages: jax.Array) -> jax.Array:
        """In nats a byte. passages: b t+1."""
        logits = nnx.merge(self.graph, params)(passages[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), passages[:, 1:]).mean()

    @partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
    def _update(self, params, state, passages: jax.Array):
        loss, gradients = jax.value_and_grad(self.loss)(params, passages)
        updates, state = self.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def step(self, number: int, passages: np.ndarray) -> jax.Array:
        self.params, self.state, loss = self._update(self.params, self.state, passages)
        return loss

    def evaluate(self, passages: np.ndarray) -> float:
        return float(self.loss(self.params, passages))

    def generate(self, prompt: bytes, count: int, temperature: float, seed: int) -> bytes:
        model, key = nnx.merge(self.graph, self.params), jax.random.key(seed)
        tokens = model.generate(jnp.array([list(prompt)]), count, temperature=temperature, key=key)
        return bytes(tokens[0].tolist())

    def arrays(self) -> Arrays:
        moments = {kind: optax.tree_utils.tree_get(self.state, name) for kind, name in (("first", "mu"), ("second", "nu"))}
        return {kind: jax.tree.map(np.array, state_dict(x)) for kind, x in {"weight": self.params, **moments}.items()}
