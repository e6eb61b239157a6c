"""Figures of finished runs, progress lines, and requests that are left unfinished."""

import contextlib
import io

import pytest
from dspark.runtime.detokenize import TextTracker
from dspark.runtime.drive import Collector, drive
from dspark.runtime.progress import Lines, silent
from dspark.runtime.report import Spread, Summary, output_to_json
from dspark.runtime.request import Request, RequestOutput, SamplingParams, TokenEvent, TokenLogprob
from dspark.runtime.scheduler import Counts


def output(request_id, num_tokens, first, total, reason="length"):
    ids = tuple(range(num_tokens))
    return RequestOutput(request_id, (1, 2, 3), ids, "t", reason, time_to_first_token=first, time_total=total)


def test_summary_counts_what_ran():
    outputs = [output("a", 5, 0.5, 2.5), output("b", 1, 1.5, 1.5, "stop")]
    outputs.append(RequestOutput("c", (), (), "", "error", error="no"))
    summary = Summary.of(outputs, 3.0, Counts(5, 100, 2, 30, 1, 7))
    assert (summary.num_requests, summary.num_prompt_tokens, summary.num_new_tokens) == (3, 6, 6)
    assert summary.finish_reasons == {"error": 1, "length": 1, "stop": 1}
    assert summary.tokens_per_s == 2.0
    assert summary.time_to_first_token == Spread(1.0, 0.5, 1.5)
    assert summary.time_per_token == Spread(0.5, 0.5, 0.5)
    text = "\n".join(summary.lines())
    assert "3 requests (1 error, 1 length, 1 stop)" in text and "2.0 tokens/s" in text and "500.0 ms" in text
    assert "30 of 100 tokens to prefill" in text and "2 of 5 admissions" in text and "1 retractions" in text
    assert summary.to_json()["scheduler"]["hit_tokens"] == 30
    nothing = Summary.of(outputs[2:], 0.0, Counts())
    assert len(nothing.lines()) == 1
    assert nothing.to_json()["time_per_token_s"] is None and nothing.tokens_per_s == 0.0


def test_percentiles_are_nearest_rank():
    spread = Spread.of(list(range(1, 201)))
    assert (spread.mean, spread.p50, spread.p99) == (100.5, 100, 198)
    assert Spread.of([]) is None


def test_json_of_a_result_has_optional_fields_only_when_asked():
    plain = output_to_json(output("a", 2, 0.1, 0.2))
    assert plain["prompt_tokens"] == 3 and "logprobs" not in plain and "error" not in plain
    entry = TokenLogprob(7, -0.5, ((7, -0.5), (1, -2.0)))
    full = output_to_json(RequestOutput("a", (1,), (7,), "x", "stop", logprobs=(entry,)))
    assert full["logprobs"] == [{"token_id": 7, "logprob": -0.5, "top": [[7, -0.5], [1, -2.0]]}]


def test_progress_lines_say_the_rate_and_what_remains():
    now, stream = [0.0], io.StringIO()
    lines = Lines("reading", 100_000, "B", every=5.0, stream=stream, clock=lambda: now[0])
    for second in range(1, 11):
        now[0] = float(second)
        lines.update(5_000)
    lines.close()
    written = stream.getvalue().splitlines()
    assert written[0] == "reading: 25.0k/100.0k B (25 %), 5000 B/s, 15 s left"
    assert written[1] == "reading: 50.0k/100.0k B (50 %), 5000 B/s, 10 s left"
    quick = io.StringIO()
    short = Lines("quick", 1, "B", stream=quick, clock=lambda: 0.0)
    short.update(1)
    short.close()
    assert quick.getvalue() == ""
    silent("nothing", 1, "B").update(1)


class CountingEngine:
    """Gives every request one token a step until it has three; remembers what was dropped."""

    def __init__(self):
        self.tokens, self.dropped = {}, []

    def add(self, request):
        self.tokens[request.request_id] = 0

    def abort(self, request_id):
        self.dropped.append(request_id)
        self.tokens.pop(request_id, None)

    def has_work(self):
        return bool(self.tokens)

    def step(self):
        events = []
        for request_id in list(self.tokens):
            self.tokens[request_id] += 1
            done = self.tokens[request_id] == 3
            events.append(TokenEvent(request_id, (5,), (), "length" if done else None))
            if done:
                del self.tokens[request_id]
        return events


REQUESTS = [Request(name, (1,), SamplingParams(max_new_tokens=3)) for name in "ab"]


def test_events_add_up_to_results():
    clock = iter(range(100))
    collector = Collector(REQUESTS, lambda: float(next(clock)))
    outputs = [o for event in drive(CountingEngine(), REQUESTS, None) if (o := collector.push(event)) is not None]
    assert [(o.request_id, o.token_ids, o.finish_reason) for o in outputs] == [
        ("a", (5, 5, 5), "length"),
        ("b", (5, 5, 5), "length"),
    ]
    assert [(o.time_to_first_token, o.time_total) for o in outputs] == [(1.0, 5.0), (2.0, 6.0)]


def test_leaving_early_drops_what_is_unfinished():
    engine, text = CountingEngine(), TextTracker(None)
    with pytest.raises(RuntimeError, match="enough"), contextlib.closing(drive(engine, REQUESTS, text)) as events:
        for count, _ in enumerate(events):
            if count == 3:
                raise RuntimeError("enough")
    assert engine.dropped == ["a", "b"] and not engine.has_work()
