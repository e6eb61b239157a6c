"""One request on its way: its tokens, how many of them the cache holds, and where they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from .request import Request, random_key, stop_ids, token_budget
from .spec.stats import SpecStats

NO_SLOT = -1


@dataclass(eq=False)
class RequestState:
    """The state of one request, the same on every rank.

    ``tokens``: prompt and emitted tokens. ``num_cached``: how many of them the cache holds; the cache is rewound by
    setting it. ``budget``: new tokens the request may get. ``slot``: its cache slot while it runs. ``gamma``: drafts a
    block; ``spec`` counts what became of them. ``number``: of the request in its engine; ``home``: its DP rank.
    ``in_flight``: a step is under way that will give it tokens.
    """

    request: Request
    budget: int
    stops: frozenset[int]
    seed: int
    key: int
    tokens: list[int]
    num_cached: int = 0
    slot: int = NO_SLOT
    gamma: int = 0
    number: int = 0
    home: int = 0
    in_flight: bool = False
    num_prompt: int = field(init=False)
    spec: SpecStats = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)
        self.spec = SpecStats(self.gamma)

    @classmethod
    def start(
        cls,
        request: Request,
        max_context: int,
        eos_token_ids: tuple[int, ...],
        seed: int,
        gamma: int,
        number: int,
        home: int,
    ) -> RequestState:
        """The state of a valid ``request`` that has not run yet; ``seed`` is the engine's."""
        own_seed, key = random_key(request, seed)
        return cls(
            request=request,
            budget=token_budget(request, max_context),
            stops=stop_ids(request.params, eos_token_ids),
            seed=own_seed,
            key=key,
            tokens=list(request.prompt_ids),
            gamma=gamma,
            number=number,
            home=home,
        )

    @property
    def num_waiting(self) -> int:
        """Tokens that must still pass the model before the next one can be chosen; at least 1 while running."""
        return len(self.tokens) - self.num_cached

    @property
    def is_prefilling(self) -> bool:
        """Whether it has not got a token yet."""
        return len(self.tokens) == self.num_prompt

    @property
    def num_left(self) -> int:
        """New tokens the request may still get."""
        return self.budget - (len(self.tokens) - self.num_prompt)

    @property
    def worst_case(self) -> int:
        """Tokens the cache may have to hold for this request."""
        return self.num_prompt + self.budget
