"""A loaded engine on every rank of this job: what ``generate``, ``score`` and :class:`LLM` start with."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..parallel.groups import Group, Groups
from ..parallel.launch import Process, detect, init
from ..parallel.topology import Topology
from .checkpoint import bundled_model
from .checkpoint.placement import check_layout
from .detokenize import TextTracker
from .draft import own_draft
from .drive import drive
from .engine import Engine
from .engine_config import EngineConfig, check_supported, resolve
from .load import load_engine
from .model_config import load_model_config
from .progress import ProgressFactory, silent
from .request import Request, SamplingParams
from .share import all_or_none
from .tokenizer import Tokenizer

log = logging.getLogger(__name__)

MakeTopology = Callable[[int, "Sequence[int] | None"], Topology]
"""``(world, nodes) -> Topology``: the layout the user asked for, on the ranks there are."""


@dataclass(frozen=True)
class Session:
    """This rank's part of a job. ``text`` is ``None`` on all ranks but the first, which decides and prints."""

    process: Process
    groups: Groups
    config: EngineConfig
    engine: Engine
    tokenizer: Tokenizer | None
    text: TextTracker | None

    @classmethod
    def open(cls, config: EngineConfig, make_topology: MakeTopology, progress: ProgressFactory = silent) -> Session:
        """Join the job and load the model. Collective over all ranks that the launcher started.

        Raises ``ValueError`` for options, layouts and checkpoints that cannot be used: the same on every rank, and for
        options and layouts before any process group is made.
        """
        config.validate()
        info = detect()
        topology = make_topology(info.world, None)
        check_supported(config, topology)
        check_layout(load_model_config(_folder(config)), topology)
        process = init(info, config.device)
        try:
            groups = Groups.build(make_topology(process.world, process.nodes), process.rank)
            return all_or_none(lambda: cls._load(config, process, groups, progress), groups.world)
        except BaseException:
            process.close()
            raise

    @classmethod
    def _load(cls, config: EngineConfig, process: Process, groups: Groups, progress: ProgressFactory) -> Session:
        folder = _folder(config)
        model = load_model_config(folder)
        config = resolve(
            config,
            model_dir=str(folder),
            device_type=process.device.type,
            max_positions=model.max_position_embeddings,
            own_draft=own_draft(model),
        )
        is_first = process.rank == 0
        tokenizer = Tokenizer.load(folder, model.bos_token_id) if (folder / "tokenizer.json").is_file() else None
        text = TextTracker(tokenizer) if is_first else None
        # A rank reads about its share of the files; what all ranks need comes on top.
        num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors")) // groups.tp.size
        bar = (progress if is_first else silent)("reading weights", num_bytes, "B")
        try:
            engine = load_engine(config, groups, process.device, model_config=model, text=text, progress=bar.update)
        finally:
            bar.close()
        if is_first:
            log.info(
                "%s on %d x %s, %s, context %d, chunks of %d tokens, %d requests at a time",
                folder.name,
                process.world,
                process.device.type,
                config.dtype,
                config.max_context,
                config.chunk_size,
                config.max_running,
            )
        return cls(process, groups, config, engine, tokenizer, text)

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
        return self.engine.model.config.vocab_size

    @property
    def max_context(self) -> int:
        """Tokens of prompt and continuation together."""
        return self.config.max_context

    def encode(self, text: str) -> tuple[int, ...]:
        """Prompt ids of a text; ``ValueError`` where the checkpoint has no tokenizer."""
        if self.tokenizer is None:
            raise ValueError(f"{self.config.model} has no tokenizer.json: give token_ids instead of a prompt")
        return self.tokenizer.encode(text)

    def warm_up(self) -> None:
        """Run a few tokens, so that kernels are compiled before anything is timed. Collective over the job.

        Their request has the one id that no user's can have.
        """
        num_prompt = min(8, self.max_context - 1)
        request = Request("", (0,) * num_prompt, SamplingParams(max_new_tokens=3, ignore_eos=True))
        if self.text is not None:
            self.text.add(request.request_id, request.params)
        for _ in drive(self.engine, [request], self.text):
            pass

    def close(self) -> None:
        """Leave the job."""
        self.process.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _folder(config: EngineConfig) -> pathlib.Path:
    """The checkpoint that ``config`` asks for."""
    return pathlib.Path(config.model) if config.model else bundled_model()
