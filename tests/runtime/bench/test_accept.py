"""``dspark bench accept``: figures that fit together and to the requests' own counts, gains, and what is refused."""

import argparse
import dataclasses
import json
import types

import pytest
import torch
from dspark.parallel.groups import Groups
from dspark.runtime.bench.accept import (
    Measured,
    Place,
    common_gamma,
    decode,
    differing_ids,
    draft_specs,
    figures,
    gains,
    temperatures,
)
from dspark.runtime.checkpoint import RandomWeights, bundled_model
from dspark.runtime.cli import main
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.load import load_engine
from dspark.runtime.model_config import load_model_config
from dspark.runtime.request import Request, SamplingParams
from dspark.runtime.spec.stats import SpecStats
from dspark.runtime.training.export import write_bundled

CONFIG = load_model_config(bundled_model())
SMALL = ["--max-new-tokens", "12", "--num-prompts", "2"]


@pytest.fixture(scope="module")
def mtp(tmp_path_factory):
    """The bundled target with a made-up multi-token prediction layer."""
    folder = tmp_path_factory.mktemp("accept") / "mtp"
    config = dataclasses.replace(CONFIG, dspark=None, num_nextn_predict_layers=1)
    source = RandomWeights(config, seed=3)
    tensors = {name: source.take(name) for name in source.names("draft")}
    write_bundled(bundled_model(), folder, tensors, {"num_nextn_predict_layers": 1}, {})
    return folder


def check(values, gamma):
    """The figures of one place fit together."""
    histogram, count = values["accept_histogram"], values["verify_ct"]
    assert sum(histogram) == count and len(values["conditional_acceptance"]) == gamma == len(histogram) - 1
    assert values["accept_length"] == pytest.approx(values["emitted"] / count)
    assert values["verified_per_emitted"] == pytest.approx(values["verified"] / values["emitted"])
    assert sum(k * n for k, n in enumerate(histogram)) == values["accepted"] <= values["verified"] <= values["drafted"]
    # Steps that kept a draft at place k, from the histogram, are a share of those that kept all before it.
    for k, share in enumerate(values["conditional_acceptance"]):
        reached, kept = sum(histogram[k:]), sum(histogram[k + 1 :])
        assert (share is None or share >= kept / reached) if reached else share is None


def test_figures(capsys, mtp):
    draft = "auto" if CONFIG.dspark else f"auto={mtp}"
    drafts = f"{draft},again={bundled_model() if CONFIG.dspark else mtp},other={mtp}"
    assert main(["bench", "accept", *SMALL, "--draft", drafts, "--gamma", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    first, *_ = result["drafts"]
    places = [f"{domain}@{at}" for at in (0, 1) for domain in ("math", "code", "chat", "all")]
    assert result["gamma"] == 4 and result["greedy_ids_equal"] is True
    for of_draft in result["drafts"].values():
        assert list(of_draft) == places
        for values in of_draft.values():
            check(values, 4)
        for at in (0, 1):
            for name in ("verify_ct", "emitted", "drafted", "verified", "accepted"):
                parts = [of_draft[f"{domain}@{at}"][name] for domain in ("math", "code", "chat")]
                assert of_draft[f"all@{at}"][name] == sum(parts)
    assert result["drafts"]["again"] == result["drafts"][first]
    assert set(result["gain"]["again"].values()) == {0.0}
    for place, gain in result["gain"]["other"].items():
        mine, theirs = (result["drafts"][label][place]["accept_length"] for label in (first, "other"))
        assert gain == pytest.approx(mine / theirs - 1)
    # Greedy tokens are the same, whoever drafted them.
    assert len({of_draft["all@0"]["emitted"] for of_draft in result["drafts"].values()}) == 1
    assert "ece" not in result["drafts"]["other"]["all@0"]
    if CONFIG.dspark:
        assert len(result["drafts"][first]["all@1"]["ece"]) == 4


def test_table_picture_and_files(capsys, tmp_path, mtp):
    pytest.importorskip("matplotlib")
    paths = [tmp_path / "short.jsonl", tmp_path / "long.jsonl"]
    for path, texts in zip(paths, (["Good", "In the"], ["def close(self):\n    return"])):
        path.write_text("".join(json.dumps({"prompt": text, "domain": "x"}) + "\n" for text in texts))
    picture = tmp_path / "accept.png"
    flags = ["--draft", f"layer={mtp}", "--gamma", "2", "--temperature", "0.5", "--max-new-tokens", "6"]
    assert main(["bench", "accept", *flags, "--prompts", *map(str, paths), "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    for words in ("short@0.5", "long@0.5", "all@0.5", "layer", "accepted length", "2 short, 1 long prompts", "x_2"):
        assert words in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    for path in paths:
        path.write_text('{"prompt": 3}\n')
    assert main(["bench", "accept", *flags, "--prompts", *map(str, paths)]) == 2
    assert main(["bench", "accept", *flags, "--prompts", str(paths[0]), str(paths[0])]) == 2


def test_books_are_those_of_the_requests(mtp):
    """With stops inside blocks and requests of different lengths."""
    folder = bundled_model() if CONFIG.dspark else mtp
    config = EngineConfig(max_context=256, gamma=3, draft="dspark" if CONFIG.dspark else "mtp", max_running=3)
    config = resolve(config, model_dir=str(folder), device_type="cpu", max_positions=4096, own_draft="none")
    engine = load_engine(config, Groups.single(), torch.device("cpu"))
    params = SamplingParams(temperature=1.0, stop_token_ids=tuple(range(20, 35)))
    requests = [
        Request(str(i), (0, 5 + i, 60), dataclasses.replace(params, max_new_tokens=4 + 3 * i)) for i in range(7)
    ]
    measured = decode(types.SimpleNamespace(engine=engine), requests)
    expected, reasons = SpecStats(3).fields(), set()
    for one in requests:
        engine.add(one)
    ids = {}
    while engine.has_work():
        for event in engine.step():
            ids.setdefault(event.request_id, []).extend(event.token_ids)
            reasons.add(event.finish_reason)
            for name in ("verify_ct", "drafted", "verified", "accepted"):
                expected[name] += event.spec[name] if event.spec else 0
    assert {"stop", "length"} <= reasons
    assert measured.ids == [tuple(ids[str(i)]) for i in range(7)]
    found = figures(measured)
    assert {name: found[name] for name in ("verify_ct", "drafted", "verified", "accepted")} == {
        name: expected[name] for name in ("verify_ct", "drafted", "verified", "accepted")
    }
    assert found["emitted"] == sum(map(len, ids.values())) - len(ids)


def test_gains_and_tokens_that_differ():
    def with_length(emitted, ids=((1, 2),)):
        stats = SpecStats(4)
        for count in emitted:
            stats.add_step(4, 4, count - 1, count)
        return Measured(stats, None, list(ids))

    at = Place("code", 0.0)
    results = {"a": {at: with_length([3, 3])}, "b": {at: with_length([2, 1, 2, 1])}, "c": {at: with_length([2], ())}}
    assert gains(results) == {"b": {"code@0": pytest.approx(1.0)}, "c": {"code@0": pytest.approx(0.5)}}
    assert differing_ids(results) == ["code@0: greedy tokens with c are not those with a"]
    assert figures(results["b"][at])["accept_length_error"] == pytest.approx((1 / 3) ** 0.5 / 2)


def test_refusals(mtp, tmp_path):
    def specs(text):
        return draft_specs(text, bundled_model(), CONFIG)

    one = dataclasses.replace(CONFIG, dspark=None)
    for text, words in (
        ("eagle9", "unknown draft 'eagle9'"),
        (f"a={mtp},a={mtp}", "names 'a' twice"),
        (f"a={tmp_path}", "config.json"),
    ):
        with pytest.raises(ValueError, match=words):
            specs(text)
    with pytest.raises(ValueError, match="has no draft"):
        draft_specs("auto", bundled_model(), one)
    with pytest.raises(ValueError, match=r"the target of .*mtp is not that of"):
        draft_specs(f"mtp={mtp}", bundled_model(), dataclasses.replace(CONFIG, sliding_window=9))
    assert common_gamma(None, specs(f"mtp={mtp}")) == 8
    with pytest.raises(ValueError, match="--gamma is 9, but the draft mtp proposes at most 8"):
        common_gamma(9, specs(f"mtp={mtp}"))
    assert temperatures("0,0.5") == (0.0, 0.5)
    for text in ("0,0", "x", "-1"):
        with pytest.raises(argparse.ArgumentTypeError):
            temperatures(text)
