"""The baseline: the same checkpoint in transformers, with its own greedy ``generate`` and its own cache.

transformers is an optional package (the ``dev`` extra) and is imported only here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import ModuleType

import torch

from .systems import Decoded
from .timing import waiter


def import_transformers(benchmark: str) -> ModuleType:
    """transformers, told to be quiet; ``ValueError`` saying how to get it if it is missing."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"bench {benchmark} compares with transformers, which is not installed here: pip install 'dspark[dev]' "
            "(from a checkout: pip install -e '.[dev]')"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


class TransformersSystem:
    """``AutoModelForCausalLM.generate`` with the settings it comes with. Prompts of a batch need one length: padding
    on the left is not supported by its cache of this model family."""

    def __init__(self, transformers: ModuleType, folder: str, dtype: torch.dtype, device: torch.device) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True
        ).to(device)
        # Without an end of sequence, as the measured runs ignore it; any pad id, since nothing is padded.
        self._model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
        self._device, self._wait = device, waiter(device)
        self.about = f"transformers {transformers.__version__}, its own generate with its own cache, default settings"

    def decode(self, prompts: Sequence[Sequence[int]], num_new: int) -> Decoded:
        """See :class:`.systems.System`."""
        ids = torch.tensor(prompts, dtype=torch.int64, device=self._device)
        stamps: list[float] = []

        def stamp(input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            """A stopping criterion that never stops; it is asked after every new token."""
            self._wait()
            stamps.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

        start = time.perf_counter()
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, stopping_criteria=[stamp]
        )
        new = out[:, ids.shape[1] :].tolist()
        assert len(stamps) == num_new, f"{len(stamps)} steps for {num_new} new tokens"
        return Decoded(new, start, stamps, [len(prompts)] * num_new, [len(prompts)] * num_new)
