"""The prompts of benchmarks: cut to one length, joined to any length, read from files."""

import json

import pytest
from dspark.runtime.bench.prompts import Prompts, builtin_prompts, prompts_from_file


def encode(text):
    return tuple(text.encode())


def test_cut_takes_prompts_that_are_long_enough():
    prompts = Prompts(((1, 2, 3), (4,), (5, 6)), "three prompts")
    assert prompts.cut(2, 2) == [[1, 2], [5, 6]]
    with pytest.raises(ValueError, match="3 prompts of 2 tokens, but 2 of the three prompts.*at most 1"):
        prompts.cut(3, 2)
    with pytest.raises(ValueError, match="4 prompts of 1 tokens, but 3 of the three prompts"):
        prompts.cut(4, 1)


def test_joined_repeats_to_any_length():
    prompts = Prompts(((1, 2, 3), (4,)), "two prompts")
    assert prompts.joined(10) == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert prompts.joined(2) == [1, 2]


def test_builtin_prompts_are_long_enough_for_the_usual_batch():
    assert len(builtin_prompts(encode, 256, 32).cut(8, 32)) == 8


def test_without_a_tokenizer_ids_are_random_but_the_same_every_time():
    first, second = (builtin_prompts(None, 50, 20) for _ in range(2))
    assert first == second and "random" in first.about
    assert len(set(first.ids)) == len(first.ids)
    assert all(0 <= token < 50 for ids in first.ids for token in ids)


def test_files(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "ab", "domain": "code"}, {"token_ids": [5, 6, 7]}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert prompts_from_file(path, encode, 256).ids == ((97, 98), (5, 6, 7))
    for bad, words in (
        ({"text": "ab"}, "line 3: neither"),
        ({"token_ids": [256]}, "line 3: a token id"),
        ({"token_ids": [True]}, "line 3: a token id"),
        ({"token_ids": []}, "line 3: the prompt is empty"),
        ([1], "line 3: a JSON object"),
    ):
        path.write_text("\n".join(map(json.dumps, [*lines, bad])))
        with pytest.raises(ValueError, match=words):
            prompts_from_file(path, encode, 256)
    path.write_text('{"prompt": "ab"}\n{')
    with pytest.raises(ValueError, match="line 2"):
        prompts_from_file(path, encode, 256)
    path.write_text("\n")
    with pytest.raises(ValueError, match="no prompts"):
        prompts_from_file(path, encode, 256)
    path.write_text('{"prompt": "ab"}')
    with pytest.raises(ValueError, match="no tokenizer"):
        prompts_from_file(path, None, 256)
