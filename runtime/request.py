"""What a user asks for and what comes back: sampling parameters, requests, events and results.

Nothing here touches a tensor. A mistake in one request is a ``ValueError`` about that request; callers turn it
into a result with ``finish_reason="error"`` and go on with the others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "error", "abort"]

MAX_NEW_TOKENS = 1 << 24
MAX_TEMPERATURE = 100.0
MAX_SEED = (1 << 63) - 1
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 64
MAX_LOGPROBS = 64
# Far from where float32 logits overflow, so penalties never leave a row without a law.
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 1024

_DIGITS = re.compile("[0-9]{1,19}")


def _bias_pairs(value: object) -> object:
    """``value`` as pairs sorted by id if it has that form, else itself, for :meth:`SamplingParams.validate` to name.

    JSON writes the ids of a mapping as texts of digits.
    """
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, (list, tuple)) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs):
        return value
    if isinstance(value, Mapping):
        pairs = [(int(t) if isinstance(t, str) and _DIGITS.fullmatch(t) else t, bias) for t, bias in pairs]
    if all(type(token) is int for token, _ in pairs):
        pairs = sorted(pairs, key=lambda pair: pair[0])
    return tuple(tuple(pair) for pair in pairs)


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    ``temperature=0`` is greedy: the highest logit, the lowest id on a tie. Otherwise the law is: logits divided by
    the temperature, the ``top_k`` highest (0: all), of those renormalised the smallest set whose mass reaches
    ``top_p``, of those the ones with at least ``min_p`` times the highest probability.

    ``seed=None`` takes the engine's seed and the request id, so equal prompts differ; with a seed of its own a
    request repeats whatever else runs. ``logprobs=N`` reports each token's log-probability and the N most likely
    alternatives, of the model's own law (before penalties, temperature and filters). ``stop`` strings, one or several,
    are cut from the text.

    Penalties change the logits of every token that is chosen, greedily or not, before anything else does: logits of
    tokens in prompt or output are divided by ``repetition_penalty`` if positive, else multiplied; of each token in the
    output ``frequency_penalty`` is subtracted as often as it is there, and ``presence_penalty`` once; ``logit_bias`` is
    added, of token ids (a mapping, or pairs; kept as pairs sorted by id); before ``min_tokens`` tokens are out, ids
    that would end the request cannot come. Stop strings count from the first token on.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0

    def __post_init__(self) -> None:
        # Lists, and one bare stop string, are what people and JSON write.
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, (list, str)):
                object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Whether no random number is used."""
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """Whether any penalty, bias or minimum length changes the model's logits."""
        changes = (self.presence_penalty, self.frequency_penalty, self.min_tokens, self.logit_bias)
        return self.repetition_penalty != 1.0 or any(changes)

    def validate(self) -> SamplingParams:
        """Return ``self``; raise ``ValueError`` naming the first field out of range, its value and the range."""
        _check_int("max_new_tokens", self.max_new_tokens, 1, MAX_NEW_TOKENS)
        _check_float("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_int("top_k", self.top_k, 0, MAX_SEED)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: true or false")
        self._validate_stops()
        self._validate_penalties()
        return self

    def _validate_stops(self) -> None:
        for name, limit in (("stop", MAX_STOP_STRINGS), ("stop_token_ids", MAX_STOP_IDS)):
            value = getattr(self, name)
            if not isinstance(value, tuple):
                raise ValueError(f"{name} is {value!r}; allowed: a list")
            if len(value) > limit:
                raise ValueError(f"{name} has {len(value)} entries; allowed: at most {limit}")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                shown = text if not isinstance(text, str) or len(text) <= 20 else f"{text[:20]}... ({len(text)} chars)"
                raise ValueError(f"stop has the entry {shown!r}; allowed: strings of 1 to {MAX_STOP_CHARS} characters")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids entry", token, 0, MAX_SEED)

    def _validate_penalties(self) -> None:
        _check_float("repetition_penalty", self.repetition_penalty, MIN_REPETITION, MAX_REPETITION)
        _check_float("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_float("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_int("min_tokens", self.min_tokens, 0, MAX_NEW_TOKENS)
        if self.min_tokens > self.max_new_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; allowed: at most max_new_tokens, {self.max_new_tokens}")
        if not isinstance(self.logit_bias, tuple):
            raise ValueError(f"logit_bias is {str(self.logit_bias)[:40]!r}; allowed: an object of ids and numbers")
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} entries; allowed: at most {MAX_LOGIT_BIASES}")
        for token, value in self.logit_bias:
            _check_int("logit_bias id", token if type(token) is int else str(token)[:40], 0, MAX_SEED)
            _check_float(f"logit_bias of token {token}", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        tokens = [token for token, _ in self.logit_bias]
        if len(set(tokens)) < len(tokens):
            raise ValueError(f"logit_bias names {len(tokens)} ids; allowed: each once, {len(set(tokens))} differ")


SAMPLING_FIELDS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(SamplingParams))


def sampling_from_dict(values: dict[str, Any], base: SamplingParams) -> SamplingParams:
    """``base`` with the named fields replaced by JSON values, validated.

    Raises ``ValueError`` for an unknown name or a value out of range.
    """
    unknown = sorted(set(values) - set(SAMPLING_FIELDS))
    if unknown:
        raise ValueError(f"unknown sampling field {unknown[0]!r}; known: {', '.join(SAMPLING_FIELDS)}")
    return dataclasses.replace(base, **values).validate()


@dataclass(frozen=True)
class Request:
    """One prompt on its way through the engine. ``arrival`` numbers the requests of an engine from 0."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    arrival: int = 0


class TokenLogprob(NamedTuple):
    """Natural log-probability of one emitted token, and of the most likely ones, highest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenEvent:
    """What one step added to one request.

    The engine fills ``token_ids``, ``logprobs`` (one entry a token, or empty when not asked for) and, with the last
    event of a request, ``finish_reason``; the text layer adds ``text``, the characters now certain to be shown.
    ``spec`` comes with the last event of a request that was drafted for: see ``spec.stats.SpecStats.fields``.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    text: str = ""
    spec: dict[str, Any] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The whole of one finished request. Times are seconds; the first counts from the moment it was added."""

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    time_to_first_token: float | None = None
    time_total: float | None = None
    spec: dict[str, Any] | None = None


def validate_request(request: Request, vocab_size: int, max_context: int) -> None:
    """Raise ``ValueError`` naming the request and what is wrong: parameters, an empty or too long prompt, an id.

    ``max_context`` counts prompt and new tokens together, so a prompt must leave room for one token.
    """
    name = f"request {request.request_id!r}"
    try:
        request.params.validate()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    num_prompt = len(request.prompt_ids)
    if num_prompt == 0:
        raise ValueError(f"{name}: the prompt is empty; give at least one token")
    if num_prompt >= max_context:
        raise ValueError(
            f"{name}: the prompt has {num_prompt} tokens, but the context limit is {max_context} for prompt and new "
            f"tokens together; shorten it to {max_context - 1} or raise --max-context"
        )
    check_token_ids(name, request.prompt_ids, vocab_size)
    for what, tokens in (
        ("stop token", request.params.stop_token_ids),
        ("logit_bias", [token for token, _ in request.params.logit_bias]),
    ):
        for token in tokens:
            if token >= vocab_size:
                raise ValueError(f"{name}: the {what} id {token} is outside the vocabulary of {vocab_size}")


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise ``ValueError`` naming the first id that is no integer in ``[0, vocab_size)`` and its position."""
    for position, token in enumerate(token_ids):
        if type(token) is not int:
            raise ValueError(f"{name}: the token id {token!r} at position {position} is not an integer")
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{name}: the token id {token} at position {position} is outside the vocabulary of {vocab_size}"
            )


def token_budget(request: Request, max_context: int) -> int:
    """How many new tokens the request may get: its own limit, or what the context leaves."""
    return min(request.params.max_new_tokens, max_context - len(request.prompt_ids))


def stop_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """The token ids that end this request: its own, and the model's ends of sequence unless ignored."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))


def random_key(request: Request, engine_seed: int) -> tuple[int, int]:
    """``(seed, request key)`` of the request's random streams.

    A seed of the request's own gives key 0, so equal requests repeat; otherwise the key is a hash of the request id,
    so neither the order nor the company of requests matters.
    """
    if request.params.seed is not None:
        return request.params.seed, 0
    digest = hashlib.blake2b(request.request_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return engine_seed, int.from_bytes(digest, "little") | 1


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; allowed: an integer from {low} to {high}")


def _check_float(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    number = type(value) in (int, float)
    if not number or math.isnan(value) or not low <= value <= high or (low_open and value == low):
        raise ValueError(f"{name} is {value!r}; allowed: a number {'above' if low_open else 'from'} {low} to {high}")
