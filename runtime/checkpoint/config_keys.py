"""Typed, counted access to the keys of a ``config.json``: a key that nobody asked for is an error."""

from __future__ import annotations

import math
from typing import Any, TypeVar

T = TypeVar("T")

# Other names of a key: those of DeepSeek's own inference/config.json and of HuggingFace's attribute map.
ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("dim",),
    "num_hidden_layers": ("n_layers",),
    "num_attention_heads": ("n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "attention_bias": ("qkv_bias",),
    "qk_rope_head_dim": ("rope_head_dim",),
    "n_routed_experts": ("num_local_experts",),
    "num_experts_per_tok": ("n_activated_experts",),
    "moe_intermediate_size": ("moe_inter_dim",),
    "scoring_func": ("score_func",),
    "routed_scaling_factor": ("route_scale",),
    "sliding_window": ("window_size",),
    "rms_norm_eps": ("norm_eps",),
    "num_hash_layers": ("n_hash_layers",),
    "num_nextn_predict_layers": ("n_mtp_layers",),
    "dtype": ("torch_dtype",),
    "dspark_num_experts_per_tok": ("dspark_n_activated_experts",),
}

# Keys that do not change what inference computes: bookkeeping, training, generation habits of other libraries, and
# group-limited routing, which the architecture does not have.
NOT_FOR_INFERENCE = frozenset(
    {
        "_from_model_config",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "aux_loss_alpha",
        "ep_size",
        "initializer_range",
        "max_batch_size",
        "n_group",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pretraining_tp",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "seq_aux",
        "topk_group",
        "transformers_version",
        "use_cache",
    }
)


class ConfigKeys:
    """The keys of one JSON object; every ``take_*`` marks its key as read and checks its type.

    ``where`` names the object in errors. A key may come under any of its :data:`ALIASES`; when several are there they
    must agree. ``required`` getters raise ``ValueError`` naming an absent key; others return ``None``.
    """

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values, self._where = values, where
        self._read: set[str] = set()

    def error(self, message: str) -> ValueError:
        """A ``ValueError`` that says where."""
        return ValueError(f"{self._where}: {message}")

    def __contains__(self, key: str) -> bool:
        return any(name in self._values for name in (key, *ALIASES.get(key, ())))

    def spelled(self, key: str) -> str:
        """The spelling of ``key`` that the object uses (or ``key`` itself)."""
        return next((name for name in (key, *ALIASES.get(key, ())) if name in self._values), key)

    @property
    def is_inference_dialect(self) -> bool:
        """Whether the object uses the names of ``inference/config.json``."""
        return self.spelled("hidden_size") == "dim"

    def starting_with(self, prefix: str) -> list[str]:
        """The keys that start with ``prefix``."""
        return sorted(key for key in self._values if key.startswith(prefix))

    def take(self, key: str) -> Any:
        """The value of ``key`` as it stands, ``None`` when it is absent or null."""
        found = [name for name in (key, *ALIASES.get(key, ())) if name in self._values]
        self._read.update(found)
        for name in found[1:]:
            if self._values[name] != self._values[found[0]]:
                first, second = self._values[found[0]], self._values[name]
                raise self.error(f"{found[0]} is {first!r} but {name} is {second!r}")
        return self._values[found[0]] if found else None

    def _typed(self, key: str, value: Any, types: tuple[type, ...], name: str) -> Any:
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise self.error(f"{self.spelled(key)} must be {name}, got {value!r:.80}")
        return value

    def optional_int(self, key: str) -> int | None:
        """An integer (never a bool or a fraction), or ``None``."""
        value = self.take(key)
        return None if value is None else self._typed(key, value, (int,), "an integer")

    def optional_float(self, key: str) -> float | None:
        """A finite number, or ``None``."""
        value = self.take(key)
        if value is None:
            return None
        number = self._typed(key, value, (int, float), "a number")
        if isinstance(number, int) and abs(number) > 2**63:
            raise self.error(f"{self.spelled(key)} is {number}, beyond the numbers that are accepted")
        if not math.isfinite(number):
            raise self.error(f"{self.spelled(key)} is {number}, not a finite number")
        return float(number)

    def optional_bool(self, key: str) -> bool | None:
        """``true`` or ``false``, or ``None``."""
        value = self.take(key)
        return None if value is None else self._typed(key, value, (bool,), "true or false")

    def optional_str(self, key: str) -> str | None:
        """A string, or ``None``."""
        value = self.take(key)
        return None if value is None else self._typed(key, value, (str,), "a string")

    def optional_dict(self, key: str) -> ConfigKeys | None:
        """The object under ``key``, or ``None``."""
        value = self.take(key)
        if value is None:
            return None
        return ConfigKeys(self._typed(key, value, (dict,), "an object"), f"{self._where}: {self.spelled(key)}")

    def optional_list(self, key: str, item_type: type[T], limit: int) -> list[T] | None:
        """A list of at most ``limit`` values of one type, or ``None``."""
        value = self.take(key)
        if value is None:
            return None
        items = self._typed(key, value, (list,), "a list")
        if len(items) > limit:
            raise self.error(f"{self.spelled(key)} has {len(items)} entries, more than the limit of {limit}")
        for index, item in enumerate(items):
            self._typed(f"{self.spelled(key)}[{index}]", item, (item_type,), f"of type {item_type.__name__}")
        return items

    def _present(self, key: str, value: T | None) -> T:
        if value is None:
            raise self.error(f"{key} is missing; it is never guessed, because libraries disagree about its default")
        return value

    def required_int(self, key: str) -> int:
        """An integer; an absent key is an error."""
        return self._present(key, self.optional_int(key))

    def required_float(self, key: str) -> float:
        """A finite number; an absent key is an error."""
        return self._present(key, self.optional_float(key))

    def required_str(self, key: str) -> str:
        """A string; an absent key is an error."""
        return self._present(key, self.optional_str(key))

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuse any value of ``key`` but the ``allowed`` ones (absent and null count as allowed)."""
        value = self.take(key)
        if value is not None and not any(value == a and isinstance(value, type(a)) for a in allowed):
            choices = " or ".join(repr(a) for a in allowed)
            raise self.error(f"{self.spelled(key)} is {value!r:.80}, but only {choices} is supported")

    def finish(self, ignored: frozenset[str] = frozenset()) -> None:
        """Raise ``ValueError`` naming the keys that were neither read nor ``ignored``."""
        unknown = sorted(set(self._values) - self._read - ignored)
        if unknown:
            shown = ", ".join(repr(key)[:60] for key in unknown[:5])
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            raise self.error(f"unknown key {shown}{more}; nothing is ignored silently")
