"""The training-side forward of block drafts: reference values, what a block sees, gradients."""

import json
import pathlib

import pytest
import torch
from dspark.layers.kernels.hyper_connection import hc_post, hc_pre
from dspark.runtime.training.batches import Batch, build_batch
from dspark.runtime.training.losses import LossWeights
from dspark.runtime.training.stage import StreamMix, collapse, read_streams, write_streams
from safetensors.torch import load_file

DATA = pathlib.Path(__file__).resolve().parents[2] / "data" / "training"


def test_context_and_stream_head_match_the_reference(make_draft):
    ref = load_file(DATA / "v4_draft_context.safetensors")
    draft = make_draft(target_layer_ids=(0, 1, 2))
    features = torch.cat([streams.mean(1) for streams in ref["streams"]], dim=-1)
    torch.testing.assert_close(features, ref["features"])
    weights = {"mtp.0.main_proj.weight": ref["main_proj"].float(), "mtp.0.main_norm.weight": ref["main_norm"].float()}
    draft.model.weights = dict(draft.weights) | weights
    context = draft.model.context(ref["features"].float())
    torch.testing.assert_close(context.double(), ref["context"], rtol=1e-5, atol=1e-5)
    head = {name: ref[name].float() for name in ("hc_head_fn", "hc_head_base", "hc_head_scale")}
    mixed = collapse(head, ref["head_in"].float(), draft.model.config)
    torch.testing.assert_close(mixed.double(), ref["head_out"], rtol=1e-5, atol=1e-5)


def test_window_matches_the_reference(make_draft):
    cases = json.loads((DATA / "v4_draft_visibility.json").read_text())
    assert len(cases) == 21
    for case in cases:
        model = make_draft(window=case["window"]).model
        anchor = case["anchor_position"]
        rows, exists = model.window(torch.tensor([anchor]), torch.zeros(anchor + 1, dtype=torch.int64))
        seen = rows[0][exists[0]].tolist()
        bounds = case["context_positions"]
        assert seen == (list(range(bounds[0], bounds[1] + 1)) if bounds else [])
        assert [anchor + k for k in range(case["gamma"])] == case["block_positions"]
        assert seen + case["block_positions"] == case["keys_seen_by_every_query"]


def block_batch(data, anchors, gamma=5):
    batch = build_batch(data, list(range(len(data.sources))), 4, gamma, seed=0)
    anchors = torch.tensor(anchors)
    return batch._replace(anchors=anchors, valid=torch.ones(len(anchors), gamma, dtype=torch.bool))


def perturbed(batch: Batch, row: int) -> Batch:
    features = batch.features.clone()
    features[row] += 1.0
    return batch._replace(features=features)


def differs(a, b):
    """[A, γ] bool: beyond what regrouping rows by expert does to rounding."""
    return (a.detach() - b.detach()).abs().amax(-1) > 1e-5


def test_a_block_sees_the_window_before_its_anchor_and_nothing_else(make_draft, make_data):
    model, data = make_draft().model, make_data(lengths=(30, 30))
    anchors = [20, 45]  # position 20 of the first sequence, 15 of the second; the window is 6
    batch = block_batch(data, anchors)
    base = model.backbone(batch).normed.detach()
    for row in range(60):
        changed = differs(model.backbone(perturbed(batch, row)).normed, base)
        assert changed.any(1).tolist() == [14 <= row <= 19, 39 <= row <= 44], row
        assert changed.any(1).tolist() == changed.all(1).tolist(), "all places of a block see the same context"


def test_the_window_stops_at_the_sequence_begin(make_draft, make_data):
    model, batch = make_draft().model, block_batch(make_data(lengths=(30, 30)), [32])
    base = model.backbone(batch).normed.detach()
    changes = [row for row in range(60) if differs(model.backbone(perturbed(batch, row)).normed, base).any()]
    assert changes == [30, 31]


def test_places_of_a_block_see_later_places_and_no_other_block(make_draft, make_data):
    model, data = make_draft().model, make_data(lengths=(30, 30))
    batch = block_batch(data, [20, 45])
    four, five = model.backbone(batch, 4).normed.detach(), model.backbone(batch, 5).normed.detach()
    assert differs(four, five[:, :4]).all(), "one more mask changes every earlier place"
    ids = batch.ids.clone()
    ids[45] = (ids[45] + 1) % 40
    other = model.backbone(batch._replace(ids=ids)).normed.detach()
    assert differs(other, five).any(1).tolist() == [False, True]


def test_positions_are_absolute(make_draft, make_data):
    """A sequence gives the same blocks wherever it lies in a batch, and at other absolute positions nearly so."""
    model, data = make_draft().model, make_data(lengths=(30, 30))
    alone = data.select([1])
    there = model.backbone(block_batch(data, [50])).normed
    here = model.backbone(block_batch(alone, [20])).normed
    torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sublayer", ["attn", "ffn"])
def test_streams_are_read_and_written_as_in_inference(make_draft, tiny_config, sublayer):
    weights = {name.removeprefix("mtp.0."): w.detach() for name, w in make_draft().weights.items()}
    streams = torch.randn(7, 4, 16, generator=torch.Generator().manual_seed(5))
    ours = read_streams(weights, sublayer, streams, tiny_config)
    theirs = hc_pre(
        streams,
        fn=weights[f"hc_{sublayer}_fn"].T,
        base=weights[f"hc_{sublayer}_base"],
        scale=weights[f"hc_{sublayer}_scale"],
        norm_weight=weights[f"{sublayer}_norm.weight"],
        hc_eps=1e-6,
        norm_eps=1e-6,
        num_iters=20,
        constrained=True,
    )
    for mine, reference in zip(ours, theirs):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)
    y = torch.randn(7, 16, generator=torch.Generator().manual_seed(6))
    new = write_streams(streams, y, StreamMix(*ours))
    torch.testing.assert_close(new, hc_post(streams, y, theirs.post, theirs.comb), rtol=1e-5, atol=1e-5)


def loss_of(draft, batch):
    sums = draft.sums(batch)
    return sums.loss / sums.weight


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_gradients_are_slopes(make_draft, make_data, kind):
    """Along its own direction, each weight's gradient is the loss's slope by central differences."""
    # No confidence term here: its labels move with the draft, but carry no gradient.
    factors = LossWeights(0.1, 0.9, 0.0)
    draft, batch = make_draft(markov_head=kind, factors=factors), block_batch(make_data(), [5, 20, 33, 50, 70])
    loss_of(draft, batch).backward()
    checked = 0
    for name, weight in draft.weights.items():
        if not weight.requires_grad or name.endswith("confidence_head.proj.weight"):
            continue
        slope = float(weight.grad.norm())
        assert slope > 0, f"{name} gets no gradient"
        if slope < 3e-3:
            continue  # below what float32 differences resolve
        direction, step = weight.grad / slope, 2e-3
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                weight += sign * step * direction
                values.append(float(loss_of(draft, batch)))
                weight -= sign * step * direction
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=0.05, abs=5e-4), name
        checked += 1
    assert checked > 25


def test_the_confidence_head_learns_from_its_own_term_only(make_draft, make_data):
    batch = block_batch(make_data(), [5, 20, 33, 50, 70])
    with_term, without = make_draft(factors=LossWeights(0.1, 0.9, 1.0)), make_draft(factors=LossWeights(0.1, 0.9, 0.0))
    for draft in (with_term, without):
        loss_of(draft, batch).backward()
    name = "mtp.0.confidence_head.proj.weight"
    assert with_term.weights[name].grad.norm() > 0
    assert without.weights[name].grad is None or without.weights[name].grad.norm() == 0


def test_dflash_is_the_backbone_alone(make_draft, make_data):
    draft, batch = make_draft("dflash"), block_batch(make_data(), [5, 20])
    assert not [name for name in draft.weights if "markov" in name or "confidence" in name]
    out = draft.model.backbone(batch)
    assert torch.equal(draft.model.teacher_forced(batch), out.normed @ draft.model.ends.head.T)


def test_stages_follow_the_layers_read(make_draft, make_data):
    draft = make_draft(target_layer_ids=(1, 3))
    data = make_data()
    batch = block_batch(data._replace(features=data.features.repeat(1, 2)), [5, 20])
    assert {name.split(".")[1] for name in draft.weights} == {"0", "1"}
    loss_of(draft, batch).backward()
    assert all(w.grad is not None for n, w in draft.weights.items() if n.startswith("mtp.1.attn.wkv"))
