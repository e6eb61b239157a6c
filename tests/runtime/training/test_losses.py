"""Draft losses and their gradients against reference values, and the geometry of training blocks."""

import pathlib

import pytest
import torch
from dspark.runtime.training.blocks import anchor_candidates, block_geometry, sample_anchors
from dspark.runtime.training.losses import LossWeights, dspark_sums, eagle3_sums, place_weights
from safetensors.torch import load_file

DATA = pathlib.Path(__file__).resolve().parents[2] / "data" / "speculative"
DECAY, GAMMA, NUM_TOKENS = 4.0, 5, 24


@pytest.fixture(scope="module")
def oracle():
    return load_file(DATA / "dspark_loss.safetensors")


def arguments(data, dtype=torch.float64):
    names = ("draft_logits", "target_logits", "target_ids", "confidence_logits")
    tensors = [data[name] if name == "target_ids" else data[name].to(dtype) for name in names]
    return [*tensors, place_weights(data["eval_mask"], DECAY)]


def test_dspark_terms_match_the_oracle(oracle):
    sums = dspark_sums(*arguments(oracle))
    weight = sums.weight + 1e-6
    assert (place_weights(oracle["eval_mask"], DECAY) - oracle["weights"]).abs().max() < 1e-7
    for got, name in ((sums.ce, "ce"), (sums.l1, "tv"), (sums.confidence, "conf")):
        assert abs(got / weight - oracle[f"loss_{name}"][0]) < 1e-7, name
    assert abs(sums.loss(LossWeights()) - oracle["loss_total"][0]) < 1e-7
    assert sums.loss(LossWeights(0, 0, 0)) == 0


def test_dspark_gradients_match_the_oracle(oracle):
    draft, target, ids, confidence, weights = arguments(oracle, torch.float32)
    draft, confidence, target = (x.clone().requires_grad_() for x in (draft, confidence, target))
    loss = dspark_sums(draft, target, ids, confidence, weights).loss(LossWeights())
    assert abs(loss.detach() - oracle["ref_loss_total"]) < 1e-5
    loss.backward()
    assert (draft.grad - oracle["ref_grad_draft_logits"]).abs().max() < 1e-7
    assert (confidence.grad - oracle["ref_grad_confidence_logits"]).abs().max() < 1e-7
    assert target.grad is None, "nothing flows into the target"


def test_the_confidence_term_does_not_train_the_draft(oracle):
    draft, target, ids, confidence, weights = arguments(oracle)
    draft.requires_grad_()
    loss = dspark_sums(draft, target, ids, confidence, weights).loss(LossWeights(0.0, 0.0, 1.0))
    loss.backward()
    assert (draft.grad == 0).all()
    draft = draft.detach()
    least = 1 - (draft.softmax(-1) - target.softmax(-1)).abs().sum(-1) / 2
    best = dspark_sums(draft, target, ids, torch.logit(least), weights).confidence
    for shift in (0.1, -0.1):
        moved = dspark_sums(draft, target, ids, torch.logit(least) + shift, weights).confidence
        assert moved > best, "the confidence is best at the chance of acceptance"
    assert (least - oracle["c_star"]).abs().max() < 1e-12


def test_ranks_share_one_sum_of_weights(oracle):
    parts = []
    for half in (slice(0, 1), slice(1, 2)):
        parts.append(dspark_sums(*[x[half] for x in arguments(oracle)]))
    weight = sum(part.weight for part in parts)
    together = sum(part.loss(LossWeights(), weight) for part in parts)
    # The small constant in the denominator enters once a rank.
    assert abs(together - oracle["loss_total"][0]) < 1e-6
    assert abs(sum(part.loss(LossWeights()) for part in parts) / 2 - oracle["loss_total"][0]) > 1e-4


def test_dflash_is_dspark_with_cross_entropy_alone(oracle):
    draft, target, ids, _, weights = arguments(oracle)
    loss = dspark_sums(draft, target, ids, None, weights).loss(LossWeights(1.0, 0.0, 0.0))
    assert abs(loss - oracle["loss_ce"][0]) < 1e-7
    nothing = dspark_sums(draft, target, ids, None, torch.zeros_like(weights))
    assert nothing.loss(LossWeights(1.0, 0.0, 0.0)) == 0


def test_half_precision_is_widened(oracle):
    draft, target, ids, confidence, weights = arguments(oracle, torch.bfloat16)
    sums = dspark_sums(draft, target, ids, confidence, weights)
    exact = dspark_sums(draft.double(), target.double(), ids, confidence.double(), weights)
    assert sums.ce.dtype == torch.float32
    assert abs(sums.loss(LossWeights()) - exact.loss(LossWeights())) < 1e-5


def by_anchor(step_logits, target_logits, loss_mask):
    """The reference's arrays by anchor, every token being one: row t of step i learns row t + 1 + i of the target, if
    there is one, and reads the mask at t + i."""
    num_steps, (size, num_tokens) = len(step_logits), loss_mask.shape
    draft = torch.stack(list(step_logits), dim=2)
    target, valid = torch.zeros_like(draft), torch.zeros(size, num_tokens, num_steps, dtype=torch.bool)
    for i in range(num_steps):
        for t in range(num_tokens - 1 - i):
            target[:, t, i], valid[:, t, i] = target_logits[:, t + 1 + i], loss_mask[:, t + i] > 0
    return draft.flatten(0, 1), target.flatten(0, 1), valid.flatten(0, 1)


def test_eagle3_matches_the_oracle():
    data = load_file(DATA / "eagle3_ttt_loss.safetensors")
    mask = data["loss_mask"]
    total, places = eagle3_sums(*by_anchor(data["draft_logits"], data["target_logits"], mask), decay=0.8)
    assert (places / mask.numel() - data["step_losses"]).abs().max() < 1e-12
    assert abs(total / mask.numel() - data["total"][0]) < 1e-12


def test_eagle3_steps_past_the_end_are_empty():
    logits = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    target = torch.randn(1, 3, 4, dtype=torch.float64)
    total, places = eagle3_sums(*by_anchor([logits] * 5, target, torch.ones(1, 3)), decay=0.8)
    assert (places[:2] > 0).all() and (places[2:] == 0).all()
    total.backward()
    assert (logits.grad[:, 2] == 0).all(), "the last token has nothing to learn"


def test_block_geometry_matches_the_oracle(oracle):
    mask, anchors, used = oracle["loss_mask"], oracle["anchors"], oracle["block_keep"]
    assert torch.equal(anchor_candidates(mask), oracle["anchor_candidates"])
    geometry = block_geometry(anchors, used, mask, GAMMA)
    assert torch.equal(geometry.label_index, oracle["label_index"])
    assert torch.equal(geometry.valid, oracle["eval_mask"])
    assert torch.equal(geometry.positions.flatten(1), oracle["block_position_ids"])


def test_unused_blocks_are_not_valid():
    anchors, used = torch.tensor([[5, 0]]), torch.tensor([[True, False]])
    geometry = block_geometry(anchors, used, torch.ones(1, 8), 2)
    assert geometry.valid.tolist() == [[[True, True], [False, False]]]


def test_anchor_sampling():
    mask = torch.zeros(2, 40)
    mask[0, 3:30] = 1
    mask[1, 10:13] = 1
    seen = torch.zeros(40)
    for seed in range(60):
        anchors, used = sample_anchors(mask, 6, torch.Generator().manual_seed(seed))
        assert anchors.shape == used.shape == (2, 6) and used.sum(1).tolist() == [6, 2]
        first = anchors[0].tolist()
        assert first == sorted(set(first)) and min(first) >= 3 and max(first) <= 28
        assert anchors[1].tolist() == [10, 11, 0, 0, 0, 0]
        seen[anchors[0]] += 1
    assert (seen[3:29] > 0).all(), "every candidate comes up"
    again, _ = sample_anchors(mask, 6, torch.Generator().manual_seed(59))
    assert torch.equal(again, anchors)
    few, used = sample_anchors(mask[1:], 6, torch.Generator().manual_seed(0))
    assert few.tolist() == [[10, 11]] and used.all()
    none, used = sample_anchors(torch.zeros(2, 5), 6, torch.Generator().manual_seed(0))
    assert none.shape == used.shape == (2, 0)
