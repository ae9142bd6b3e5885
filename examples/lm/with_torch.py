"""The training step in PyTorch."""

import numpy as np
import torch
from torch.nn import functional as F

from bridge.models import layout
from lm.checkpoint import Arrays
from lm.settings import Settings
from torch_ops.nn import MambaLM


class Trainer:
    def __init__(self, settings: Settings, arrays: Arrays | None = None, step: int = 0):
        torch.manual_seed(settings.seed)
        self.settings, self.device = settings, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = MambaLM(settings.config, device=self.device)
        named = dict(self.model.named_parameters())
        groups = [
            {"params": [p for name, p in named.items() if layout.decays(name, p.shape) == decays], "weight_decay": decay}
            for decays, decay in ((True, settings.weight_decay), (False, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps)
        self.rates = settings.rates()
        if arrays:
            self.model.load_state_dict({name: torch.from_numpy(x) for name, x in arrays["weight"].items()})
        if step and arrays:
            for name, p in named.items():
                first, second = (torch.from_numpy(arrays[kind][name]).to(self.device) for kind in ("first", "second"))
                self.optimizer.state[p] = {"step": torch.tensor(float(step)), "exp_avg": first, "exp_avg_sq": second}

    def loss(self, passages: np.ndarray) -> torch.Tensor:
        """In nats a byte. passages: b t+1."""
        tokens = torch.from_numpy(passages).to(self.device, torch.long)
        dtype = getattr(torch, self.settings.dtype)
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def gradients(self, passages: np.ndarray) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(passages)
        loss.backward()
        return loss.detach()

    def step(self, number: int, passages: np.ndarray) -> torch.Tensor:
        loss = self.gradients(passages)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = float(self.rates[number])
        self.optimizer.step()
        return loss

    @torch.no_grad()
    def evaluate(self, passages: np.ndarray) -> float:
        return float(self.loss(passages))

    def generate(self, prompt: bytes, count: int, temperature: float, seed: int) -> bytes:
        tokens = torch.tensor([list(prompt)], device=self.device)
        generator = torch.Generator(self.device).manual_seed(seed)
        return bytes(self.model.generate(tokens, count, temperature=temperature, generator=generator)[0].tolist())

    def arrays(self) -> Arrays:
        named = dict(self.model.named_parameters())
        moments = {kind: {n: self.optimizer.state[p].get(key, torch.zeros_like(p)) for n, p in named.items()}
                   for kind, key in (("first", "exp_avg"), ("second", "exp_avg_sq"))}  # fmt: skip
        return {kind: {n: x.detach().cpu().numpy().copy() for n, x in m.items()} for kind, m in {"weight": named, **moments}.items()}
