"""The training loop of a draft: data-parallel, resumable, and a function of (weights, seed, step) alone.

Each step draws its batch by counter, so a run that is stopped and resumed does what it would have done. Ranks take
their shares of the same batch; the losses are sums over a sum of weights, so their gradients add up.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...comm.collectives import all_reduce
from ...eplb.files.safe import replacing
from ...parallel.groups import Group
from .batches import Batch, build_batch, counter_seed, draw_sequences
from .hidden_cache import HiddenData
from .losses import EPSILON

STATE_NAME, LOG_NAME = "train_state.safetensors", "log.jsonl"


class StepSums(NamedTuple):
    """Sums over this rank's share of a batch.

    ``loss`` / ``weight`` over all ranks is the training loss. ``terms``: sums to be reported, divided by the same
    weight. ``load`` [S, E]: rows by expert of each stage, or ``None``.
    """

    loss: Tensor
    weight: Tensor
    terms: dict[str, Tensor]
    load: Tensor | None


class TrainableDraft(Protocol):
    """A draft on float32 ``weights`` by their checkpoint names, which the trainer updates in place."""

    weights: dict[str, Tensor]

    def sums(self, batch: Batch) -> StepSums:
        """The loss on a batch, differentiable in the weights."""
        ...


@dataclass(frozen=True)
class TrainOptions:
    """Settings of a run. ``tokens`` and ``anchors`` count a whole step over all ranks; ``lr_floor`` is the share of
    ``lr`` that the cosine ends at; ``balance_rate`` moves a router's bias, until the last tenth of the run."""

    steps: int
    gamma: int
    seed: int = 0
    tokens: int = 2048
    anchors: int = 256
    lr: float = 2e-3
    lr_floor: float = 0.02
    warmup: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.98)
    balance_rate: float = 1e-3
    save_every: int = 200
    log_every: int = 10
    eval_every: int = 0
    autocast: bool = False

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine to the floor; ``step`` counts from 0."""
        warm = min(1.0, (step + 1) / max(self.warmup, 1))
        progress = min(max(step - self.warmup, 0) / max(self.steps - self.warmup, 1), 1.0)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.lr * warm * (self.lr_floor + (1.0 - self.lr_floor) * cosine)


class Trainer:
    """Trains ``draft`` on the training sequences of ``data``; files go to ``folder`` from the group's first rank."""

    def __init__(
        self,
        draft: TrainableDraft,
        data: HiddenData,
        options: TrainOptions,
        group: Group,
        device: torch.device,
        folder: pathlib.Path,
        identity: str,
    ) -> None:
        self.draft, self.options, self.group, self.device = draft, options, group, device
        self._data, self._lengths = data, data.starts.diff()
        self._folder, self._identity = folder, identity
        self.step = 0
        self._trained = {name: w for name, w in draft.weights.items() if w.requires_grad}
        matrices = [w for w in self._trained.values() if w.dim() > 1]
        others = [w for w in self._trained.values() if w.dim() <= 1]
        decay = {"weight_decay": options.weight_decay}
        groups = [{"params": matrices, **decay}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, foreach=True)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files."""
        return self.group.rank == 0

    def run(
        self,
        on_step: Callable[[int], None] = lambda step: None,
        evaluate: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """Train from the current step to the last. Collective. ``evaluate`` is called on every rank when it is due."""
        options, began, first = self.options, time.monotonic(), self.step
        recent: list[Tensor] = []
        while self.step < options.steps:
            names, values = self._one_step()
            recent.append(values)
            self.step += 1
            if self.step % options.log_every == 0 or self.step == options.steps:
                means = torch.stack(recent).mean(0).tolist()
                recent = []
                rate = (self.step - first) / (time.monotonic() - began)
                self._log(dict(zip(names, means)) | {"lr": options.learning_rate(self.step - 1), "steps_per_s": rate})
            if options.eval_every and evaluate is not None:
                if self.step % options.eval_every == 0 or self.step == options.steps:
                    self._log({"eval": evaluate()})
            if self.step % options.save_every == 0 or self.step == options.steps:
                self.save()
            on_step(self.step)

    def _one_step(self) -> tuple[list[str], Tensor]:
        """One update. Collective. Names of the loss terms and their values over the whole batch."""
        options = self.options
        batch = self._batch(self.step).to(self.device)
        for weight in self._trained.values():
            weight.grad = None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=options.autocast):
            sums = self.draft.sums(batch)
        report = torch.stack([sums.weight, sums.loss, *sums.terms.values()]).detach()
        report = all_reduce(report.clone(), self.group)
        total = report[0] + EPSILON
        (sums.loss / total).backward()
        grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in self._trained.values()]
        flat = all_reduce(torch.cat([grad.flatten() for grad in grads]), self.group)
        norm = flat.norm()
        flat *= (options.clip / (norm + 1e-6)).clamp(max=1.0)
        for weight, grad in zip(self._trained.values(), flat.split([w.numel() for w in self._trained.values()])):
            weight.grad = grad.view_as(weight)
        for group in self._optimizer.param_groups:
            group["lr"] = options.learning_rate(self.step)
        self._optimizer.step()
        if sums.load is not None and self.step < 0.9 * options.steps:
            self._balance(all_reduce(sums.load.float(), self.group))
        values = torch.cat([report[1:] / total, norm.unsqueeze(0)])
        return ["loss", *sums.terms, "grad_norm"], values

    def _batch(self, step: int) -> Batch:
        options = self.options
        sequences = draw_sequences(self._lengths, options.tokens, options.seed, step)
        seed = counter_seed(options.seed, step, 1)
        return build_batch(
            self._data, sequences, options.anchors, options.gamma, seed, self.group.rank, self.group.size
        )

    @torch.no_grad()
    def _balance(self, load: Tensor) -> None:
        """Move each router's bias against its load [S, E]."""
        for stage, counts in enumerate(load):
            bias = self.draft.weights[f"mtp.{stage}.ffn.gate.bias"]
            bias += self.options.balance_rate * torch.sign(counts.mean() - counts)

    def _log(self, values: dict[str, Any]) -> None:
        if self.is_first:
            with (self._folder / LOG_NAME).open("a") as stream:
                stream.write(json.dumps({"step": self.step, **values}) + "\n")

    def save(self) -> None:
        """Write weights, optimizer state and step, all or nothing."""
        if not self.is_first:
            return
        tensors = {f"weights.{name}": weight.detach() for name, weight in self.draft.weights.items()}
        for name, weight in self._trained.items():
            for key, value in self._optimizer.state.get(weight, {}).items():
                tensors[f"{key}.{name}"] = value
        path = self._folder / STATE_NAME
        partial = path.with_suffix(".partial")
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(tensors, partial, {"step": str(self.step), "identity": self._identity})
        os.replace(partial, path)

    def resume(self) -> bool:
        """Continue from a saved state of the same run, if there is one. All ranks read the same file.

        Raises ``ValueError`` when the folder holds the state of another run.
        """
        path = self._folder / STATE_NAME
        if not path.is_file():
            return False
        with safe_open(path, "pt") as stream:
            metadata = stream.metadata()
            if metadata["identity"] != self._identity:
                raise ValueError(f"{path} is the state of another run; choose another --output or remove it")
            with torch.no_grad():
                for name, weight in self.draft.weights.items():
                    weight.copy_(stream.get_tensor(f"weights.{name}"))
            names = set(stream.keys())
            for name, weight in self._trained.items():
                keys = ("step", "exp_avg", "exp_avg_sq")
                if f"step.{name}" in names:
                    state = {key: stream.get_tensor(f"{key}.{name}") for key in keys}
                    self._optimizer.state[weight] = {
                        key: value if key == "step" else value.to(self.device) for key, value in state.items()
                    }
        self.step = int(metadata["step"])
        self._forget_later_lines()
        return True

    def _forget_later_lines(self) -> None:
        """Drop what the log says about steps that will be taken again."""
        path = self._folder / LOG_NAME
        if self.is_first and path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.step]
            with replacing(path) as part:
                part.write_text("".join(kept), encoding="utf-8")


def run_identity(options: TrainOptions, *facts: object) -> str:
    """What must not change between a run and its continuation, as text: all but how long it is and how often it
    reports."""
    free = {"steps", "save_every", "log_every", "eval_every"}
    fixed = {name: value for name, value in asdict(options).items() if name not in free}
    return json.dumps([fixed, *facts], sort_keys=True)
