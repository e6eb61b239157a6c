"""``dspark train-draft`` from text to a checkpoint, in a few steps."""

import argparse
import json

import pytest
from dspark.runtime.checkpoint import CheckpointReader, bundled_model
from dspark.runtime.cli import Parser
from dspark.runtime.model_config import load_model_config
from dspark.runtime.verbs import train_draft

SUMS = "".join(
    f"<|user|>What is {a} + {b}?<|assistant|>The sum is {a} + {b} = {a + b}.\n<|eos|>\n"
    for a in range(3, 23)
    for b in (4, 9)
)
FAST = ["--steps", "2", "--gamma", "3", "--tokens", "120", "--anchors", "8", "--max-length", "48", "--device", "cpu"]


def parse(argv):
    parser = Parser(prog="dspark train-draft", formatter_class=argparse.RawDescriptionHelpFormatter)
    train_draft.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "sums.txt"
    path.write_text(SUMS)
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("method", ["dspark", "dflash", "mtp", "eagle3"])
def test_every_method_writes_its_checkpoint(method, text, cache, tmp_path, capsys):
    argv = ["--text", str(text), "--method", method, "--output", str(tmp_path), "--cache", str(cache), *FAST]
    argv += ["--held-out", "0.2", "--markov-rank", "8", "--json"]
    assert train_draft.run(parse(argv)) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["method"] == method and record["steps"] == 2 and set(record["held_out"]) == {"sums"}
    assert (tmp_path / "training" / "log.jsonl").is_file()
    if method != "eagle3":
        config = load_model_config(tmp_path)
        CheckpointReader(tmp_path, config)
        assert config.dspark is None if method == "mtp" else config.dspark.block_size == 3


def test_a_longer_run_continues_and_uses_the_cache(text, cache, tmp_path, capsys):
    argv = ["--text", str(text), "--output", str(tmp_path), "--cache", str(cache), *FAST, "--held-out", "0.2"]
    assert train_draft.run(parse(argv)) == 0
    before = sorted(path.name for path in cache.iterdir())
    argv[argv.index("--steps") + 1] = "4"
    assert train_draft.run(parse([*argv, "--log-every", "1"])) == 0
    lines = [json.loads(line) for line in (tmp_path / "training" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 3, 4]
    assert sorted(path.name for path in cache.iterdir()) == before
    assert "4 steps, written to" in capsys.readouterr().out


def test_continuations_of_the_target(text, tmp_path, capsys):
    argv = ["--text", str(text), "--output", str(tmp_path), *FAST, "--held-out", "0.3", "--json"]
    argv += ["--regenerate", "12", "--regenerate-tokens", "10", "--max-tokens", "0"]
    assert train_draft.run(parse(argv)) == 0
    record = json.loads(capsys.readouterr().out)
    assert set(record["held_out"]) <= {"sums@0", "sums@1"} and record["held_out"]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--gamma", "0"], "--gamma is 0"),
        (["--max-tokens", "0"], "without --regenerate"),
        (["--target-layer-ids", "7"], "--target-layer-ids has 7; the target has layers 0 to 3"),
        (["--draft-experts", "4", "--draft-top-k", "5"], "--draft-top-k is 5 of --draft-experts 4"),
        (["--mask-token-id", "5000"], "--mask-token-id is 5000"),
        (["--held-out", "1"], "--held-out is 1.0"),
        (["--method", "eagle9"], "eagle9"),
    ],
)
def test_mistakes_are_named(flags, message, text, tmp_path):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        train_draft.run(parse(["--text", str(text), "--output", str(tmp_path), *FAST, *flags]))


def test_the_bundled_model_can_be_trained_for_by_default():
    args = parse(["--text", "x.txt", "--output", "y", "--steps", "1"])
    options = train_draft.options_from(args)
    assert options.model == bundled_model()
    assert options.recipe.gamma == 7 and options.recipe.target_layer_ids == (3,) and options.recipe.noise_token_id == 2
    assert options.recipe.num_experts == 8 and options.recipe.top_k == 2


def test_the_cache_depends_on_the_target_and_not_on_its_draft(text, cache, tmp_path, capsys):
    argv = ["--text", str(text), "--cache", str(cache), *FAST, "--held-out", "0.2", "--markov-rank", "8"]
    assert train_draft.run(parse([*argv, "--output", str(tmp_path / "a")])) == 0
    assert train_draft.run(parse([*argv, "--output", str(tmp_path / "b"), "--model", str(tmp_path / "a")])) == 0
    before = sorted(path.name for path in cache.iterdir())
    longer = [*argv, "--output", str(tmp_path / "c"), "--model", str(tmp_path / "b"), "--method", "dflash"]
    assert train_draft.run(parse(longer)) == 0
    assert sorted(path.name for path in cache.iterdir()) == before
