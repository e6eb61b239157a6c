"""A job that all its ranks have joined and agreed on, before the model is loaded."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..parallel.groups import Group, Groups
from ..parallel.launch import Limits, Process, detect, init
from ..parallel.topology import Topology
from .checkpoint import bundled_model, inspect_checkpoint
from .checkpoint.placement import check_layout
from .digest import files_digest
from .draft import OWN_PREDICTION, own_draft
from .engine_config import EngineConfig, resolve
from .load_plan import plan_load
from .model_config import Config, load_model_config
from .ranks_table import ranks_table
from .tokenizer import Tokenizer

log = logging.getLogger(__name__)

MakeTopology = Callable[[int, "Sequence[int] | None"], Topology]
"""``(world, nodes) -> Topology``: the layout the user asked for, on the ranks there are."""

# Of each shard, so many pieces of 64 KiB are compared between ranks.
NUM_SAMPLES = 16
# Files whose place may differ from host to host, but not their content.
FILE_OPTIONS = ("model", "draft_model", "sps_table", "sts", "init_expert_location", "init_draft_expert_location")


@dataclass(frozen=True)
class Job:
    """This rank's part of a job. ``config`` is resolved; ``tokenizer`` is None where the checkpoint has none."""

    process: Process
    groups: Groups
    config: EngineConfig
    model_config: Config
    tokenizer: Tokenizer | None

    @classmethod
    def join(cls, config: EngineConfig, make_topology: MakeTopology, limits: Limits = Limits()) -> Job:  # noqa: B008
        """Meet the ranks that the launcher started and agree with them. Collective over all of them.

        Raises ``ValueError`` for options, layouts and checkpoints that cannot be used or differ between ranks: the same
        on every rank, and before any process group is made.
        """
        info = detect()
        plan = _Plan(config, make_topology, info.world)
        process = init(info, config.device, limits, plan.describe)
        try:
            groups = Groups.build(make_topology(process.world, process.nodes), process.rank, journal=process.journal)
            if process.rank == 0 and process.world > 1:
                log.info("%s", ranks_table(groups.topology, process.present))
            folder, model = plan.folder, plan.model
            tokenizer = Tokenizer.load(folder, model.bos_token_id) if (folder / "tokenizer.json").is_file() else None
        except BaseException as error:
            process.close(error)
            raise
        return cls(process, groups, plan.config, model, tokenizer)

    @property
    def is_first(self) -> bool:
        """Whether this rank reads inputs, decides and prints."""
        return self.process.rank == 0

    @property
    def world(self) -> Group:
        """All ranks of the job."""
        return self.groups.world

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.process.device

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.model_config.vocab_size

    @property
    def max_context(self) -> int:
        """Tokens of prompt and continuation together."""
        return self.config.max_context

    def encode(self, text: str) -> tuple[int, ...]:
        """Prompt ids of a text; ``ValueError`` where the checkpoint has no tokenizer."""
        if self.tokenizer is None:
            raise ValueError(f"{self.config.model} has no tokenizer.json: give token_ids instead of a prompt")
        return self.tokenizer.encode(text)

    def listen_for_signals(self) -> None:
        """Have SIGINT and SIGTERM to any rank stop all of them. For command lines: it changes the process's signals."""
        if self.process.monitor is not None:
            self.process.monitor.listen_for_signals()

    def close(self, error: BaseException | None = None) -> None:
        """Leave the job; with an ``error`` that only this rank knows of, the job ends for all."""
        self.process.close(error)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(error)


class _Plan:
    """What a rank is about to run, found out without a look at other ranks and without reading weights."""

    def __init__(self, config: EngineConfig, make_topology: MakeTopology, world: int) -> None:
        self._given, self._make_topology, self._world = config, make_topology, world

    def _own_draft(self, given: EngineConfig) -> str:
        """What ``--draft auto`` means. Libraries that leave prediction layers out of the files still announce them."""
        name = own_draft(self.model, given.draft_model)
        if given.draft != "auto" or name not in OWN_PREDICTION.values():
            return name
        return name if inspect_checkpoint(self.folder, self.model).has_draft else "none"

    def describe(self, device: torch.device) -> Mapping[str, str]:
        """Everything that must be equal on all ranks; raises ``ValueError`` or ``OSError`` for what cannot be run."""
        given = self._given.validate()
        topology = self._make_topology(self._world, None)
        self.folder = pathlib.Path(given.model) if given.model else bundled_model()
        self.model = load_model_config(self.folder)
        redundant = (given.num_redundant_experts, given.num_redundant_draft_experts)
        check_layout(self.model, topology, given.all_to_all, given.draft != "none", redundant)
        self.config = resolve(
            given,
            model_dir=str(self.folder),
            device_type=device.type,
            max_positions=self.model.max_position_embeddings,
            own_draft=self._own_draft(given),
        )
        plan_load(self.config, self.model, topology, device)
        if self._world == 1:
            return {}
        options = {name: value for name, value in dataclasses.asdict(self.config).items() if name not in FILE_OPTIONS}
        fields = {"the version": code_version(), "torch": torch.__version__}
        fields |= {f"--{name.replace('_', '-')}": str(value) for name, value in options.items()}
        fields |= {f"the layout's {name}": str(size) for name, size in topology.sizes.items()}
        patterns = ("config.json", "tokenizer.json", "*.safetensors")
        files = [path for pattern in patterns for path in sorted(self.folder.glob(pattern))]
        fields["the checkpoint's digest"] = files_digest(files, num_samples=NUM_SAMPLES)
        for name in FILE_OPTIONS[1:]:
            path = getattr(self.config, name)
            fields[f"the content of --{name.replace('_', '-')}"] = "none" if path is None else files_digest([path])
        return fields


def code_version() -> str:
    """The package's version and a digest of its source, which also differs between stages of one version."""
    root = pathlib.Path(__file__).parent.parent
    folders = ("parallel", "comm", "layers", "eplb", "runtime")
    files = sorted(path for name in folders for path in (root / name).rglob("*.py"))
    return f"{importlib.metadata.version('dspark')} (source {files_digest(files)[:12]})"
