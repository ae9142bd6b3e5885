"""The sizes of a Mamba language model, and how checkpoints of `transformers` spell them."""

from dataclasses import asdict, dataclass
from typing import Any

from bridge.options import Choice, Flag, Integer, Option, Real

_SIZE, _FLAG, _NUMBER = Integer(1, minimum=1), Flag(), Real(0.0)
_FIELDS: dict[str, Option] = {
    "vocab_size": _SIZE, "d_model": _SIZE, "n_layer": _SIZE, "d_state": _SIZE, "d_conv": _SIZE, "expand": _SIZE, "streams": _SIZE,
    "bias": _FLAG, "conv_bias": _FLAG, "tie_embeddings": _FLAG, "residual_in_fp32": _FLAG, "rescale_prenorm_residual": _FLAG,
    "dt_min": _NUMBER, "dt_max": _NUMBER, "dt_scale": _NUMBER, "dt_init_floor": _NUMBER, "norm_eps": _NUMBER, "init_std": _NUMBER,
    "dt_init": Choice("random", ("random", "constant")),
}  # fmt: skip

# Here on the left, in config.json on the right.
_TRANSFORMERS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "expand": "expand",
    "dt_rank": "time_step_rank",
    "dt_min": "time_step_min",
    "dt_max": "time_step_max",
    "dt_init": "time_step_init_scheme",
    "dt_scale": "time_step_scale",
    "dt_init_floor": "time_step_floor",
    "bias": "use_bias",
    "conv_bias": "use_conv_bias",
    "norm_eps": "layer_norm_epsilon",
    "tie_embeddings": "tie_word_embeddings",
    "residual_in_fp32": "residual_in_fp32",
    "rescale_prenorm_residual": "rescale_prenorm_residual",
    "init_std": "initializer_range",
}


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """A Mamba language model. The defaults are the paper's, at its size of 130M parameters.

    In the letters of the docstrings of models: m is d_model, d the inner width expand * m, n d_state, k d_conv, r the rank of
    the step sizes, v vocab_size. `streams` above 1 puts so many residual streams, mixed by Sinkhorn, in the place of one.
    `init_std` is that of the embedding; `rescale_prenorm_residual` divides the initial out_proj by the root of n_layer.

    Raises TypeError for a value of the wrong kind, and ValueError for one that can't be.
    """

    vocab_size: int = 50280
    d_model: int = 768
    n_layer: int = 24
    d_state: int = 16
    d_conv: int = 4
    expand: int = 2
    dt_rank: int | str = "auto"
    dt_min: float = 0.001
    dt_max: float = 0.1
    dt_init: str = "random"
    dt_scale: float = 1.0
    dt_init_floor: float = 1e-4
    bias: bool = False
    conv_bias: bool = True
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    residual_in_fp32: bool = True
    rescale_prenorm_residual: bool = True
    init_std: float = 0.02
    streams: int = 1

    def __post_init__(self) -> None:
        for name, option in _FIELDS.items():
            option.check(f"MambaConfig: {name}", getattr(self, name))
        if self.dt_rank != "auto":
            _SIZE.check("MambaConfig: dt_rank is 'auto', or it", self.dt_rank)
        if not 0 < self.dt_min <= self.dt_max:
            raise ValueError(f"MambaConfig: 0 < dt_min <= dt_max is needed, got dt_min={self.dt_min}, dt_max={self.dt_max}")

    @property
    def d_inner(self) -> int:
        return self.expand * self.d_model

    @property
    def rank(self) -> int:
        """dt_rank as a number: "auto" is d_model / 16, rounded up."""
        return -(-self.d_model // 16) if self.dt_rank == "auto" else int(self.dt_rank)

    @classmethod
    def from_transformers(cls, config: dict[str, Any]) -> "MambaConfig":
        """From the contents of config.json, as MambaForCausalLM has it. What isn't there has the defaults of `transformers`.

        Raises ValueError for another kind of model, or an activation that isn't silu.
        """
        for name, wanted in (("model_type", "mamba"), ("hidden_act", "silu")):
            if (found := config.get(name, wanted)) != wanted:
                raise ValueError(f"MambaConfig: {name} must be {wanted!r}, got {found!r}")
        given = {here: config[there] for here, there in _TRANSFORMERS.items() if there in config}
        absent = {"n_layer": 32, "rescale_prenorm_residual": False, "init_std": 0.1}
        return cls(**{**absent, **given}, streams=config.get("streams", 1))

    def to_transformers(self) -> dict[str, Any]:
        """What config.json holds. `streams` stands there only where there are several, which `transformers` doesn't know."""
        values = asdict(self)
        several = {"streams": self.streams} if self.streams > 1 else {}
        return {
            "architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_act": "silu",
            **{there: self.rank if here == "dt_rank" else values[here] for here, there in _TRANSFORMERS.items()},
            "intermediate_size": self.d_inner, **several,
        }  # fmt: skip
