"""Chain drafts: which keys a row sees, what a chain depends on, and a chain against rows recomputed one by one."""

import pytest
import torch
from dspark.runtime.training.batches import build_batch
from dspark.runtime.training.chain_draft import window_in_sequence
from dspark.runtime.training.stage import Keys, scoped, stage_forward


@pytest.mark.parametrize("window", [1, 2, 5, 6])
def test_window_keys(window):
    lengths = torch.tensor([3, 9, 1, 7])
    begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    num_rows = len(begins)
    padded = -(-num_rows // window) * window
    own = torch.arange(1.0, padded + 1).view(-1, window, 1)  # a key is its row's number, from 1
    keys, visible = window_in_sequence(begins, window)(own)
    for row in range(num_rows):
        chunk, place = divmod(row, window)
        seen = keys[chunk, visible[chunk, place], 0].tolist()
        first = max(int(begins[row]), row - window + 1)
        assert sorted(seen) == [float(r + 1) for r in range(first, row + 1)], row


def make_batch(data, anchors, gamma=5):
    batch = build_batch(data, list(range(len(data.sources))), 4, gamma, seed=0)
    anchors = torch.tensor(anchors)
    return batch._replace(anchors=anchors, valid=torch.ones(len(anchors), gamma, dtype=torch.bool))


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_the_first_draft_reads_the_window_up_to_the_anchor(method, make_draft, make_data):
    model, data = make_draft(method).model, make_data(method, lengths=(30, 30))
    batch = make_batch(data, [20, 45])
    labels = batch.labels
    base = model.chain(batch, 3, lambda k, _: labels[:, k])[0].detach()
    for row in range(60):
        features = batch.features.clone()
        features[row] += 1.0
        other = model.chain(batch._replace(features=features), 3, lambda k, _: labels[:, k])[0].detach()
        changed = (other - base).abs().amax(-1) > 1e-5
        # Keys of rows anchor - 6 .. anchor - 1 for the first draft; the window moves on with the chain.
        expected = [[anchor - 6 + k <= row <= anchor - 1 for k in range(3)] for anchor in (20, 45)]
        assert (changed | ~torch.tensor(expected)).all() or changed.tolist() == expected, row
        if row >= 20:
            assert not changed[0].any(), row
        if row < 14 or 20 <= row < 39 or row >= 45:
            assert not changed[:, 0].any(), row


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_a_chain_equals_its_rows_run_one_by_one(method, make_draft, make_data):
    """The chain of one anchor, recomputed with plain loops over an explicit list of keys."""
    draft = make_draft(method)
    model, data = draft.model, make_data(method, lengths=(30, 30))
    anchor, gamma = 50, 4
    batch = make_batch(data, [anchor], gamma)
    labels = batch.labels
    logits, _ = model.chain(batch, gamma, lambda k, _: labels[:, k])
    weights, fusion, config = scoped(model.weights, "mtp.0."), model.fusion, model.config
    begin, window = 30, config.sliding_window
    keys: list[torch.Tensor] = []
    state = None
    for row in range(begin, anchor - 1 + gamma):
        if row < anchor:
            state = fusion.start(weights, batch.features[row : row + 1])
        token = batch.ids[row + 1 : row + 2]
        streams = fusion.join(weights, state, model.ends.embed[token])

        def seen(own):
            keys.append(own[0, 0])
            reach = torch.stack(keys[-window:]).unsqueeze(0)
            return Keys(reach, torch.ones(1, 1, reach.shape[1], dtype=torch.bool))

        position = torch.tensor([[row - begin]])
        streams, _ = stage_forward(weights, streams, seen, position, model.rope, model._sizes)
        state = fusion.carry(weights, streams)
        if row >= anchor - 1:
            from dspark.layers.kernels.hyper_connection import weighted_norm
            from dspark.runtime.training.stage import collapse

            hidden = weighted_norm(collapse(weights, streams, config), weights["norm.weight"], config.rms_norm_eps)
            mine = hidden @ model.ends.head.T
            torch.testing.assert_close(logits[0, row - anchor + 1], mine[0], rtol=1e-4, atol=1e-4)


def test_mtp_learns_the_token_after_next_of_its_own_sequence(make_draft, make_data):
    draft, data = make_draft("mtp"), make_data("mtp", lengths=(4, 3, 2))
    batch = make_batch(data, [1])
    rows = draft.model.first_rows(batch).hidden @ draft.model.ends.head.T
    pairs = [(0, 2), (1, 3), (4, 6)]
    expected = sum(torch.nn.functional.cross_entropy(rows[t], batch.ids[u]) for t, u in pairs)
    sums = draft.sums(batch)
    assert float(sums.weight) == 3
    torch.testing.assert_close(sums.loss, expected)


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_every_weight_gets_a_gradient(method, make_draft, make_data):
    draft, data = make_draft(method), make_data(method)
    sums = draft.sums(build_batch(data, list(range(6)), 40, 5, seed=0))
    (sums.loss / sums.weight).backward()
    trained = {name: weight for name, weight in draft.weights.items() if weight.requires_grad}
    without = [name for name, weight in trained.items() if weight.grad is None or not weight.grad.abs().max() > 0]
    assert without == []
