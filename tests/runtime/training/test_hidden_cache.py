"""Target states on disk and in memory."""

import numpy as np
import pytest
import torch
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.digest import files_digest
from dspark.runtime.model_config import load_model_config
from dspark.runtime.training.documents import TokenSequence
from dspark.runtime.training.hidden_cache import find_shards, read_shards, write_shard
from dspark.runtime.training.target import FrozenTarget, TargetStates, cut_prompt


class FakeTarget:
    """States that tell which token of which sequence they belong to."""

    def states(self, sequences):
        for ids in sequences:
            ids = torch.from_numpy(ids).float()
            yield TargetStates(torch.stack((ids, ids * 2), 1), ids.unsqueeze(1) * 3)


def sequences(count, start):
    return [
        TokenSequence(np.arange(start + q, start + 2 * q + 4, dtype=np.int32), 1 + q % 2, f"s{q % 2}", q % 3 == 0)
        for q in range(count)
    ]


def test_shards_come_back_in_order(tmp_path):
    assert find_shards(tmp_path) is None
    progress = []
    for shard, part in enumerate((sequences(3, 10), sequences(5, 50))):
        write_shard(tmp_path, shard, 2, part, FakeTarget(), torch.float16, progress.append)
        assert find_shards(tmp_path) == (2 if shard else None)
    data = read_shards(tmp_path, 2)
    expected = sequences(3, 10) + sequences(5, 50)
    assert sum(progress) == len(data.ids) == sum(len(s.ids) for s in expected)
    assert data.sources == tuple(s.source for s in expected) and data.held_out == tuple(s.held_out for s in expected)
    for q, sequence in enumerate(expected):
        span = slice(int(data.starts[q]), int(data.starts[q + 1]))
        assert data.ids[span].tolist() == sequence.ids.tolist()
        assert data.features[span, 1].tolist() == (2 * sequence.ids).tolist()
        assert data.hidden[span, 0].tolist() == (3 * sequence.ids).tolist()
        assert data.learned()[span].tolist() == [i >= sequence.first_label for i in range(len(sequence.ids))]
    chosen = data.select([6, 1])
    assert chosen.ids.tolist() == [*expected[6].ids, *expected[1].ids] and chosen.starts.tolist()[0] == 0


def test_states_beyond_the_dtype_are_refused(tmp_path):
    big = [TokenSequence(np.array([1, 60000], np.int32), 1, "s", False)]
    with pytest.raises(ValueError, match="--cache-dtype"):
        write_shard(tmp_path, 0, 1, big, FakeTarget(), torch.float16, lambda n: None)
    assert find_shards(tmp_path) is None
    write_shard(tmp_path, 0, 1, big, FakeTarget(), torch.float32, lambda n: None)


def test_digest_sees_bytes_names_and_facts(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(5 << 20))
    base = files_digest([path], {"x": 1})
    assert files_digest([path], {"x": 1}) == base and files_digest([path], {"x": 2}) != base
    with path.open("r+b") as stream:
        stream.seek((5 << 20) - 1)
        stream.write(b"\x01")
    assert files_digest([path], {"x": 1}) != base


def test_states_are_those_of_the_model_and_prompts_continue(shared):
    """Logits from the kept states equal the model's own; greedy continuations are the golden ones."""
    import json

    golden = json.loads((shared / "models" / "golden.json").read_text())
    cases = golden["items"]
    config = load_model_config(bundled_model())
    target = FrozenTarget(bundled_model(), config, (3,), torch.device("cpu"), max_length=640, max_running=4)
    from dspark.runtime.checkpoint import CheckpointReader

    head = CheckpointReader(bundled_model(), config).take("head.weight")
    prompts = [tuple(case["prompt_ids"]) for case in cases[:4]]
    texts = [tuple(case["output_ids"]) for case in cases[:4]]
    joined = [np.array(prompt + text, np.int32) for prompt, text in zip(prompts, texts)]
    for states, prompt, ids in zip(target.states(joined), prompts, joined):
        choices = (states.hidden @ head.T).argmax(-1)
        assert choices[len(prompt) - 1 : -1].tolist() == ids[len(prompt) :].tolist()
        assert states.features.shape == (len(ids), config.hidden_size)
    continued = target.continue_prompts(prompts, range(4), (0.0,), 12)
    for mine, reference in zip(continued, texts):
        assert mine == reference[: len(mine)] and (len(mine) == 12 or mine[-1] == 1)


def test_prompts_end_behind_a_turn_or_early():
    rng = np.random.default_rng(0)
    ids = np.array([0, 4, 9, 9, 5, 8, 8, 4, 9, 5, 8, 1])
    assert {cut_prompt(ids, 5, rng) for _ in range(20)} == {tuple(ids[:5]), tuple(ids[:10])}
    assert all(16 <= len(cut_prompt(np.arange(300), 5000, rng)) <= 64 for _ in range(20))
    assert len(cut_prompt(np.arange(20), None, rng)) == 10
