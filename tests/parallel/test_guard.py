"""What the hub concludes from what it is told, by a clock of the test's own."""

import json
import signal

import pytest
from dspark.parallel.guard import DUMP, MAX_LINE, SETTLE, Hub, Lines

SILENCE, WATCHDOG = 10.0, 60.0


class Job:
    """A hub, and what it sent to whom."""

    def __init__(self, num_ranks=3):
        self.sent, self.now = [], 0.0
        self.hub = Hub([f"n{r}" for r in range(num_ranks)], SILENCE, WATCHDOG, lambda *m: self.sent.append(m), 0.0)

    def beat(self, *ranks, count=0, in_step=False, age=0.0, still=0.0, last="step 3"):
        for rank in ranks:
            message = {"kind": "beat", "age": age, "count": count, "still": still, "in_step": in_step, "last": last}
            self.hub.take(rank, message, self.now)

    def after(self, seconds):
        self.now += seconds
        self.hub.tick(self.now)

    @property
    def verdict(self):
        ends = [message for _, message in self.sent if message["kind"] == "end"]
        assert all(message == ends[0] for message in ends)
        return ends[0] if ends else None


def fail(text, follows):
    return {"kind": "failed", "text": text, "follows": follows}


def test_ranks_that_report_go_on():
    job = Job()
    for count in range(100):
        job.beat(0, 1, 2, count=count, in_step=True)
        job.after(5)
    assert not job.sent


def test_an_own_failure_ends_all_at_once():
    job = Job()
    job.beat(0, 1, 2, last="step 7, #40 all_reduce over tp (its 20.), 4096 bytes")
    job.hub.take(1, fail("failed with ValueError: boom", False), 1.0)
    assert [rank for rank, _ in job.sent] == [0, 1, 2]
    assert job.verdict == {
        "kind": "end", "rank": 1, "status": 1,
        "text": "rank 1 on n1 failed with ValueError: boom; it was last seen at: step 7, #40 all_reduce over tp "
        "(its 20.), 4096 bytes",
    }  # fmt: skip


def test_a_failure_that_may_follow_waits_for_its_cause():
    job = Job()
    job.beat(0, 1, 2)
    job.hub.take(0, fail("failed with RuntimeError: Connection closed by peer", True), 0.1)
    job.after(SETTLE / 2)
    assert job.verdict is None
    job.hub.take(2, fail("was killed or crashed", False), job.now)
    assert job.verdict["rank"] == 2


def test_a_failure_without_a_cause_names_who_is_behind():
    job = Job()
    job.now = 1.0
    job.beat(0, 1, 2, count=1)
    job.now = 2.0
    job.beat(0, 1, count=2)
    job.beat(2, count=1, still=1.5, last="reading weights")
    job.hub.take(0, fail("failed with RuntimeError: Timed out", True), job.now)
    job.after(SETTLE + 0.1)
    assert job.verdict["rank"] == 0 and "Timed out" in job.verdict["text"]
    assert job.verdict["text"].endswith("rank 2 on n2 is behind: reading weights")


@pytest.mark.parametrize("silent", [0, 2])
def test_a_rank_that_is_not_heard_of(silent):
    job = Job()
    others = {0, 1, 2} - {silent}
    for _ in range(3):
        job.beat(*others)
        job.after(SILENCE / 2)
    assert job.verdict["rank"] == silent and f"rank {silent} on n{silent} was not heard of for" in job.verdict["text"]


def test_a_rank_whose_guard_lives_but_which_does_not_react():
    job = Job()
    job.beat(0, 1)
    job.beat(2, age=SILENCE + 1)
    job.after(1)
    assert "rank 2 on n2 did not react for 11.0 s (stopped?)" in job.verdict["text"]


def test_a_broken_connection_counts_unless_the_rank_had_left():
    job = Job()
    job.hub.take(1, {"kind": "bye"}, 0.0)
    job.hub.lost(1)
    job.beat(0, 2)
    assert job.verdict is None
    job.hub.lost(2)
    assert job.verdict["rank"] == 2 and [rank for rank, _ in job.sent] == [0, 2], "rank 1 is no longer bothered"


def test_a_step_without_progress_dumps_first_and_names_the_one_that_stopped_first():
    job = Job()
    while job.now < WATCHDOG + 1:
        job.now += 4
        job.beat(0, 1, count=6, still=job.now, in_step=True, last="step 3, #9")
        job.beat(2, count=5, still=job.now, in_step=True, last="step 3, #8")
        job.hub.tick(job.now)
    assert [(rank, message["kind"]) for rank, message in job.sent] == [(0, "dump"), (1, "dump"), (2, "dump")]
    job.after(DUMP + 0.1)
    assert job.verdict["rank"] == 2 and "made no progress in a step for" in job.verdict["text"]
    assert job.verdict["text"].endswith("step 3, #8")


def test_a_long_phase_that_is_no_step_is_let_be():
    job = Job()
    for _ in range(100):
        job.beat(0, 1, 2, count=5, last="reading weights")
        job.after(SILENCE / 2)
    assert not job.sent


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_one_rank_stops_all(number, status):
    job = Job()
    job.hub.take(2, {"kind": "signal", "number": int(number)}, 0.0)
    assert job.verdict["status"] == status and number.name in job.verdict["text"] and "rank 2" in job.verdict["text"]
    job.hub.take(1, fail("failed", False), 0.0)
    assert job.verdict["status"] == status, "the first verdict stands"


def test_lines_come_in_any_pieces_and_are_limited():
    messages = [{"kind": "beat", "text": "ä" * n} for n in range(5)]
    data = b"".join(json.dumps(message).encode() + b"\n" for message in messages)
    for size in (1, 7, len(data)):
        lines = Lines()
        assert [m for i in range(0, len(data), size) for m in lines.feed(data[i : i + size])] == messages
    for bad in (b"[1]\n", b"{\n", b"x" * (MAX_LINE + 1)):
        with pytest.raises(ValueError):
            Lines().feed(bad)
