"""The loop: a resumed run is the same run, ranks share a batch, the loss falls, routers balance."""

import json

import pytest
import torch
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.training.batches import build_batch, draw_sequences
from dspark.runtime.training.methods import METHODS
from dspark.runtime.training.trainer import LOG_NAME, STATE_NAME, Trainer, TrainOptions, run_identity

OPTIONS = TrainOptions(steps=6, gamma=5, tokens=60, anchors=12, lr=3e-3, warmup=2, save_every=3, log_every=1)


def make_trainer(draft, data, folder, group=None, **changes):
    options = OPTIONS.__class__(**(OPTIONS.__dict__ | changes))
    folder.mkdir(parents=True, exist_ok=True)
    group = Groups.single().world if group is None else group
    return Trainer(draft, data, options, group, torch.device("cpu"), folder, run_identity(options))


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_is_bitwise_the_same_run(method, make_draft, make_data, tmp_path):
    whole = make_trainer(make_draft(method), make_data(method), tmp_path / "whole")
    whole.run()
    first = make_trainer(make_draft(method), make_data(method), tmp_path / "cut")

    class Stop(Exception):
        pass

    def stop(step):
        if step == 5:  # the state of step 3 is on disk
            raise Stop

    with pytest.raises(Stop):
        first.run(stop)
    again = make_trainer(make_draft(method, seed=99), make_data(method), tmp_path / "cut")
    assert again.resume() and again.step == 3
    again.run()
    for name, weight in whole.draft.weights.items():
        assert torch.equal(weight, again.draft.weights[name]), name
    logs = [[json.loads(x) for x in (tmp_path / part / LOG_NAME).read_text().splitlines()] for part in ("whole", "cut")]
    assert [line["step"] for line in logs[1]] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in logs[0]] == [line["loss"] for line in logs[1]]


def test_another_run_is_refused(make_draft, make_data, tmp_path):
    make_trainer(make_draft(), make_data(), tmp_path, steps=1).run()
    with pytest.raises(ValueError, match="another run"):
        make_trainer(make_draft(), make_data(), tmp_path, lr=1e-4).resume()
    assert make_trainer(make_draft(), make_data(), tmp_path, steps=50).resume(), "a longer run continues"


def train_on_ranks(rank, world, draft, data, folder):
    group = Groups.build(Topology.make(world), rank).world
    trainer = make_trainer(draft, data, folder, group, lr=SMALL)
    trainer.run()
    grads = {name: weight.grad.numpy() for name, weight in draft.weights.items() if weight.requires_grad}
    return {name: weight.detach().numpy() for name, weight in draft.weights.items()}, grads


# The optimizer divides by the size of a gradient, so where that is all rounding, weights differ by some learning rates.
SMALL = 1e-5


@pytest.mark.parametrize("method", ["dspark", "mtp"])
def test_two_ranks_train_as_one(method, make_draft, make_data, tmp_path, run_ranks):
    one = make_draft(method)
    make_trainer(one, make_data(method), tmp_path / "one", lr=SMALL).run()
    results = run_ranks(train_on_ranks, 2, make_draft(method), make_data(method), tmp_path / "two")
    start = make_draft(method).weights
    for name, weight in one.weights.items():
        for weights, grads in results:
            assert torch.from_numpy(weights[name]).sub(weight).abs().max() < 1e-5, name
            if weight.requires_grad:
                assert torch.from_numpy(grads[name]).sub(weight.grad).abs().max() < 1e-5, name
    moved = [float((weight - start[name]).abs().max()) for name, weight in one.weights.items()]
    assert max(moved) > 2 * SMALL, "the runs would agree even if they did nothing"
    losses = []
    for part in ("one", "two"):
        lines = (tmp_path / part / LOG_NAME).read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_falls(method, make_draft, make_data, tmp_path):
    trainer = make_trainer(make_draft(method), make_data(method), tmp_path, steps=30, lr=1e-2, anchors=32, tokens=120)
    trainer.run()
    losses = [json.loads(line)["loss"] for line in (tmp_path / LOG_NAME).read_text().splitlines()]
    assert len(losses) == 30 and sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_without_a_sequence_adds_nothing(method, make_draft, make_data):
    draft, data = make_draft(method), make_data(method)
    nothing = build_batch(data, [0], 4, 5, seed=0, rank=1, num_ranks=2)
    assert len(nothing.ids) == len(nothing.anchors) == 0
    sums = draft.sums(nothing)
    (sums.loss / 1.0).backward()
    assert sums.loss.item() == sums.weight.item() == 0.0
    for weight in draft.weights.values():
        assert weight.grad is None or not weight.grad.any()


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_products(method, make_draft, make_data, tmp_path):
    losses = []
    for autocast in (False, True):
        folder = tmp_path / str(autocast)
        make_trainer(make_draft(method), make_data(method), folder, autocast=autocast).run()
        losses.append([json.loads(line)["loss"] for line in (folder / LOG_NAME).read_text().splitlines()])
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.05)


def test_router_biases_move_against_the_load(make_draft, make_data, tmp_path):
    trainer = make_trainer(make_draft(), make_data(), tmp_path)
    bias = trainer.draft.weights["mtp.0.ffn.gate.bias"]
    before = bias.clone()
    trainer._balance(torch.tensor([[9.0, 1.0, 4.0, 2.0]]))
    assert ((bias - before) / trainer.options.balance_rate).tolist() == pytest.approx([-1, 1, 0, 1], abs=1e-3)


def test_state_is_replaced_whole(make_draft, make_data, tmp_path):
    make_trainer(make_draft(), make_data(), tmp_path, steps=1).run()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([LOG_NAME, STATE_NAME])


def test_learning_rate():
    options = TrainOptions(steps=100, gamma=5, lr=1.0, lr_floor=0.1, warmup=10)
    rates = [options.learning_rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0) and max(rates) == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.55) and 0.1 <= rates[-1] < 0.11
    assert all(a >= b for a, b in zip(rates[10:], rates[11:]))


def test_batches_depend_on_seed_and_step_alone(make_data):
    data = make_data()
    lengths = data.starts.diff()
    assert draw_sequences(lengths, 60, 1, 5) == draw_sequences(lengths, 60, 1, 5)
    drawn = {tuple(draw_sequences(lengths, 60, 1, step)) for step in range(20)}
    assert len(drawn) > 10
    for picked in drawn:
        assert len(set(picked)) == len(picked)
        assert sum(int(lengths[q]) for q in picked[:-1]) < 60 <= sum(int(lengths[q]) for q in picked)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_ranks_partition_a_batch(make_data, num_ranks):
    data = make_data()
    sequences = [3, 0, 5, 1]
    whole = build_batch(data, sequences, 20, 5, seed=7)
    parts = [build_batch(data, sequences, 20, 5, 7, rank, num_ranks) for rank in range(num_ranks)]
    assert torch.equal(torch.cat([part.ids for part in parts]), whole.ids)
    offsets = torch.tensor([0] + [len(part.ids) for part in parts]).cumsum(0)
    anchors = torch.cat([part.anchors + offset for part, offset in zip(parts, offsets)])
    assert torch.equal(anchors, whole.anchors)
    assert torch.equal(torch.cat([part.valid for part in parts]), whole.valid)
    assert (whole.positions[whole.begins == torch.arange(len(whole.ids))] == 0).all()
    for part in parts:
        places = torch.arange(5)
        ends = torch.tensor([int((part.begins == begin).nonzero().max()) for begin in part.begins[part.anchors]])
        assert torch.equal(part.valid, part.anchors[:, None] + 1 + places <= ends[:, None].view(-1, 1))
        assert torch.equal(part.labels[part.valid], part.ids[(part.anchors[:, None] + 1 + places)[part.valid]])
