"""Models: the same in both frameworks and in `transformers`, step by step and at once."""

import contextlib
import json
import re
import sys
from functools import cache, partial

import numpy as np
import pytest
from common import FRONTENDS, NAMES, ROOT

from bridge.models import MambaConfig, files, layout

CONFIG = MambaConfig(vocab_size=23, d_model=12, n_layer=2, d_state=3, d_conv=3)
STREAMS = MambaConfig(vocab_size=23, d_model=8, n_layer=1, d_state=2, streams=3)
TOKENS = np.random.default_rng(0).integers(0, 23, (2, 9)).astype(np.int32)
BOUND = 1e-5 if FRONTENDS[0].gpu else 2e-6  # of float32, in relation to the largest
both = pytest.mark.skipif(len(NAMES) < 2, reason="needs both frameworks")


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    """Whole models are too much for Triton's interpreter; the tests of the ops are there for the kernels."""
    if not FRONTENDS[0].gpu:
        monkeypatch.setenv("BRIDGE_BACKEND", "reference")
    with contextlib.ExitStack() as stack:
        if "jax" in NAMES:  # what JAX takes for float32 on a GPU is TF32
            stack.enter_context(__import__("jax").default_matmul_precision("float32"))
        yield


def drawn(config, seed=0):
    """Weights of the sizes that those of a trained model have, nothing 0 or 1 by chance."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in layout.shapes(config).items():
        x = rng.standard_normal(shape).astype(np.float32)
        if name.endswith("A_log"):
            x = np.log(np.arange(1, shape[1] + 1)) + 0.1 * x
        elif name.endswith("dt_proj.bias"):
            x = x - 3
        elif len(shape) > 1:
            x = x / np.sqrt(np.prod(shape[1:]))
        elif not name.endswith("static"):
            x = 0.1 * x + (0 if name.endswith("bias") else 1)
        found[name] = x.astype(np.float32)
    return found


class Torch:
    def __init__(self, config, weights=None, dtype="float32"):
        import torch

        from torch_ops.nn import MambaLM

        self.torch, self.device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        self.model = MambaLM(config, device=self.device, dtype=getattr(torch, dtype))
        if weights:
            self.model.load_state_dict({name: torch.from_numpy(x) for name, x in weights.items()})

    def __call__(self, method, tokens, *rest, **named):
        with self.torch.no_grad():
            made = getattr(self.model, method)(self.torch.from_numpy(tokens).to(self.device).long(), *rest, **named)
        logits, *caches = made if isinstance(made, tuple) else (made,)
        return (logits.float().cpu().numpy(), *caches) if caches else logits.float().cpu().numpy()

    def weights(self):
        return {name: x.float().cpu().numpy() for name, x in self.model.state_dict().items()}

    def gradients(self, tokens):
        from torch.nn.functional import cross_entropy

        tokens = self.torch.from_numpy(tokens).to(self.device).long()
        loss = cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.item(), {name: p.grad.cpu().numpy() for name, p in self.model.named_parameters()}


class Jax:
    def __init__(self, config, weights=None, dtype="float32"):
        import jax
        from flax import nnx

        from jax_ops.nnx import MambaLM

        self.jax, self.nnx = jax, nnx

        def make(seed):
            return MambaLM(config, dtype=jax.numpy.dtype(dtype), param_dtype=jax.numpy.dtype(dtype), rngs=nnx.Rngs(jax.random.key(seed)))

        if weights:
            self.model = nnx.eval_shape(partial(make, 0))
            self.model.load_state_dict(weights)
        else:
            self.model = jax.jit(partial(make, 0))()

    def __call__(self, method, tokens, *rest, **named):
        if method == "generate":
            return np.asarray(self.model.generate(self.jax.numpy.asarray(tokens), *rest, **named))
        made = _method(self.jax, method)(self.model, tokens, *rest)
        logits, *caches = made if isinstance(made, tuple) else (made,)
        return (np.asarray(logits, np.float32), *caches) if caches else np.asarray(logits, np.float32)

    def weights(self):
        from jax_ops.nnx import state_dict

        return {name: np.array(x, np.float32) for name, x in state_dict(self.model).items()}

    def gradients(self, tokens):
        import optax

        from jax_ops.nnx import state_dict

        graph, params = self.nnx.split(self.model)

        def loss(params):
            logits = self.nnx.merge(graph, params)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, found = self.jax.jit(self.jax.value_and_grad(loss))(params)
        return float(value), {name: np.asarray(x) for name, x in state_dict(found).items()}


@cache
def _method(jax, name):
    return jax.jit(lambda model, *args: getattr(model, name)(*args))


MODELS = {"torch": Torch, "jax": Jax}
each = pytest.mark.parametrize("name", NAMES)


def close(found, truth, bound):
    assert np.abs(found - truth).max() <= bound * np.abs(truth).max()


@both
@pytest.mark.parametrize(
    "changed",
    [
        dict(use_bias=True, use_conv_bias=False),
        dict(use_conv_bias=True, tie_word_embeddings=False, hidden_size=7, state_size=5, time_step_rank=3),
        dict(conv_kernel=1, num_hidden_layers=1, vocab_size=31),
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_same_as_transformers(changed, tmp_path):
    import torch
    from transformers import MambaConfig as Config
    from transformers import MambaForCausalLM

    config = Config(
        **{**dict(vocab_size=23, hidden_size=10, num_hidden_layers=2, state_size=4, eos_token_id=None, pad_token_id=0), **changed}
    )
    theirs = MambaForCausalLM(config).eval()
    ours = drawn(MambaConfig.from_transformers(config.to_dict()))
    head = {} if layout.HEAD in ours else {layout.HEAD: ours[layout.EMBEDDING]}
    theirs.load_state_dict({name: torch.from_numpy(x) for name, x in {**ours, **head}.items()})
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="2KB")  # several files, and an index
    assert len(files.weight_files(tmp_path / "theirs")) > 1
    prompt = torch.from_numpy(TOKENS).long()
    with torch.no_grad():
        logits = theirs(prompt).logits.numpy()
        tokens = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)[
            :, TOKENS.shape[1] :
        ].numpy()
    for name, kind in MODELS.items():
        model = kind(MambaConfig.from_transformers(config.to_dict()), ours)
        model.model = type(model.model).from_pretrained(tmp_path / "theirs")
        if name == "torch":
            model.model.to(model.device)
        close(model("__call__", TOKENS), logits, BOUND)
        np.testing.assert_array_equal(model("generate", TOKENS, 6), tokens)
        model.model.save_pretrained(tmp_path / name)
        again = MambaForCausalLM.from_pretrained(tmp_path / name)
        for key, x in again.state_dict().items():
            np.testing.assert_array_equal(x.numpy(), {**ours, **head}[key], err_msg=key)


@each
@pytest.mark.parametrize("config", [CONFIG, STREAMS], ids=["one stream", "three streams"])
def test_step_by_step_as_at_once(name, config):
    model = MODELS[name](config, drawn(config))
    whole = model("__call__", TOKENS)
    first, caches = model("prefill", TOKENS[:, :5])
    then, caches = model("prefill", TOKENS[:, 5:7], caches)
    found = [first, then]
    for t in (7, 8):
        logits, caches = model("decode", TOKENS[:, t], caches)
        found.append(logits[:, None])
    close(np.concatenate(found, 1), whole, BOUND)
    begun, _ = model("decode", TOKENS[:, 0], model.model.init_cache(2))
    close(begun, whole[:, 0], BOUND)


@pytest.mark.skipif("jax" not in NAMES, reason="torch has one dtype, not two")
@pytest.mark.parametrize(("dtype", "param_dtype"), [("float64", "float32"), ("float32", "float64"), ("bfloat16", "float64")])
def test_float64_on_one_side_only(dtype, param_dtype):
    import jax
    from flax import nnx

    from jax_ops.nnx import MambaLM

    model = MambaLM(CONFIG, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0))
    whole = jax.jit(lambda model, tokens: model(tokens))(model, TOKENS)
    logits, caches = model.prefill(TOKENS[:, :-1])
    assert caches[0].state.dtype == "float64"
    logits, _ = model.decode(TOKENS[:, -1], caches)
    np.testing.assert_allclose(np.float64(logits), np.float64(whole[:, -1]), rtol=0, atol=0.1 if dtype == "bfloat16" else 1e-4)


@each
def test_generates(name):
    """The tokens that a loop over whole sequences gives; one number more doesn't change those before; drawn ones repeat."""
    model = MODELS[name](CONFIG, drawn(CONFIG))
    made = model("generate", TOKENS, 8)
    whole = model("__call__", np.concatenate([TOKENS, made], 1).astype(np.int32))
    np.testing.assert_array_equal(whole[:, TOKENS.shape[1] - 1 : -1].argmax(-1), made)
    if name == "torch":
        draw = [
            model("generate", TOKENS, 8, temperature=5.0, generator=model.torch.Generator(model.device).manual_seed(s)) for s in (1, 1, 2)
        ]
    else:
        draw = [model("generate", TOKENS, 8, temperature=5.0, key=model.jax.random.key(s)) for s in (1, 1, 2)]
        with pytest.raises(ValueError, match="needs key="):
            model("generate", TOKENS, 8, temperature=5.0)
    assert (draw[0] == draw[1]).all()
    assert (draw[0] != draw[2]).any()
    assert (draw[0] != made).any()
    assert model("generate", TOKENS, 0).shape == (2, 0)


@both
@pytest.mark.parametrize("config", [CONFIG, STREAMS], ids=["one stream", "three streams"])
def test_same_gradients(config):
    models = [MODELS[name](config, drawn(config)) for name in NAMES]
    (loss, one), (other_loss, other) = (model.gradients(TOKENS) for model in models)
    assert abs(loss - other_loss) <= 1e-6 * loss
    assert one.keys() == other.keys() == layout.shapes(config).keys()
    for name in one:
        assert np.linalg.norm(one[name]) > 0, name
        assert np.linalg.norm(one[name] - other[name]) <= 1e-5 * np.linalg.norm(one[name]), name


@each
def test_16_bits(name):
    config = STREAMS
    model = MODELS[name](config, drawn(config), "bfloat16")
    exact = MODELS[name](config, drawn(config))("__call__", TOKENS)
    _, caches = model("prefill", TOKENS)
    assert str(caches[0].state.dtype).endswith("float32")
    assert str(caches[0].conv.dtype).endswith("bfloat16")
    difference = np.linalg.norm(model("__call__", TOKENS) - exact) / np.linalg.norm(exact)
    assert 1e-4 < difference < 0.03


@each
def test_initial_weights(name):
    config = MambaConfig(
        vocab_size=64, d_model=48, n_layer=4, d_state=5, dt_rank=4, dt_min=0.01, dt_max=0.2, bias=True, tie_embeddings=False
    )
    weights = MODELS[name](config).weights()
    assert {n: x.shape for n, x in weights.items()} == layout.shapes(config)
    mixer = {n.removeprefix("backbone.layers.2.mixer."): x for n, x in weights.items()}
    np.testing.assert_allclose(np.exp(mixer["A_log"]), np.tile(np.arange(1, 6), (96, 1)), rtol=1e-6)
    assert (mixer["D"] == 1).all()
    assert not mixer["in_proj.bias"].any()
    assert not mixer["out_proj.bias"].any()
    steps = np.log1p(np.exp(mixer["dt_proj.bias"].astype(np.float64)))
    assert 0.0099 < steps.min() < 0.015
    assert 0.13 < steps.max() < 0.201
    assert abs(np.log(steps).mean() - np.log([0.01, 0.2]).mean()) < 0.3
    bounds = {"in_proj": 48**-0.5, "x_proj": 96**-0.5, "dt_proj": 4**-0.5, "conv1d": 4**-0.5, "out_proj": (96 * 4) ** -0.5}
    for module, bound in bounds.items():
        largest = np.abs(mixer[f"{module}.weight"]).max()
        assert 0.95 * bound < largest <= bound * (1 + 1e-6), module
    assert 0.018 < weights[layout.EMBEDDING].std() < 0.022
    assert 0.95 * 48**-0.5 < np.abs(weights[layout.HEAD]).max() <= 48**-0.5 * (1 + 1e-6)


@both
def test_weights_of_one_framework_in_the_other():
    weights = MODELS["jax"](STREAMS).weights()
    moved = MODELS["torch"](STREAMS, weights)
    twin = MODELS["jax"](STREAMS)
    twin.model.load_state_dict({key: x.numpy() for key, x in moved.model.cpu().state_dict().items()})
    moved.model.to(moved.device)
    with moved.torch.no_grad():  # nothing is shared: what one trains isn't seen by the other
        moved.model.backbone.norm_f.weight.mul_(3)
    assert (twin.weights()["backbone.norm_f.weight"] == 1).all()
    with moved.torch.no_grad():
        moved.model.backbone.norm_f.weight.div_(3)
    for key, x in moved.weights().items():
        np.testing.assert_array_equal(x, weights[key])
    close(moved("__call__", TOKENS), MODELS["jax"](STREAMS, weights)("__call__", TOKENS), BOUND)


@pytest.mark.skipif("jax" not in NAMES, reason="needs JAX")
def test_weights_are_copied_before_loading_returns():
    config = MambaConfig(vocab_size=300_000, d_model=8, n_layer=1, d_state=2)  # large: JAX copies it in the background
    model = MODELS["jax"](config)
    truth = drawn(config)
    for _ in range(5):
        given = {name: x.copy() for name, x in truth.items()}
        model.model.load_state_dict(given)
        for x in given.values():
            x.fill(3)
        for name, x in model.weights().items():
            np.testing.assert_array_equal(x, truth[name])


@pytest.mark.skipif("torch" not in NAMES, reason="needs torch")
def test_mixing_as_in_deepseek():
    import torch
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

    from torch_ops.nn import SinkhornMixing

    theirs = DeepseekV4HyperConnection(DeepseekV4Config(hidden_size=6, hc_mult=4))
    ours = SinkhornMixing(6, 4, iters=theirs.hc_sinkhorn_iters, eps=theirs.hc_eps, norm_eps=theirs.input_norm.eps)
    with torch.no_grad():
        for mine, its in ((ours.phi, theirs.fn), (ours.static, theirs.base), (ours.alpha, theirs.scale)):
            mine.normal_()
            its.copy_(mine)
        streams, y = torch.randn(2, 5, 4, 6), torch.randn(2, 5, 6)
        x, mix = ours.read(streams)
        post, comb, collapsed = theirs(streams)
        for found, truth in ((x, collapsed), (mix.post, post), (mix.residual, comb)):
            torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-6)
        new = post[..., None] * y[..., None, :] + comb.transpose(-1, -2) @ streams
        torch.testing.assert_close(ours(streams, lambda _: y), new, rtol=1e-5, atol=1e-5)


@each
def test_several_streams_begin_as_one(name):
    """R is doubly stochastic, and streams that are copies stay so: what the model computes at first is about that of one stream."""
    plain = MODELS[name](MambaConfig(vocab_size=23, d_model=8, n_layer=1, d_state=2))
    config = MambaConfig(vocab_size=23, d_model=8, n_layer=1, d_state=2, streams=3)
    model = MODELS[name](config, {**MODELS[name](config).weights(), **plain.weights()})
    close(model("__call__", TOKENS), plain("__call__", TOKENS), 0.03)


@pytest.mark.skipif("jax" not in NAMES, reason="needs JAX")
def test_sharded_by_the_names_of_axes():
    model = Jax(CONFIG, drawn(CONFIG))
    whole = model("__call__", TOKENS)
    jax, nnx = model.jax, model.nnx
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    graph, state = nnx.split(model.model)
    with nnx.logical_axis_rules((("inner", "model"), ("vocab", None), ("embed", None))):
        state = jax.device_put(state, nnx.get_named_sharding(state, mesh))
    mixer = state["backbone"]["layers"][0]["mixer"]
    d = CONFIG.d_inner
    shards = {key: mixer[key]["kernel"][...].sharding.shard_shape(mixer[key]["kernel"].shape) for key in ("in_proj", "out_proj", "conv1d")}
    assert shards == {"in_proj": (12, d), "out_proj": (d // 2, 12), "conv1d": (3, 1, d // 2)}
    model.model = nnx.merge(graph, state)
    close(model("__call__", TOKENS), whole, BOUND)


@pytest.mark.skipif("torch" not in NAMES, reason="needs torch")
def test_initialised_later():
    """Made on the device "meta", as large models are, and initialised where they are to be."""
    import torch

    from torch_ops.nn import MambaLM

    with torch.device("meta"):
        model = MambaLM(STREAMS)
    model = model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    torch.manual_seed(0)
    direct = MambaLM(STREAMS)
    direct.reset_parameters()
    assert model.state_dict().keys() == layout.shapes(STREAMS).keys()
    for name, x in model.state_dict().items():
        assert x.isfinite().all(), name
    mine, others = (m.backbone.layers[0].mixing.static for m in (model, direct))
    assert (mine == others).all()


SPOILT = {
    "missing": (lambda w: w.pop("backbone.norm_f.weight"), "backbone.norm_f.weight is missing"),
    "unknown": (lambda w: w.update(more=w["backbone.norm_f.weight"]), "more isn't in this model"),
    "shape": (lambda w: w.update({layout.EMBEDDING: w[layout.EMBEDDING][:5]}), "must be 23 x 8, got 5 x 8"),
    "head": (lambda w: w.update({layout.HEAD: 2 * w[layout.EMBEDDING]}), "tie_embeddings=False"),
}


@each
@pytest.mark.parametrize("how", SPOILT)
def test_weights_that_do_not_fit(name, how, tmp_path):
    from safetensors.numpy import save_file

    spoil, message = SPOILT[how]
    weights = drawn(STREAMS)
    spoil(weights)
    save_file(weights, files.write_config(tmp_path, STREAMS))
    module = __import__("torch_ops.nn" if name == "torch" else "jax_ops.nnx", fromlist=["MambaLM"])
    with pytest.raises(ValueError, match=re.escape(message)):
        module.MambaLM.from_pretrained(tmp_path)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json isn't there"):
        files.read_config(tmp_path)
    files.write_config(tmp_path, STREAMS)
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors isn't there"):
        files.weight_files(tmp_path)
    assert files.read_config(tmp_path) == MambaConfig(vocab_size=23, d_model=8, n_layer=1, d_state=2, streams=3, dt_rank=1)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (dict(d_model=0), ValueError, "d_model must be at least 1"),
        (dict(n_layer=2.5), TypeError, "n_layer must be an integer"),
        (dict(bias=1), TypeError, "bias must be True or False"),
        (dict(dt_rank="small"), TypeError, "dt_rank"),
        (dict(dt_min=0.2), ValueError, "dt_min <= dt_max"),
        (dict(dt_init="ones"), ValueError, "'random', 'constant'"),
    ],
)
def test_config_that_can_not_be(given, error, message):
    with pytest.raises(error, match=re.escape(message)):
        MambaConfig(**given)


@pytest.mark.parametrize("config", [{"model_type": "mamba2"}, {"hidden_act": "gelu"}])
def test_config_of_another_model(config):
    with pytest.raises(ValueError, match=r"must be '(mamba|silu)', got"):
        MambaConfig.from_transformers(config)
    assert MambaConfig.from_transformers({}).n_layer == 32  # what `transformers` takes where nothing stands


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield
    for module in [name for name in sys.modules if name == "lm" or name.startswith("lm.")]:
        del sys.modules[module]


@both
def test_twins(example, tmp_path):
    """The example's training steps: the same losses in both frameworks, and a checkpoint of one goes on in the other."""
    from lm import checkpoint, data
    from lm.settings import Settings
    from lm.with_jax import Trainer as InJax
    from lm.with_torch import Trainer as InTorch

    chosen = Settings(MambaConfig(vocab_size=256, d_model=8, n_layer=1, d_state=2), "float32", 2, 12, steps=6, rate=1e-2, warmup=2)
    text, _ = data.corpus()
    batches = [data.passages(text, chosen.batch, chosen.length, 0, step) for step in range(6)]
    torch_side = InTorch(chosen)
    jax_side = InJax(chosen, torch_side.arrays())
    losses = [float(torch_side.step(i, batches[i])) for i in range(3)]
    np.testing.assert_allclose([float(jax_side.step(i, batches[i])) for i in range(3)], losses, rtol=1e-5)
    checkpoint.save(tmp_path, chosen.config, torch_side.arrays(), losses)
    config, arrays, before = checkpoint.load(tmp_path)
    assert (config.d_model, before) == (8, losses)
    resumed = InJax(chosen, arrays, len(before))
    then = [float(torch_side.step(i, batches[i])) for i in range(3, 6)]
    np.testing.assert_allclose([float(resumed.step(i, batches[i])) for i in range(3, 6)], then, rtol=1e-5)
    back = InTorch(chosen, resumed.arrays(), 6)
    for kind, named in torch_side.arrays().items():
        for key, x in back.arrays()[kind].items():
            assert np.linalg.norm(x - named[key]) <= 1e-3 * np.linalg.norm(named[key]), (kind, key)
    assert json.loads((tmp_path / "losses.json").read_text()) == losses
