"""A loaded engine on every rank of a job: what ``generate``, ``score`` and :class:`LLM` work with."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
from dataclasses import dataclass

from ..parallel.launch import Limits
from .balance import ExpertLinks, expert_links
from .detokenize import TextTracker
from .drive import drive
from .engine import Engine
from .engine_config import EngineConfig
from .inputs import check_output
from .job import Job, MakeTopology
from .load import load_engine
from .progress import ProgressFactory, silent
from .request import Request, SamplingParams
from .share import all_or_none

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Session(Job):
    """A job with its model. ``text`` is ``None`` on all ranks but the first, which decides and prints."""

    engine: Engine
    text: TextTracker | None

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        make_topology: MakeTopology,
        progress: ProgressFactory = silent,
        limits: Limits = Limits(),  # noqa: B008
    ) -> Session:
        """Join the job and load the model; see :meth:`Job.join` and :meth:`load`."""
        job = Job.join(config, make_topology, limits)
        try:
            return cls.load(job, progress)
        except BaseException as error:
            job.close(error)
            raise

    @classmethod
    def load(cls, job: Job, progress: ProgressFactory = silent) -> Session:
        """Read the checkpoint; collective over the job, which the caller closes.

        Raises ``ValueError`` naming what is wrong with the checkpoint, the same on every rank.
        """
        job.process.journal.begin("reading weights")
        links = expert_links(job.config, job.groups)
        session = all_or_none(lambda: cls._load(job, links, progress), job.world)
        job.process.journal.begin("ready")
        return session

    @classmethod
    def _load(cls, job: Job, links: ExpertLinks, progress: ProgressFactory) -> Session:
        config, process = job.config, job.process
        if job.is_first:
            records = {"--eplb-record": config.eplb_record, "--eplb-draft-record": config.eplb_draft_record}
            for option, path in records.items():
                if path is not None:
                    check_output(option, path, ())
        folder = pathlib.Path(config.model)
        text = TextTracker(job.tokenizer) if job.is_first else None
        # A rank reads about its share of the files; what all ranks need comes on top.
        num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors")) // job.groups.tp.size
        bar = (progress if job.is_first else silent)("reading weights", num_bytes, "B")
        try:
            options = {"model_config": job.model_config, "text": text, "progress": bar.update, "links": links}
            engine = load_engine(config, job.groups, process.device, **options)
        finally:
            bar.close()
        if job.is_first:
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
        parts = {field.name: getattr(job, field.name) for field in dataclasses.fields(Job)}
        return cls(**parts, engine=engine, text=text)

    def close(self, error: BaseException | None = None) -> None:
        """See :meth:`Job.close`."""
        self.engine.close()
        super().close(error)

    def warm_up(self) -> None:
        """Run a few tokens, so that kernels are compiled before anything is timed. Collective over the job.

        Their request has the one id that no user's can have.
        """
        num_prompt = min(8, self.max_context - 1)
        request = Request("", (0,) * num_prompt, SamplingParams(max_new_tokens=3, ignore_eos=True))
        if self.text is not None:
            self.text.add(request.request_id, request.params)
        keeper = self.engine.keeper
        counts = contextlib.nullcontext() if keeper is None else keeper.paused()
        with self.process.journal.warm_up(), counts:
            for _ in drive(self.engine, [request], self.text):
                pass
        self.engine.take_counts()
