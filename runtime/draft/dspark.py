"""The DSpark draft of a V4 checkpoint: a parallel block through a few stages, then a light sequential head.

Legend: R requests, γ drafts a block (at most as many as it was trained with), T rows of a target step, n streams,
D hidden width, V vocabulary, P position of a request's anchor.

Context: for every position the target has passed, the tapped layers' stream means go through ``main_proj`` and
``main_norm`` once; each stage keeps its rotated key of that in a ring by position. Block: the anchor and γ - 1 masks at
P .. P + γ - 1 run through the stages (V4 layers of the sliding kind), where every row sees the window before P and the
whole block. The head that turns streams into logits and the embedding are the target's. Then the Markov head draws the
tokens one after the other, and the confidence head says how likely each is to survive.
"""

from __future__ import annotations

import numpy as np
import torch

from ...comm.dispatch import Exchange, StepRows
from ...layers.attention.plan import AttentionPlan, build_plan, to_device
from ...layers.draft_heads import load_confidence_head, load_markov_head
from ...layers.draft_heads_host import HostDraftBlock, HostHeads
from ...layers.hyper_connection import HyperHead, spread
from ...layers.kernels import Bound, Kernels
from ...layers.linear import MergedLinear, Part
from ...layers.norm import RMSNorm
from ...layers.params import ParamSource, Scope
from ...layers.probe import ignore
from ...layers.stages import drain
from ...parallel.groups import Groups
from ..cache import Cache, CacheLayout
from ..model_config import DSparkConfig, ModelConfig
from ..models.base import placed
from ..models.deepseek_v4 import Block, DeepseekV4, draft_stage_sizes, hyper_sizes, rope_table
from ..models.staged import dispatcher_for
from ..step import Step
from .base import DraftNoise, DraftRequests, DraftRoom, PlainDraft

MAX_PENDING = 2048
"""Rows of steps without a draft that are taken in together: while drafting does not pay, it shall cost next to nothing.
Of each request only those in the window count by then."""


def is_plain(step: Step) -> bool:
    """Whether ``step``, on the CPU, only decodes, one token of each request."""
    return step.plan.host is not None and not step.has_prefill and step.longest <= 1


class DSparkDrafter(PlainDraft):
    """See :class:`.base.Drafter`."""

    resumes = True

    def __init__(
        self,
        config: ModelConfig,
        draft: DSparkConfig,
        source: ParamSource,
        target: DeepseekV4,
        groups: Groups,
        kernels: Kernels,
        room: DraftRoom,
        gamma: int,
    ) -> None:
        self.gamma, self._width = gamma, gamma if draft.sample_from_anchor else gamma + 1
        self._target, self._draft, self._groups, self._num_streams = target, draft, groups, config.hc_mult
        device, dtype = target.embed.weight.device, target.embed.weight.dtype
        rope = rope_table(config, config.main_rope, room.max_context + draft.block_size, device)
        stages = [Scope(source).scope(f"mtp.{stage}") for stage in range(config.num_draft_stages)]
        attention, moe, hyper = draft_stage_sizes(config)
        sizes = [(attention, placed(moe, room.experts, stage), hyper) for stage in range(len(stages))]
        blocks = enumerate(zip(stages, sizes))
        self._dispatcher = dispatcher_for(sizes[0][1], target.dispatch, groups, dtype, device)
        travels = self._dispatcher.all_to_all
        self._blocks = [Block(scope, *size, rope, groups, kernels, stage, travels) for stage, (scope, size) in blocks]
        self.expert_layers = tuple(block.moe for block in self._blocks)
        layout = CacheLayout((attention,) * len(stages), room.max_verify, dtype.itemsize)
        self._cache = Cache(layout, room.num_slots, 0, 0, device, dtype)
        self.caches = (self._cache,)
        self._main_proj = MergedLinear(stages[0], [Part("main_proj.weight", 0, config.hidden_size)], kernels)
        self._main_norm = RMSNorm(stages[0], "main_norm", config.rms_norm_eps, kernels)
        self._context = [MergedLinear(s, [Part("attn.wkv.weight", 0, config.head_dim)], kernels) for s in stages]
        self._keys = [
            kernels.bind(
                "key_norm_rope",
                weight=scope.take("attn.kv_norm.weight", dtype=torch.float32),
                rope=rope,
                eps=config.rms_norm_eps,
            )
            for scope in stages
        ]
        self._store = kernels.bind("store_rows")
        last = stages[-1]
        self._hyper_head = HyperHead(last, "hc_head", hyper_sizes(config), kernels)
        self._norm = RMSNorm(last, "norm", config.rms_norm_eps, kernels)
        local = groups.tp.size == 1 and not travels
        self._block, self._inject = self._joined(kernels) if local else (None, None)
        self._pending: list[tuple[torch.Tensor, np.ndarray]] = []  # taps and key rows of plain steps
        self._num_pending, self._window = 0, attention.window
        markov = None
        if draft.markov_rank:
            markov = load_markov_head(draft.markov_head_type, last.scope("markov_head"), config.hidden_size)
        confidence = None
        if draft.enable_confidence_head:
            confidence = load_confidence_head(last.scope("confidence_head"), has_bias=False)
        self.heads, self._draw = HostHeads(markov, confidence, kernels=kernels), None
        if kernels.backend == "triton" and self.heads.kind == "vanilla":  # else the logits travel to the host
            weights = {name: markov.weights[f"markov_{name}.weight"] for name in ("w1", "w2")}
            self._draw = tuple(kernels.bind(name, **weights) for name in ("markov_greedy", "markov_sample"))

    def _joined(self, kernels: Kernels) -> tuple[Bound | None, Bound | None]:
        """The block's forward and the taps' way into the rings, each as one call, where the kernels have them."""
        if any(block.moe.slots is not None for block in self._blocks):
            return None, None
        caches = self._cache.layers
        block = kernels.join(
            "draft_block",
            stages=[block.bound for block in self._blocks],
            caches=caches,
            page_table=self._cache.page_table,
            embed=self._target.embed.weight,
            num_streams=self._num_streams,
            collapse=self._hyper_head.bound,
            norm=self._norm.bound,
            head=self._target.head.bound,
            vocab_size=self._target.config.vocab_size,
            width=self._width,
            mask_id=self._draft.noise_token_id,
        )
        keys = [(linear.bound, key) for linear, key in zip(self._context, self._keys)]
        project, norm = self._main_proj.bound, self._main_norm.bound
        return block, kernels.join("draft_context", project=project, norm=norm, stages=keys, caches=caches)

    @classmethod
    def tap_layers(cls, config: ModelConfig) -> tuple[int, ...]:
        """See :meth:`.base.Drafter.tap_layers`."""
        if config.dspark is None:
            raise ValueError("the checkpoint has no DSpark draft (no dspark_* keys in config.json)")
        return config.dspark.target_layer_ids

    @classmethod
    def max_gamma(cls, config: ModelConfig) -> int:
        """See :meth:`.base.Drafter.max_gamma`: the block it was trained with."""
        return config.dspark.block_size

    @classmethod
    def has_confidence(cls, config: ModelConfig) -> bool:
        """See :meth:`.base.Drafter.has_confidence`."""
        return config.dspark.enable_confidence_head

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        source: ParamSource,
        target: DeepseekV4,
        groups: Groups,
        kernels: Kernels,
        room: DraftRoom,
        gamma: int | None,
    ) -> DSparkDrafter:
        """See :meth:`.base.Drafter.load`."""
        length = cls.block_length(config, gamma)
        return cls(config, config.dspark, source, target, groups, kernels, room, length)

    def observe(self, taps: torch.Tensor, step: Step) -> None:
        """See :meth:`.base.Drafter.observe`."""
        taps, plan = step.plan.gather(taps), step.plan
        if not is_plain(step):
            self.settle()
            self._take_in(taps, plan)
            return
        if len(taps):
            self._pending.append((taps, plan.host.keys))
        self._num_pending += len(taps)
        if self._num_pending > MAX_PENDING:
            self.settle()

    def settle(self) -> None:
        """See :meth:`.base.Drafter.settle`."""
        if not self._pending:
            return
        all_taps, all_keys = zip(*self._pending)
        taps, keys = torch.cat(all_taps), np.concatenate(all_keys, axis=1)
        self._pending.clear()
        self._num_pending = 0
        last = np.zeros(self._cache.page_table.shape[0], np.int64)
        np.maximum.at(last, keys[1], keys[0])
        seen = np.flatnonzero(keys[0] > last[keys[1]] - self._window)
        self._take_in(taps[torch.from_numpy(seen)], build_plan(keys[:, seen], self._cache.page_table, ()))

    def _take_in(self, taps: torch.Tensor, plan: AttentionPlan) -> None:
        """Keep the context of ``taps`` [K, ...] of the key rows of ``plan``."""
        if self._inject is not None:
            self._inject(taps, plan.host.keys)
            return
        context, plan = self._main_norm(self._main_proj(taps)), plan.of_keys()
        for project, key, cache in zip(self._context, self._keys, self._cache.layers):
            self._store(key(project(context), plan), None, cache, plan)

    def propose(self, requests: DraftRequests, noise: DraftNoise | None) -> HostDraftBlock | None:
        """See :meth:`.base.Drafter.propose`."""
        self.settle()
        if self._block is not None:
            hidden, base_logits = self._block_at_once(requests)
        else:
            hidden, base_logits = self.forward(requests)
        if noise is None:
            return None
        anchors = np.array(requests.anchors)
        if self._draw is not None:
            return self._draw_on_device(hidden, base_logits, anchors, noise)
        if self._block is None:
            hidden, base_logits = (x.float().cpu().numpy() for x in (hidden, base_logits))
        return self.heads.draw_block(base_logits, hidden, anchors, *noise)

    def _draw_on_device(
        self, hidden: torch.Tensor, base_logits: torch.Tensor, anchors: np.ndarray, noise: DraftNoise
    ) -> HostDraftBlock:
        """Only tokens, and states for the confidences, travel to the host; laws stay."""
        greedy, sample = self._draw
        if noise.temperatures is None:
            tokens, probs = greedy(base_logits, *to_device([anchors], base_logits.device)), None
        else:
            tokens, probs = sample(base_logits, *to_device([anchors, *noise], base_logits.device))
        tokens = tokens.cpu().numpy()
        return HostDraftBlock(tokens, probs, self.heads.confidence(hidden.float().cpu().numpy(), anchors, tokens))

    def _block_at_once(self, requests: DraftRequests) -> tuple[np.ndarray, np.ndarray]:
        """As :meth:`forward`, on the host."""
        hidden, logits = self._block(np.array((requests.starts, requests.slots, requests.anchors), np.int64))
        skipped = self._width - self.gamma
        return (hidden[:, skipped:], logits[:, skipped:]) if skipped else (hidden, logits)

    @torch.inference_mode()
    def forward(self, requests: DraftRequests) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's states before the final norm [R, γ, D] and its base logits [R, γ, V], row k for draft k + 1."""
        if self._block is not None:
            hidden, logits = map(torch.from_numpy, self._block_at_once(requests))
            return hidden, logits
        num_requests, width, skipped = len(requests.slots), self._width, self._width - self.gamma
        rows = np.empty((5, num_requests, width), np.int64)
        starts, slots = np.array((requests.starts, requests.slots), np.int64)[:, :, None]
        rows[0], rows[1], rows[2], rows[3] = starts + np.arange(width), slots, starts, starts + width
        rows[4] = np.arange(num_requests * width).reshape(num_requests, width)
        ids = np.full((num_requests, width), self._draft.noise_token_id, np.int64)
        ids[:, 0] = requests.anchors
        plan = build_plan(rows.reshape(5, -1), self._cache.page_table, (), bidirectional=True)
        (tokens,) = to_device([ids.ravel()], self._cache.page_table.device)
        counts = tuple(count * width for count in requests.others)
        exchange = Exchange(self._groups, self._dispatcher, StepRows(counts, has_prefill=False))
        streams = spread(exchange.own(self._target.embed(tokens)), self._num_streams)
        for block, cache in zip(self._blocks, self._cache.layers):
            streams = drain(block.stages(streams, exchange.own(tokens), cache, plan, exchange, ignore))
        hidden = exchange.for_attention(self._hyper_head(streams)).unflatten(0, ids.shape)[:, skipped:]
        logits = self._target.head(self._norm(hidden.flatten(0, 1)))
        return hidden, logits.unflatten(0, (num_requests, self.gamma))
