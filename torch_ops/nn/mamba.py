"""The Mamba block (Gu and Dao, arXiv 2312.00752, figure 3)."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bridge.models import MambaConfig
from torch_ops import selective_scan, selective_scan_step


class MambaCache(NamedTuple):
    """What a block hands on from one time step to the next."""

    conv: Tensor
    """b d k-1: the last inputs of the convolution."""
    state: Tensor
    """b d n, float32 (float64 in a model of that): the state of the scan."""


class MambaBlock(nn.Module):
    """Projection, causal depthwise convolution, selective scan, gate, projection: b t m -> b t m.

    `forward` takes a whole sequence, `prefill` too and returns what `decode` goes on from, one time step a call. In a module
    of 16-bit weights or under torch.autocast, A, D, the bias of the step sizes and the states stay float32.
    """

    def __init__(self, config: MambaConfig, *, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.config = config
        m, d, n, r = config.d_model, config.d_inner, config.d_state, config.rank
        new: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(m, 2 * d, bias=config.bias, **new)
        self.conv1d = nn.Conv1d(d, d, config.d_conv, groups=d, bias=config.conv_bias, **new)
        self.x_proj = nn.Linear(d, r + 2 * n, bias=False, **new)
        self.dt_proj = nn.Linear(r, d, **new)
        self.A_log = nn.Parameter(torch.empty(d, n, **new))
        self.D = nn.Parameter(torch.empty(d, **new))
        self.out_proj = nn.Linear(d, m, bias=config.bias, **new)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The initialisation of the paper, of everything in here: also after `to_empty` on a module of the device "meta"."""
        config = self.config
        for module in (self.in_proj, self.conv1d, self.x_proj, self.out_proj):
            module.reset_parameters()
        for bias in (self.in_proj.bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        if config.rescale_prenorm_residual:
            self.out_proj.weight /= math.sqrt(config.n_layer)
        self.A_log.copy_(torch.arange(1, config.d_state + 1).log().expand_as(self.A_log))
        nn.init.ones_(self.D)
        largest = config.dt_scale * config.rank**-0.5
        if config.dt_init == "constant":
            nn.init.constant_(self.dt_proj.weight, largest)
        else:
            nn.init.uniform_(self.dt_proj.weight, -largest, largest)
        # Step sizes between dt_min and dt_max, evenly over the logarithm; the bias is the inverse of softplus at them.
        bias = self.dt_proj.bias
        steps = torch.empty_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32))
        steps = steps.uniform_(math.log(config.dt_min), math.log(config.dt_max)).exp().clamp(min=config.dt_init_floor)
        bias.copy_(steps + torch.log(-torch.expm1(-steps)))

    def forward(self, x: Tensor) -> Tensor:
        """x and the result: b t m."""
        inputs, gate, _ = self._inputs(x, None)
        return self.out_proj(selective_scan(*inputs, z=gate, **self._bias()))

    def prefill(self, x: Tensor, cache: MambaCache | None = None) -> tuple[Tensor, MambaCache]:
        """The same, going on from `cache` where there is one, and the cache behind the last step."""
        inputs, gate, conv = self._inputs(x, cache)
        state = cache and cache.state
        y, state = selective_scan(*inputs, z=gate, initial_state=state, return_final_state=True, **self._bias())
        return self.out_proj(y), MambaCache(conv, state)

    def decode(self, x: Tensor, cache: MambaCache) -> tuple[Tensor, MambaCache]:
        """One time step. x and the result: b m."""
        (u, delta, A, B, C, D), gate, conv = self._inputs(x[:, None], cache)
        u, delta, B, C, gate = (v[:, 0] for v in (u, delta, B, C, gate))
        y, state = selective_scan_step(cache.state, u, delta, A, B, C, D, gate, **self._bias())
        return self.out_proj(y), MambaCache(conv, state)

    def init_cache(self, batch: int) -> MambaCache:
        """The cache before the first step."""
        d, weight = self.config.d_inner, self.conv1d.weight
        return MambaCache(weight.new_zeros(batch, d, self.config.d_conv - 1), _wide(self.A_log).new_zeros(batch, d, self.config.d_state))

    def _inputs(self, x: Tensor, cache: MambaCache | None) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """x, delta, A, B, C, D of the scan; its gate; the last inputs of the convolution."""
        u, gate = self.in_proj(x).chunk(2, -1)
        u = u.mT
        width = self.config.d_conv - 1
        padded = F.pad(u, (width, 0)) if cache is None else torch.cat([cache.conv.to(u.dtype), u], -1)
        u = F.silu(self.conv1d(padded)).mT
        delta, B, C = self.x_proj(u).split([self.config.rank, self.config.d_state, self.config.d_state], -1)
        delta = F.linear(delta, self.dt_proj.weight)  # its bias is added in the scan, in float32
        return (u, delta, -_wide(self.A_log).exp(), B, C, _wide(self.D)), gate, padded[..., x.shape[1] :]

    def _bias(self) -> dict[str, Any]:
        return {"delta_bias": _wide(self.dt_proj.bias), "delta_softplus": True}


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
