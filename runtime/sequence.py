"""One request on its way: its tokens, how many of them the cache holds, and where they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from .prefix import PrefixNode
from .request import Request, random_key, stop_ids, token_budget
from .spec.stats import SpecStats

NO_SLOT = -1


@dataclass(eq=False)
class RequestState:
    """The state of one request, the same on every rank.

    ``tokens``: prompt and emitted tokens. ``num_cached``: how many of them the cache holds; the cache is rewound by
    setting it. ``budget``: new tokens the request may get. ``slot``: its cache slot while it runs. ``gamma``: drafts a
    block; ``spec`` counts what became of them. ``number``: of the request in its engine; ``home``: its DP rank.
    ``in_flight``: a step is under way that will give it tokens; ``num_flights``: steps under way that hold rows of it.

    ``num_prefill``: how many tokens are prefilled before the next one is chosen: the prompt, and what the request had
    got when it last lost its memory. ``node``: the deepest stored page of its own tokens, and ``num_stored`` how many
    of its pages have been offered to the prefix tree.
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
    num_flights: int = 0
    node: PrefixNode | None = None
    num_stored: int = 0
    num_prompt: int = field(init=False)
    num_prefill: int = field(init=False)
    spec: SpecStats = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = self.num_prefill = len(self.tokens)
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
        """Whether it has not got a token since it last began from an empty cache."""
        return len(self.tokens) == self.num_prefill

    @property
    def num_emitted(self) -> int:
        """New tokens the request has got."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """New tokens the request may still get."""
        return self.budget - self.num_emitted

    @property
    def worst_case(self) -> int:
        """Tokens the cache may have to hold for this request."""
        return self.num_prompt + self.budget

    @property
    def num_next_cached(self) -> int:
        """Tokens the cache must have room for when the request decodes once more, with a whole block of drafts."""
        return self.num_cached + 1 + min(self.gamma, max(self.num_left - 1, 0))

    def lose_memory(self) -> None:
        """Start again from an empty cache, with all tokens got so far as the prompt; none of them is emitted again."""
        assert self.num_flights == 0, "a step under way still writes for this request"
        self.num_prefill, self.num_cached, self.num_stored = len(self.tokens), 0, 0
