"""The Python interface: a loaded model that continues prompts, in one process or on every rank of a job."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..parallel.launch import Limits
from ..parallel.topology import Topology
from .drive import Collector, admit, drive, in_order
from .engine_config import EngineConfig
from .inputs import Inputs, refused_output
from .progress import ProgressFactory, silent
from .request import Request, RequestOutput, SamplingParams, TokenLogprob
from .session import Session
from .share import from_first, share_json, share_requests

Prompts = str | Sequence[str] | Sequence[Sequence[int]]


class LLM:
    """A model ready to generate.

    Args:
        model: checkpoint folder; ``None`` is the bundled small model.
        tp, pp, dp, cp, ep, moe_dp: the layout, as :meth:`dspark.parallel.topology.Topology.make` takes it; by default
            all ranks that the launcher started are one tensor-parallel group.
        progress: shows the reading of weights, e.g. ``dspark.runtime.progress.shown``.
        limits: how long ranks wait for each other, and how soon the job ends when one of them fails.
        options: fields of :class:`EngineConfig` (``max_running``, ``max_context``, ``chunk_size``, ``dtype``, ...).

    Started by torchrun, srun or mpirun, every rank makes the same calls; the first rank's prompts count, and every rank
    gets the same results. Raises ``ValueError`` naming what is wrong with the options, the layout or the checkpoint.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        tp: int | None = None,
        pp: int = 1,
        dp: int = 1,
        cp: int = 1,
        ep: int | None = None,
        moe_dp: int = 1,
        progress: ProgressFactory = silent,
        limits: Limits = Limits(),  # noqa: B008
        **options: Any,
    ) -> None:
        unknown = sorted(set(options) - set(EngineConfig.__dataclass_fields__))
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r}; there are {', '.join(EngineConfig.__dataclass_fields__)}")

        config = EngineConfig(model=model, **options)

        def make_topology(world: int, nodes: Sequence[int] | None) -> Topology:
            sizes = {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "ep": ep, "moe_dp": moe_dp}
            return Topology.make(world, **sizes, all_to_all=config.all_to_all, nodes=nodes)

        self._session = Session.open(config, make_topology, progress, limits)
        try:
            self._session.warm_up()
        except BaseException as error:
            self._session.close(error)
            raise
        self._count = itertools.count()

    @property
    def rank(self) -> int:
        """This process's rank in the job."""
        return self._session.process.rank

    def generate(
        self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue prompts; collective over the job.

        Args:
            prompts: a text, or a list of texts or of lists of token ids.
            params: for all prompts, or one for each; greedy with 64 new tokens by default.

        Returns one result a prompt, in order. A prompt that cannot run (empty, too long, an id outside the vocabulary,
        parameters out of range) has ``finish_reason="error"`` and the reason in ``error``; the others run.
        """
        session = self._session
        inputs = Inputs()

        def prepare() -> None:
            nonlocal inputs
            built = self._requests(prompts, params)
            sizes = (session.vocab_size, session.max_context, session.engine.check_fits)
            inputs = admit(built, session.text, *sizes)

        from_first(prepare, session.world)
        requests = share_requests(inputs.requests, session.world)
        collector = Collector(requests)
        outputs = list(inputs.refused)
        with contextlib.closing(drive(session.engine, requests, session.text)) as events:
            outputs += [output for event in events if (output := collector.push(event)) is not None]
        results = in_order(outputs, inputs.order) if session.is_first else []
        return self._share(results)

    def close(self) -> None:
        """Leave the job; the model must not be used afterwards."""
        self._session.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._session.close(error)

    def _requests(self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None) -> Inputs:
        if prompts is None or isinstance(prompts, (bytes, dict)):
            raise ValueError(f"prompts is a {type(prompts).__name__}; give a text, or a list of texts or of token ids")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        for one in params:
            if not isinstance(one, SamplingParams):
                raise ValueError(f"params holds {one!r}; give SamplingParams, one for all prompts or one for each")
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} sampling parameters for {len(prompts)} prompts; give one, or one for each")
        requests, refused, order = [], [], []
        for prompt, own in zip(prompts, params):
            arrival = next(self._count)
            order.append(str(arrival))
            try:
                ids = self._session.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
            except (ValueError, TypeError) as error:
                refused.append(refused_output(str(arrival), f"prompt {arrival}: {error}"))
            else:
                requests.append(Request(str(arrival), ids, own, arrival))
        return Inputs(tuple(requests), tuple(refused), tuple(order))

    def _share(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """The first rank's results on every rank: text and clocks exist only there."""
        world = self._session.world
        if world.size == 1:
            return outputs
        return [_output_from_json(values) for values in share_json([asdict(output) for output in outputs], world)]


def _output_from_json(values: dict[str, Any]) -> RequestOutput:
    logprobs = tuple(
        TokenLogprob(token, logprob, tuple((index, value) for index, value in top))
        for token, logprob, top in values["logprobs"]
    )
    ids = {name: tuple(values[name]) for name in ("prompt_ids", "token_ids")}
    return RequestOutput(**(values | ids | {"logprobs": logprobs}))
