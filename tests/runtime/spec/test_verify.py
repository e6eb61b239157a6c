"""Token, block and greedy verification against reference outcomes, on the host and as tensor programs."""

import pathlib

import numpy as np
import pytest
import torch
from dspark.runtime.spec import device_verify
from dspark.runtime.spec.block_verify import verify_blocks
from dspark.runtime.spec.rows import BlockPlan, PackedRows
from dspark.runtime.spec.verdict import LENGTH, NO_TOKEN, RUNNING, STOP, Verdict, cut
from dspark.runtime.spec.verify import verify_greedy, verify_tokens
from safetensors.numpy import load_file

DATA = pathlib.Path(__file__).resolve().parents[2] / "data" / "speculative"

HOST = {"token": verify_tokens, "block": verify_blocks}
DEVICE = {"token": device_verify.verify_tokens, "block": device_verify.verify_blocks}


def run(where, rule, rows, *arrays):
    """One verification on host arrays, or as a tensor program, whose tensor is read back."""
    if where == "host":
        return HOST[rule](rows, *arrays)
    tensors = [None if a is None else torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
    return Verdict.from_tensor(DEVICE[rule](rows.on("cpu"), *tensors))


def packed(p, lens):
    """The rows 0..ℓ of each request's block of p [N, γ + 1, V]."""
    return np.concatenate([block[: length + 1] for block, length in zip(p, lens)])


@pytest.fixture(scope="module")
def oracle():
    return load_file(DATA / "rejection.safetensors")


def expect_law(where, rule, rows, p, drafts, coins, q, accepted, law):
    """The drawn token walks through ``law`` [N, V] as the final uniform crosses its cumulative sums, to 1e-9."""
    edges = law.cumsum(1)
    for token in range(law.shape[1]):
        solid = law[:, token] > 1e-6
        for u in (edges[:, token] - law[:, token] + 1e-9, edges[:, token] - 1e-9):
            verdict = run(where, rule, rows, p, drafts, coins, np.where(solid, u, 0.5), q)
            drawn = verdict.tokens[np.arange(len(law)), accepted]
            assert (drawn[solid] == token).all()


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_whole_blocks_match_the_oracle(oracle, rule, where):
    count, gamma, _ = oracle["q"].shape
    rows = PackedRows.from_lens([gamma] * count, gamma)
    arrays = packed(oracle["p"], rows.lens), oracle["draft_tokens"], oracle["uniforms"]
    verdict = run(where, rule, rows, *arrays, oracle["uniform_final"], oracle["q"])
    accepted = oracle[f"{rule}_accepted"]
    assert (verdict.accepted == accepted).all()
    assert (verdict.emitted == accepted + 1).all() and (verdict.finish == RUNNING).all()
    for r, n in enumerate(accepted):
        expected = [*oracle["draft_tokens"][r, :n], oracle[f"{rule}_next_token"][r]]
        assert verdict.tokens[r].tolist() == expected + [NO_TOKEN] * (gamma - n)
    assert len(set(accepted.tolist())) == gamma + 1, "the data must hold every accepted length"
    expect_law(where, rule, rows, *arrays, oracle["q"], accepted, oracle[f"{rule}_next_law"])


@pytest.mark.parametrize("where", ["host", "device"])
def test_ragged_blocks_match_the_oracle(oracle, where):
    rows = PackedRows.from_lens(oracle["cap"], oracle["q"].shape[1])
    drafts = oracle["draft_tokens"].copy()
    if where == "host":
        drafts[np.arange(drafts.shape[1]) >= oracle["cap"][:, None]] = -7
    arrays = packed(oracle["p"], rows.lens), drafts, oracle["uniforms"]
    verdict = run(where, "token", rows, *arrays, oracle["uniform_final"], oracle["q"])
    accepted = oracle["capped_accepted"]
    assert (verdict.verified == oracle["cap"]).all() and (verdict.accepted == accepted).all()
    last = verdict.tokens[np.arange(len(accepted)), accepted]
    assert (last == oracle["capped_next_token"]).all()
    expect_law(where, "token", rows, *arrays, oracle["q"], accepted, oracle["capped_next_law"])


@pytest.mark.parametrize("where", ["host", "device"])
def test_one_point_drafts_match_the_oracle(oracle, where):
    count, gamma, _ = oracle["q"].shape
    rows = PackedRows.from_lens([gamma] * count, gamma)
    arrays = packed(oracle["p"], rows.lens), oracle["greedy_draft_tokens"], oracle["uniforms"]
    accepted = oracle["onehot_accepted"]
    one_hot = np.eye(oracle["q"].shape[2])[oracle["greedy_draft_tokens"]]
    for q in (None, one_hot):
        verdict = run(where, "token", rows, *arrays, oracle["uniform_final"], q)
        assert (verdict.accepted == accepted).all()
        last = verdict.tokens[np.arange(count), accepted]
        assert (last == oracle["onehot_next_token"]).all()
    expect_law(where, "token", rows, *arrays, None, accepted, oracle["onehot_next_law"])
    block_verdicts = [
        run(where, "block", rows, *arrays, oracle["uniform_final"], q).to_tensor() for q in (None, one_hot)
    ]
    assert torch.equal(*block_verdicts)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_device_and_host_choose_alike_on_ragged_batches(rule):
    """Laws near the draft's, so that every accepted length occurs below and at every verified length."""
    rng = np.random.default_rng(0)
    seen = set()
    for trial in range(40):
        count, gamma, vocab = int(rng.integers(1, 9)), int(rng.integers(0, 6)), int(rng.integers(2, 8))
        rows = PackedRows.from_lens(rng.integers(0, gamma + 1, count), gamma)
        q = rng.dirichlet(np.ones(vocab), (count, gamma)).reshape(count, gamma, vocab)
        drafts = np.array([[rng.choice(vocab, p=law) for law in block] for block in q], dtype=np.int64)
        drafts = drafts.reshape(count, gamma)
        p = rng.dirichlet(np.ones(vocab), rows.num_rows)
        judged = rows.offset < rows.lens[rows.request]
        near = q[rows.request[judged], rows.offset[judged]]
        p[judged] = 0.8 * near + 0.2 * p[judged]
        p[rng.random(len(p)) < 0.1] = np.eye(vocab)[rng.integers(0, vocab)]
        uniforms = rng.random((count, gamma)), rng.random(count)
        laws = q if trial % 3 else None
        verdicts = [run(where, rule, rows, p, drafts, *uniforms, laws) for where in ("host", "device")]
        assert torch.equal(verdicts[0].to_tensor(), verdicts[1].to_tensor()), trial
        if gamma == 5:
            seen |= set(zip(rows.lens.tolist(), verdicts[0].accepted.tolist()))
    assert len(seen) > 12, seen


def test_greedy_is_the_longest_common_prefix_and_the_limit_of_sampling():
    rng = np.random.default_rng(1)
    count, gamma, vocab = 40, 5, 4
    rows = PackedRows.from_lens(rng.integers(0, gamma + 1, count), gamma)
    ids = rng.integers(0, vocab, rows.num_rows)
    drafts = rng.integers(0, vocab, (count, gamma))
    drafts[::2] = ids[np.minimum(rows.first[:, None] + np.arange(gamma), rows.num_rows - 1)][::2]
    expected = []
    for r in range(count):
        block = ids[rows.first[r] : rows.first[r] + rows.lens[r] + 1].tolist()
        n = 0
        while n < rows.lens[r] and drafts[r, n] == block[n]:
            n += 1
        expected.append(drafts[r, :n].tolist() + [block[n]])
    verdict = verify_greedy(rows, ids, drafts)
    assert verdict.token_lists() == expected
    assert (verdict.accepted == [len(e) - 1 for e in expected]).all()
    device = device_verify.verify_greedy(rows.on("cpu"), torch.from_numpy(ids), torch.from_numpy(drafts))
    assert torch.equal(device, verdict.to_tensor())
    for where in ("host", "device"):
        for rule in ("token", "block"):
            q = np.full((count, gamma, vocab), 1 / vocab)
            for laws in (q, None):
                uniforms = rng.random((count, gamma)), rng.random(count)
                sampled = run(where, rule, rows, np.eye(vocab)[ids], drafts, *uniforms, laws)
                if rule == "token" or laws is None:
                    assert torch.equal(sampled.to_tensor(), verdict.to_tensor())
                else:
                    assert sampled.token_lists() == expected


def test_tokens_outside_the_target_support_are_never_emitted():
    rng = np.random.default_rng(2)
    count, gamma, vocab = 200, 3, 8
    rows = PackedRows.from_lens([gamma] * count, gamma)
    p = rng.random((rows.num_rows, vocab)) * (np.arange(vocab) < 4)
    p /= p.sum(1, keepdims=True)
    q = rng.dirichlet(np.ones(vocab), (count, gamma))
    drafts = np.array([[rng.choice(vocab, p=law) for law in block] for block in q])
    for rule in ("token", "block"):
        for final in (np.zeros(count), np.full(count, np.nextafter(1.0, 0.0))):
            verdict = run("host", rule, rows, p, drafts, rng.random((count, gamma)), final, q)
            assert verdict.tokens.max() < 4


def test_equal_laws_keep_everything_even_when_rounding_leaves_no_residual():
    vocab = 5
    p = np.array([[0.1, 0.2, 0.3, 0.2, 0.2]] * 2)
    q = p[:1][None] * (1 + 1e-15)
    drafts = np.array([[2]])
    rows = PackedRows.from_lens([1], 1)
    last_coin = np.array([[np.nextafter(1.0, 0.0)]])
    for where in ("host", "device"):
        verdict = run(where, "token", rows, p, drafts, last_coin, np.array([0.35]), q)
        assert 0 <= verdict.tokens[0, 0] < vocab and verdict.emitted[0] >= 1
        assert run(where, "block", rows, p, drafts, last_coin, np.array([0.35]), q).emitted[0] >= 1


def test_no_drafts_is_plain_sampling():
    p = np.array([[0.25, 0.75], [1.0, 0.0]])
    rows = PackedRows.from_lens([0, 0], 0)
    nothing = np.empty((2, 0), dtype=np.int64)
    for where in ("host", "device"):
        for rule in ("token", "block"):
            for q in (None, np.empty((2, 0, 2))):
                verdict = run(where, rule, rows, p, nothing, np.empty((2, 0)), np.array([0.3, 0.9]), q)
                assert verdict.token_lists() == [[1], [0]] and (verdict.accepted == 0).all()
    empty = PackedRows.from_lens([], 3)
    assert empty.num_rows == 0 and empty.pack(np.empty(0, int), np.empty((0, 3), int)).shape == (0,)
    none = verify_greedy(empty, np.empty(0, int), np.empty((0, 3), int))
    assert none.to_tensor().shape == (0, 8) and none.token_lists() == []


def test_packing_lays_the_anchor_before_its_drafts():
    rows = PackedRows.from_lens([2, 0, 3], 3)
    drafts = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert rows.num_rows == 8
    assert rows.pack(np.array([10, 20, 30]), drafts).tolist() == [10, 1, 2, 20, 30, 7, 8, 9]
    assert rows.request.tolist() == [0, 0, 0, 1, 2, 2, 2, 2] and rows.offset.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert rows.emitted_rows([[7, 7], [7], [7] * 4]).tolist() == [0, 1, 3, 4, 5, 6, 7]
    with pytest.raises(ValueError, match=r"0\.\.3, got 0\.\.4"):
        PackedRows.from_lens([0, 4], 3)
    plan = BlockPlan(drafts, rows.lens)
    again = BlockPlan.from_tensor(plan.to_tensor())
    assert (again.drafts == drafts).all() and (again.lens == rows.lens).all()


def verdict_of(*blocks, gamma=3):
    tokens = np.array([list(b) + [NO_TOKEN] * (gamma + 1 - len(b)) for b in blocks])
    emitted = np.array([len(b) for b in blocks])
    return Verdict(np.full(len(blocks), gamma), emitted - 1, emitted, np.zeros(len(blocks), int), tokens)


def test_cut_ends_a_block_at_the_first_stop_or_the_limit():
    block = [5, 6, 7, 8]
    cases = [
        # remaining, stop ids, stop string place -> emitted, finish
        (9, {6, 8}, None, 2, STOP),
        (9, set(), None, 4, RUNNING),
        (4, set(), None, 4, LENGTH),
        (2, {7}, None, 2, LENGTH),
        (3, {7}, None, 3, STOP),
        (9, {8}, 2, 3, STOP),
        (9, {5}, 2, 1, STOP),
        (1, set(), 3, 1, LENGTH),
        (5, {8}, None, 4, STOP),
    ]
    verdict = verdict_of(*[block] * len(cases))
    out = cut(verdict, [c[0] for c in cases], [c[1] for c in cases], [c[2] for c in cases])
    for r, (_, _, _, emitted, finish) in enumerate(cases):
        assert out.emitted[r] == emitted and out.finish[r] == finish
        assert out.token_lists()[r] == block[:emitted]
        assert out.accepted[r] == min(3, emitted), "drafts behind the cut do not count"
    assert (out.verified == 3).all()
    assert (verdict.emitted == 4).all(), "the argument is left as it was"


def test_verdict_travels_as_one_integer_table():
    verdict = cut(verdict_of([1, 2], [3]), [1, 5], [(), {3}])
    table = verdict.to_tensor()
    assert table.dtype == torch.int64 and table.shape == (2, 8)
    assert table.tolist() == [[3, 1, 1, LENGTH, 1, -1, -1, -1], [3, 0, 1, STOP, 3, -1, -1, -1]]
    again = Verdict.from_tensor(table)
    assert torch.equal(again.to_tensor(), table) and again.token_lists() == [[1], [3]]
    with pytest.raises(ValueError, match="int64"):
        Verdict.from_tensor(table.float())
    with pytest.raises(ValueError, match=r"\(2, 4\)"):
        Verdict.from_tensor(table[:, :4])


def test_acceptance_rate_is_the_overlap_of_the_laws(oracle):
    q, p = oracle["q"][0, 0], oracle["p"][0, 0]
    draws = 20000
    rng = np.random.default_rng(3)
    drafts = rng.choice(len(q), size=(draws, 1), p=q)
    rows = PackedRows.from_lens([1] * draws, 1)
    laws = np.broadcast_to(oracle["p"][0, :2], (draws, 2, len(q))).reshape(-1, len(q))
    verdict = verify_tokens(
        rows, laws, drafts, rng.random((draws, 1)), rng.random(draws), np.broadcast_to(q, (draws, 1, len(q)))
    )
    rate = oracle["accept_rate_tv"][0, 0]
    assert abs(np.minimum(p, q).sum() - rate) < 1e-12
    assert abs(verdict.accepted.mean() - rate) < 5 * np.sqrt(rate * (1 - rate) / draws)
