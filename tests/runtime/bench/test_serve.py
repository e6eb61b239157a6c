"""``dspark bench serve``: latencies by hand, traffic that repeats, and the whole benchmark on a few requests."""

import json

import pytest
import torch
from dspark.parallel.groups import Group
from dspark.runtime.arrivals import AtOnce, Timed, poisson_times
from dspark.runtime.bench.latency import LatencyLog
from dspark.runtime.cli import main
from dspark.runtime.request import Request, TokenEvent


class Clock:
    """Seconds that pass only when told."""

    def __init__(self):
        self.at = 100.0

    def __call__(self):
        return self.at

    def sleep(self, seconds):
        self.at += seconds


def test_latencies_by_hand():
    clock = Clock()
    log = LatencyLog(clock)
    log.came(Request("a", (1, 2, 3)))
    log.came(Request("b", (1,)), 100.5)
    for at, name, ids in ((101, "a", (7,)), (102, "b", (8,)), (103, "a", (7, 7)), (107, "a", (7,)), (108, "a", (7, 7))):
        clock.at = float(at)
        log.push(TokenEvent(name, ids))
    found = log.summary()
    assert found.values == {"ttft": [1.0, 1.5], "tpot": [7 / 5], "itl": [2.0, 4.0, 1.0], "e2el": [8.0, 1.5]}
    figures = found.to_json()
    assert figures["mean_ttft_ms"] == 1250 and figures["median_itl_ms"] == 2000 and figures["max_itl_ms"] == 4000
    assert figures["p90_itl_ms"] == pytest.approx(3600) and figures["p99_itl_ms"] == pytest.approx(3960)
    assert figures["output_throughput"] == 7 / 8 and figures["total_input_tokens"] == 4
    assert figures["concurrency"] == 9.5 / 8 and "accept_length" not in figures
    log.push(TokenEvent("b", spec={"verify_ct": 4, "accept_length": 2.5}))
    log.push(TokenEvent("a", spec={"verify_ct": 1, "accept_length": 5.0}))
    assert log.summary().to_json()["accept_length"] == 3.0
    assert any(line.startswith("Accept length:") for line in log.summary().lines())


def test_poisson_traffic_repeats_and_has_its_rate():
    times = poisson_times(20000, 50.0, 3)
    assert times == poisson_times(20000, 50.0, 3) != poisson_times(20000, 50.0, 4)
    assert times == sorted(times) and times[-1] == pytest.approx(400, rel=0.03)
    gaps = torch.tensor(times).diff()
    assert gaps.std() == pytest.approx(1 / 50, rel=0.05), "gaps of Poisson traffic are exponential"
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="--arrival-rate is"):
            poisson_times(3, rate, 0)


def test_requests_come_when_it_is_their_time():
    clock, came = Clock(), []
    alone = Group.alone("world", 0)
    timed = Timed([1.0, 2.0, 2.5, 9.0], alone, torch.device("cpu"), lambda *pair: came.append(pair), clock, clock.sleep)
    assert timed.count(is_idle=False) == 0
    assert timed.count(is_idle=True) == 1 and clock.at == 101.0, "an idle engine waits for the next"
    clock.at = 102.6
    assert timed.count(is_idle=False) == 3 == timed.count(is_idle=False)
    assert timed.count(is_idle=True) == 4 and clock.at == 109.0
    assert came == [(0, 101.0), (1, 102.0), (2, 102.5), (3, 109.0)]
    assert AtOnce(7).count(is_idle=False) == 7


def test_the_whole_benchmark_on_a_few_requests(capsys):
    flags = "--requests 4 --new-tokens 10 --prompt-tokens 12 --rounds 1 --baseline-requests 2 --long-prompt 90".split()
    assert main(["bench", "serve", *flags, "--mixed-chunk", "24", "--arrival-rate", "200", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ids_equal"] is True and result["completed"] == 4
    for name in ("one_by_one", "transformers_one_by_one", "transformers_batch_8"):
        assert result[name]["ratio"] == pytest.approx(result["together"]["tokens_per_s"] / result[name]["tokens_per_s"])
    gaps = result["long_prompt"]
    assert gaps["ratio"] == pytest.approx(gaps["longest_gap_ms"] / gaps["median_gap_ms"])
    assert gaps["prefill_steps"] >= 90 // 24
