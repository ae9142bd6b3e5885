"""The weights of a Mamba language model by the names that its checkpoints have, and what Flax calls them.

The names and the order of axes are those of `transformers`' MambaForCausalLM, and so of PyTorch's modules: a weight of a
linear layer is out x in, that of the convolution d 1 k. Flax keeps these two with their axes in the opposite order, calls
them kernel, and has names of its own for two others; nothing else differs.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from bridge.models.config import MambaConfig

EMBEDDING, HEAD = "backbone.embeddings.weight", "lm_head.weight"
_WEIGHTS = {"kernel", "scale", "embedding"}  # what is called weight elsewhere

Shape = tuple[int, ...]


def shapes(config: MambaConfig) -> dict[str, Shape]:
    """Name -> shape of every weight, in the order of the layers. A tied head is the embedding, and has no name of its own."""
    m, v = config.d_model, config.vocab_size
    layer = {"norm.weight": (m,), **{f"mixer.{name}": shape for name, shape in _mixer(config).items()}}
    if (s := config.streams) > 1:
        layer |= {"mixing.phi": (s * (s + 2), s * m), "mixing.static": (s * (s + 2),), "mixing.alpha": (3,)}
    found: dict[str, Shape] = {EMBEDDING: (v, m)}
    for i in range(config.n_layer):
        found |= {f"backbone.layers.{i}.{name}": shape for name, shape in layer.items()}
    found["backbone.norm_f.weight"] = (m,)
    return found if config.tie_embeddings else {**found, HEAD: (v, m)}


def _mixer(config: MambaConfig) -> dict[str, Shape]:
    m, d, n, r = config.d_model, config.d_inner, config.d_state, config.rank
    return {
        "A_log": (d, n),
        "D": (d,),
        "conv1d.weight": (d, 1, config.d_conv),
        **({"conv1d.bias": (d,)} if config.conv_bias else {}),
        "in_proj.weight": (2 * d, m),
        **({"in_proj.bias": (2 * d,)} if config.bias else {}),
        "x_proj.weight": (r + 2 * n, d),
        "dt_proj.weight": (d, r),
        "dt_proj.bias": (d,),
        "out_proj.weight": (m, d),
        **({"out_proj.bias": (m,)} if config.bias else {}),
    }


def decays(name: str, shape: Shape) -> bool:
    """Whether weight decay is for this weight: for matrices and convolutions, and not for A, whose logarithm is a time scale."""
    return len(shape) > 1 and not name.endswith("A_log")


def name_in_flax(path: Iterable[Any]) -> tuple[str, bool]:
    """The name of the weight that Flax keeps at this path, and whether Flax has its axes in the opposite order."""
    *modules, leaf = map(str, path)
    return ".".join([*modules, "weight" if leaf in _WEIGHTS else leaf]), leaf == "kernel"


def checked(config: MambaConfig, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays that `config` wants, by name: those given, less the copy of the embedding that some files have as a head.

    Raises ValueError, with names and shapes, where one is missing, unknown, of another shape, or a head isn't tied.
    """
    wanted, found = shapes(config), dict(arrays)
    if config.tie_embeddings and HEAD in found and EMBEDDING in found:
        head, embedding = found.pop(HEAD), found[EMBEDDING]
        if tuple(head.shape) != tuple(embedding.shape) or not bool((head == embedding).all()):
            raise ValueError(f"{HEAD} differs from {EMBEDDING}: this model wants tie_embeddings=False")
    wrong = [f"{name} is missing" for name in wanted if name not in found]
    wrong += [f"{name} isn't in this model" for name in found if name not in wanted]
    wrong += [
        f"{name} must be {' x '.join(map(str, shape))}, got {' x '.join(map(str, found[name].shape))}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    if wrong:
        raise ValueError(f"weights don't fit {config}: " + "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if wrong[5:] else ""))
    return {name: found[name] for name in wanted}
