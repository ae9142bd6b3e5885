"""The Mamba language model, with the names that its checkpoints have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bridge.models import MambaConfig, files, layout
from torch_ops.nn.mamba import MambaBlock, MambaCache
from torch_ops.nn.mixing import SinkhornMixing

Caches = list[MambaCache]


class MambaLayer(nn.Module):
    """A block with its norm, and what goes around it: a residual, or several streams that are mixed."""

    def __init__(self, config: MambaConfig, **new: Any):
        super().__init__()
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps, **new)
        self.mixer = MambaBlock(config, **new)
        self.mixing = SinkhornMixing(config.d_model, config.streams, **new) if config.streams > 1 else None

    def forward(self, h: Tensor) -> Tensor:
        """h and the result: b t m, or b t n m where there are n streams."""
        return self._around(h, lambda x: (self.mixer(x), None))[0]

    def prefill(self, h: Tensor, cache: MambaCache | None) -> tuple[Tensor, MambaCache]:
        return self._around(h, lambda x: self.mixer.prefill(x, cache))

    def decode(self, h: Tensor, cache: MambaCache) -> tuple[Tensor, MambaCache]:
        return self._around(h, lambda x: self.mixer.decode(x, cache))

    def _around(self, h: Tensor, mixer: Callable[[Tensor], tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
        if self.mixing is None:
            y, cache = mixer(self._normed(h))
            return h + y, cache
        x, mix = self.mixing.read(h)
        y, cache = mixer(self._normed(x))
        return self.mixing.write(h, y, mix), cache

    def _normed(self, x: Tensor) -> Tensor:
        return self.norm(x.to(self.norm.weight.dtype))


class Mamba(nn.Module):
    """Embedding, layers, norm: tokens b t -> b t m."""

    def __init__(self, config: MambaConfig, **new: Any):
        super().__init__()
        self.config = config
        self.embeddings = nn.Embedding(config.vocab_size, config.d_model, **new)
        self.layers = nn.ModuleList(MambaLayer(config, **new) for _ in range(config.n_layer))
        self.norm_f = nn.RMSNorm(config.d_model, eps=config.norm_eps, **new)

    def forward(self, tokens: Tensor) -> Tensor:
        return self._through(tokens, lambda layer, h, _: (layer(h), None), self.layers)[0]

    def prefill(self, tokens: Tensor, caches: Caches | None) -> tuple[Tensor, Caches]:
        return self._through(tokens, MambaLayer.prefill, caches or [None] * len(self.layers))

    def decode(self, token: Tensor, caches: Caches) -> tuple[Tensor, Caches]:
        return self._through(token, MambaLayer.decode, caches)

    def _through(self, tokens: Tensor, layer: Callable[..., Any], caches: Any) -> tuple[Tensor, list[Any]]:
        h = self.embeddings(tokens)
        if self.config.residual_in_fp32:
            h = h.to(torch.promote_types(h.dtype, torch.float32))
        if self.config.streams > 1:
            h = h[..., None, :].expand(*h.shape[:-1], self.config.streams, -1)
        after = []
        for module, cache in zip(self.layers, caches, strict=True):
            h, cache = layer(module, h, cache)
            after.append(cache)
        if self.config.streams > 1:
            h = h.mean(-2)
        return self.norm_f(h.to(self.norm_f.weight.dtype)), after


class MambaLM(nn.Module):
    """A Mamba language model: tokens b t, integers below v -> logits b t v, of the token that comes next.

    Its state dict is that of `transformers`' MambaForCausalLM. A head that is tied to the embedding has no weight of its own.
    """

    def __init__(self, config: MambaConfig, *, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.config = config
        new: dict[str, Any] = {"device": device, "dtype": dtype}
        self.backbone = Mamba(config, **new)
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False, **new)
        nn.init.normal_(self.backbone.embeddings.weight, std=config.init_std)

    def reset_parameters(self) -> None:
        """Draws all weights again; what a module on the device "meta" needs after `to_empty`."""
        for module in self.modules():
            if isinstance(module, (MambaBlock, SinkhornMixing, nn.RMSNorm)):
                module.reset_parameters()
        nn.init.normal_(self.backbone.embeddings.weight, std=self.config.init_std)
        if self.lm_head is not None:
            self.lm_head.reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        return self._head(self.backbone(tokens))

    def prefill(self, tokens: Tensor, caches: Caches | None = None) -> tuple[Tensor, Caches]:
        """The logits b t v of a sequence that goes on from `caches`, if any, and the caches behind it."""
        h, caches = self.backbone.prefill(tokens, caches)
        return self._head(h), caches

    def decode(self, token: Tensor, caches: Caches) -> tuple[Tensor, Caches]:
        """One time step. token: b; logits: b v."""
        h, caches = self.backbone.decode(token, caches)
        return self._head(h), caches

    def init_cache(self, batch: int) -> Caches:
        """The caches before the first token."""
        return [block.init_cache(batch) for block in self.modules() if isinstance(block, MambaBlock)]

    @torch.no_grad()
    def generate(self, prompt: Tensor, steps: int, *, temperature: float = 0.0, generator: torch.Generator | None = None) -> Tensor:
        """`steps` tokens that follow the prompt: the likeliest at temperature 0, drawn above. prompt: b t; result: b steps."""
        logits, caches = self.prefill(prompt)
        logits, tokens = logits[:, -1], prompt.new_empty(len(prompt), steps)
        for i in range(steps):
            if temperature:
                odds = torch.softmax(logits.to(torch.float32) / temperature, -1)
                tokens[:, i] = torch.multinomial(odds, 1, generator=generator)[:, 0]
            else:
                tokens[:, i] = logits.argmax(-1)
            if i + 1 < steps:
                logits, caches = self.decode(tokens[:, i], caches)
        return tokens

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, device: Any = None, dtype: torch.dtype | None = None) -> "MambaLM":
        """From a folder with config.json and model.safetensors (or several files and their index), as `transformers` writes it.

        `dtype` None keeps that of the file. Raises FileNotFoundError, and ValueError for weights that don't fit the config.
        """
        from safetensors.torch import load_file

        config = files.read_config(folder)
        with torch.device("meta"):
            model = cls(config)
        read: dict[str, Tensor] = {}
        for path in files.weight_files(folder):
            read |= load_file(path, device="cpu" if device is None else str(torch.device(device)))
        model.load_state_dict({name: x.to(dtype or x.dtype) for name, x in layout.checked(config, read).items()}, assign=True)
        return model

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes such a folder."""
        from safetensors.torch import save_file

        path = files.write_config(folder, self.config)
        save_file({name: x.contiguous() for name, x in self.state_dict().items()}, path, metadata=files.METADATA)

    def _head(self, h: Tensor) -> Tensor:
        return F.linear(h, self.backbone.embeddings.weight) if self.lm_head is None else self.lm_head(h)
