"""What is trained, and how: the same for both frameworks."""

from dataclasses import dataclass, replace

import numpy as np

from bridge.models import MambaConfig

BYTES = 256


@dataclass(frozen=True)
class Settings:
    config: MambaConfig
    dtype: str
    batch: int
    length: int
    steps: int
    rate: float
    warmup: int
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    seed: int = 0

    def rates(self) -> np.ndarray:
        """The learning rate of every step: up in a line, down to a tenth in a cosine."""
        step = np.arange(self.steps)
        done = np.clip((step - self.warmup) / max(self.steps - self.warmup, 1), 0, 1)
        falling = 0.55 + 0.45 * np.cos(np.pi * done)
        return (self.rate * np.minimum((step + 1) / max(self.warmup, 1), falling)).astype(np.float32)

    def changed(self, **values) -> "Settings":
        """With what isn't None in the place of its own."""
        return replace(self, **{name: value for name, value in values.items() if value is not None})


SIZES = {
    "small": Settings(MambaConfig(vocab_size=BYTES, d_model=64, n_layer=2), "float32", 8, 96, steps=250, rate=4e-3, warmup=20),
    "130m": Settings(MambaConfig(vocab_size=BYTES), "bfloat16", 16, 1024, steps=2000, rate=8e-4, warmup=100),
}
