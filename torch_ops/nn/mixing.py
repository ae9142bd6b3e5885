"""Manifold-constrained hyper-connections (mHC, arXiv 2512.24880)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bridge.models.mixing import initial_logits
from torch_ops import sinkhorn


class Mix(NamedTuple):
    """How a layer's output and the residual streams are put together."""

    post: Tensor
    """... n: how much of the output each stream gets."""
    residual: Tensor
    """... n n, doubly stochastic: from stream (-2) to stream (-1)."""


class SinkhornMixing(nn.Module):
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
        alpha: float = 0.01, device: Any = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        self.d_model, self.streams, self.iters, self.eps, self.initial_alpha = d_model, streams, iters, eps, alpha
        self.norm = nn.RMSNorm(streams * d_model, eps=norm_eps, elementwise_affine=False)
        self.phi = nn.Parameter(torch.empty(streams * (streams + 2), streams * d_model, device=device, dtype=dtype))
        self.static = nn.Parameter(torch.empty(streams * (streams + 2), device=device, dtype=dtype))
        self.alpha = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.phi, std=self.phi.shape[1] ** -0.5)
        self.static.copy_(torch.from_numpy(initial_logits(self.streams)))
        nn.init.constant_(self.alpha, self.initial_alpha)

    def forward(self, streams: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """streams and the result: ... n m. layer: ... m -> ... m."""
        x, mix = self.read(streams)
        return self.write(streams, layer(x), mix)

    def read(self, streams: Tensor) -> tuple[Tensor, Mix]:
        """The layer's input, ... m, and what `write` needs."""
        n = self.streams
        with torch.autocast(streams.device.type, enabled=False):
            dtype = torch.promote_types(streams.dtype, torch.float32)
            dynamic = F.linear(self.norm(streams.flatten(-2).to(dtype)), self.phi.to(dtype))
            pre, post, mixed = (
                alpha * x + static
                for alpha, x, static in zip(
                    self.alpha.to(dtype), dynamic.split([n, n, n * n], -1), self.static.to(dtype).split([n, n, n * n]), strict=True
                )
            )
            pre = pre.sigmoid() + self.eps
            residual = sinkhorn(mixed.unflatten(-1, (n, n)), iters=self.iters, eps=self.eps, order="row_col")
            x = torch.einsum("...n,...nm->...m", pre, streams.to(dtype))
        return x.to(streams.dtype), Mix(2 * post.sigmoid(), residual)

    def write(self, streams: Tensor, y: Tensor, mix: Mix) -> Tensor:
        """streams and the result: ... n m. y, the layer's output: ... m."""
        with torch.autocast(streams.device.type, enabled=False):
            dtype = mix.residual.dtype
            mixed = mix.residual.mT @ streams.to(dtype) + mix.post[..., None] * y.to(dtype)[..., None, :]
        return mixed.to(streams.dtype)
