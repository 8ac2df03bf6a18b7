"""Multi-head latent attention (MLA): keys and values of all heads come from one latent per token.

A head has channels without positions and rotary channels; the rotary key is shared by all heads.
The cache holds only the latent and the rotary key of each token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.facts.job.model import LatentConfig, RopeScaling
from moesaic.nn.attention import INPUT_DIM, Linear
from moesaic.nn.attention_backends import AttentionMetadata, attend
from moesaic.nn.inputs import Inputs, Rotary
from moesaic.nn.norm import RMSNorm
from moesaic.nn.reports import AttentionReport
from moesaic.nn.rope import mscale
from moesaic.nn.tensor_parallel import NO_TP, TensorParallel, to_local

NORM_EPSILON = 1e-6
"""Epsilon of the latents' norms, fixed by the model family whatever the other norms use."""


class LatentAttention(nn.Module):
    """Multi-head latent attention of one layer. Intermediate tensors are [batch, sequence, heads,
    channels].

    Heads are sharded over TP ranks. Down projections are replicated and run on each rank's own
    tokens, so that only latents are gathered.
    """

    def __init__(
        self,
        layer: int,
        hidden: int,
        heads: int,
        head_dim: int,
        latent: LatentConfig,
        scaling: RopeScaling | None = None,
        tp: TensorParallel = NO_TP,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.layer, self.heads = layer, heads // tp.size
        self.latent_dim, self.rope_dim, self.value_dim = (
            latent.kv_lora_rank,
            latent.qk_rope_head_dim,
            latent.v_head_dim,
        )
        self.nope_dim = head_dim - latent.qk_rope_head_dim
        self.scale = score_scale(head_dim, scaling)
        self.q = self.q_down = self.q_norm = self.q_up = None
        if latent.q_lora_rank is None:
            self.q = Linear(hidden, heads * head_dim, tp)
        else:
            self.q_down = Linear(hidden, latent.q_lora_rank)
            self.q_norm = RMSNorm(latent.q_lora_rank, NORM_EPSILON)
            self.q_up = Linear(latent.q_lora_rank, heads * head_dim, tp)
        self.kv_down = Linear(hidden, self.latent_dim + self.rope_dim)
        self.kv_norm = RMSNorm(self.latent_dim, NORM_EPSILON)
        self.kv_up = Linear(self.latent_dim, heads * (self.nope_dim + self.value_dim), tp)
        self.o = Linear(heads * self.value_dim, hidden, tp, shard_dim=INPUT_DIM)

    def forward(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, AttentionReport]:
        """Return the attention output for this rank's tokens, and the layer's report."""
        latent, k_rope = self.kv_down(x).split((self.latent_dim, self.rope_dim), dim=-1)
        q_inputs, latent, k_rope = self.tp.gather_samples(
            inputs, self._query_inputs(x), self.kv_norm(latent), k_rope
        )
        q, q_rope = self._queries(q_inputs).split((self.nope_dim, self.rope_dim), dim=-1)
        q_rotated = rotate_interleaved(q_rope, inputs.rotary)
        k_rotated = rotate_interleaved(k_rope[:, :, None], inputs.rotary)
        if inputs.cache is not None:
            new = torch.cat((latent[:, :, None], *k_rotated), dim=-1)
            (cached,) = inputs.cache.extend(self.layer, new.transpose(1, 2))
            attended = self._attend_cache(cached, q, q_rotated, inputs.attention)
            return attended, AttentionReport()
        kv = self.kv_up(latent).unflatten(2, (self.heads, -1))
        k, v = kv.split((self.nope_dim, self.value_dim), dim=-1)
        k_shared = (part.expand(-1, -1, self.heads, -1) for part in k_rotated)
        q, k = torch.cat((q, *q_rotated), -1), torch.cat((k, *k_shared), -1)
        report = AttentionReport()
        if inputs.keeps("queries_and_keys", self.layer):
            report = AttentionReport(q.transpose(1, 2), k.transpose(1, 2), self.scale)
        attended = self._attend(q, k, v, inputs.attention)
        return self.tp.reduce_scatter(self.o(attended.flatten(2))), report

    def _query_inputs(self, x: Tensor) -> Tensor:
        """Return the inputs of the query projection: `x`, or the query latents."""
        if self.q_down is None:
            return x
        assert self.q_norm is not None
        latent: Tensor = self.q_norm(self.q_down(x))
        return latent

    def _queries(self, inputs: Tensor) -> Tensor:
        projection = self.q if self.q_up is None else self.q_up
        assert projection is not None
        heads: Tensor = projection(inputs).unflatten(2, (self.heads, -1))
        return heads

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata | None
    ) -> Tensor:
        """Attend with q, k, and v zero-padded to one width, as fused kernels require."""
        width = max(q.shape[-1], v.shape[-1])
        q, k, v = (_pad_width(part, width).transpose(1, 2) for part in (q, k, v))
        return attend(q, k, v, metadata, self.scale).transpose(1, 2)[..., : self.value_dim]

    def _attend_cache(
        self,
        cached: Tensor,
        q: Tensor,
        q_rotated: tuple[Tensor, ...],
        metadata: AttentionMetadata | None,
    ) -> Tensor:
        """Attend to the cached latents, without keys and values per head.

        q (W c) = (q W) c: queries are projected to the latent's width. The latent serves as the one
        key and value of all heads. Results are projected up by each head's part of `kv_up`.
        """
        weight = to_local(self.kv_up.weight).unflatten(0, (self.heads, -1))
        k_up, v_up = weight.split((self.nope_dim, self.value_dim), dim=1)
        q = torch.cat((torch.einsum("bshc,hcw->bshw", q, k_up), *q_rotated), dim=-1)
        latents = attend(q.transpose(1, 2), cached, cached, metadata, self.scale).transpose(1, 2)
        latents = latents[..., : self.latent_dim]
        attended = torch.einsum("bshw,hcw->bshc", latents, v_up)
        result: Tensor = self.o(attended.flatten(2))
        return result


def _pad_width(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def rotate_interleaved(x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Rotate neighbouring channels of [batch, sequence, heads, d] by the positions' angles.

    Return the first channels of all pairs, then the second: scores do not depend on their order.
    """
    first, second = x.to(rotary.cosine.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = rotary.cosine.transpose(1, 2), rotary.sine.transpose(1, 2)
    rotated = first * cosine - second * sine, second * cosine + first * sine
    return rotated[0].to(x.dtype), rotated[1].to(x.dtype)


def score_scale(head_dim: int, scaling: RopeScaling | None) -> float:
    """Return the factor on attention scores; YaRN may raise it for stretched positions."""
    scale: float = head_dim**-0.5
    if scaling is None or scaling.kind != "yarn" or scaling.mscale_all_dim is None:
        return scale
    return scale * mscale(scaling.factor, scaling.mscale_all_dim) ** 2
