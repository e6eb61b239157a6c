"""Two half batches take turns as the plan says, and a step is cut where the rule says."""

import pytest
from dspark.layers.stages import Point, interleave, stage_plan
from dspark.runtime.overlap import Cut, Rule, find_cut, halve
from dspark.runtime.step import Span

LAYER = (Point.PREPARED, Point.SUMMING, Point.ROUTED, Point.SENT, Point.RETURNING, Point.RETURNED)


def traced(name, num_layers, trace):
    """Layers that only yield, noting the stage they are in; their result is the name."""
    for _ in range(num_layers):
        for point in LAYER:
            trace.append(name)
            yield point
    trace.append(name)
    return name


def order(num_layers, plan):
    """The stages as they were run: A0, B0, ..."""
    trace = []

    def stages(name):
        number = 0
        for _ in range(num_layers):
            for point in LAYER:
                if point in plan.points:
                    trace.append(f"{name}{number}")
                    number += 1
                yield point
        trace.append(f"{name}{number}")
        return name

    assert interleave(stages("A"), stages("B"), plan) == ("A", "B")
    return trace


def test_prefill_alternates():
    assert order(1, stage_plan(True, False)) == "A0 B0 A1 B1 A2 B2".split()


def test_decode_runs_two_stages_ahead():
    expected = "A0 A1 A2 B0 A3 B1 A4 B2 A5 B3 B4 B5".split()
    assert order(1, stage_plan(False, False)) == expected


@pytest.mark.parametrize("num_layers", [1, 2, 7])
def test_number_of_stages(num_layers):
    assert len(order(num_layers, stage_plan(True, False))) == 2 * (2 * num_layers + 1)
    assert len(order(num_layers, stage_plan(False, False))) == 2 * (5 * num_layers + 1)
    assert len(order(num_layers, stage_plan(True, True))) == 2 * (3 * num_layers + 1)


def test_halves_of_unlike_length_both_end():
    plan, trace = stage_plan(True, False), []
    results = interleave(traced("A", 1, trace), traced("B", 3, trace), plan)
    assert results == ("A", "B") and trace.count("A") == 7 and trace.count("B") == 19


def left_right(lengths, cut):
    left = sum(lengths[: cut.index]) + cut.offset
    return left, sum(lengths) - left


@pytest.mark.parametrize(
    "lengths,sides,inside",
    [
        ([100], (50, 50), True),
        ([10, 90], (50, 50), True),
        ([10, 20, 30, 40], (50, 50), True),
        ([50, 50], (50, 50), False),
        ([1], (0, 1), False),
        ([2], (1, 1), True),
        ([1, 5, 1], (3, 4), True),
        ([48, 52], (48, 52), False),
        ([47, 53], (50, 50), True),
    ],
)
def test_where_prefill_is_cut(lengths, sides, inside):
    cut = find_cut(lengths, has_prefill=True)
    assert left_right(lengths, cut) == sides and (cut.offset > 0) == inside


@pytest.mark.parametrize("num_requests,index", [(0, 0), (1, 0), (2, 1), (5, 2)])
def test_decode_is_cut_between_requests(num_requests, index):
    assert find_cut([8] * num_requests, has_prefill=False) == Cut(index, 0)


def test_halves_together_are_the_step():
    spans = [Span(3, 10, [1, 2, 3], 3), Span(0, 0, [4, 5, 6, 7, 8], 1), Span(1, 7, [9], 1)]
    for cut in (Cut(0, 0), Cut(1, 0), Cut(0, 2), Cut(1, 4), Cut(3, 0)):
        first, second = halve(spans, cut)
        tokens = [token for span in first + second for token in span.tokens]
        places = [(span.slot, span.start + i) for span in first + second for i in range(len(span.tokens))]
        assert tokens == list(range(1, 10))
        assert places == [(span.slot, span.start + i) for span in spans for i in range(len(span.tokens))]
        wanted = []
        for span in first + second:
            wanted += span.tokens[len(span.tokens) - span.num_logits :]
        assert wanted == [1, 2, 3, 8, 9]


def test_overlap_is_off_where_it_does_not_pay():
    rule = Rule("tbo", min_rows=100, num_ranks=2)
    assert rule.in_halves((100, 0), (50, 0), (50, 0)) and rule.in_halves((100, 3), (0, 1), (100, 2))
    assert not rule.in_halves((99, 99), (50, 50), (49, 49))
    assert not rule.in_halves((100, 0), (0, 0), (100, 0))
    assert not rule.in_pieces((1000, 1000))
    assert Rule("sbo", 100, 2).in_pieces((100, 1)) and not Rule("sbo", 100, 2).in_pieces((99, 99))
    for off in (Rule("none", 1, 8), Rule("tbo", 1, 1), Rule("sbo", 1, 1)):
        assert not off.in_halves((500,), (250,), (250,)) and not off.in_pieces((500,))
