"""Settings of an optimizer's groups belong to a checkpoint: a schedule that was resumed goes on with its rate."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.checkpoint.one_rank import saver, state
from tests.polling import WAIT_SECONDS_MAX
from torch import nn

from muster.trainer.checkpoint import CheckpointMismatch, load, read_commit
from muster.trainer.checkpoint.optimizer_state import settings_to_adopt
from muster.words.checkpoint import Commit, OptimizerGroup

Schedule = torch.optim.lr_scheduler.LRScheduler


def build(*groups: dict[str, Any]) -> tuple[nn.Linear, torch.optim.Optimizer, Schedule]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    of = [{**group, "params": [getattr(model, name) for name in group["params"]]} for group in groups]
    optimizer = torch.optim.AdamW(of or model.parameters(), lr=0.5, betas=(0.8, 0.9))
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def train(model: nn.Linear, optimizer: torch.optim.Optimizer, schedule: Schedule, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4)).square().sum().backward()
        optimizer.step()
        schedule.step()


def test_a_schedule_goes_on_with_its_rate_and_the_weights_are_those_of_one_run(tmp_path: Path) -> None:
    whole, optimizer, schedule = build()
    train(whole, optimizer, schedule, 7)
    model, optimizer, schedule = build()
    with saver(tmp_path.as_uri()) as saving:
        train(model, optimizer, schedule, 5)
        saving.save(state(model, optimizer, 5), emergency=True)
        assert [(o.step, o.committed) for o in saving.drain(WAIT_SECONDS_MAX)] == [(5, True)]
    (group,) = read_commit(tmp_path.as_uri(), 5).optimizer_groups
    assert group.parameters == ("weight", "bias")
    assert group.settings["lr"] == 0.125
    assert group.settings["betas"] == [0.8, 0.9]
    assert not {"params", "fused", "foreach"} & group.settings.keys()
    resumed, optimizer, fresh = build()
    load(tmp_path.as_uri(), 5, resumed, optimizer)
    fresh.load_state_dict(schedule.state_dict())
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (0.125, (0.8, 0.9))
    train(resumed, optimizer, fresh, 2)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_groups_are_matched_by_their_parameters(tmp_path: Path) -> None:
    decays, plain = {"params": ["weight"], "weight_decay": 0.25}, {"params": ["bias"], "weight_decay": 0.0}
    model, optimizer, schedule = build(decays, plain)
    with saver(tmp_path.as_uri()) as saving:
        train(model, optimizer, schedule, 1)
        saving.save(state(model, optimizer, 1), emergency=True)
        saving.drain(WAIT_SECONDS_MAX)
        model_2 = nn.Linear(4, 4)  # a group that comes later is saved too, with nothing else changed
        optimizer_2 = torch.optim.AdamW([{"params": [model_2.weight], "lr": 0.25}])
        saving.save(state(model_2, optimizer_2, 2), emergency=True)
        saving.drain(WAIT_SECONDS_MAX)
        optimizer_2.add_param_group({"params": [model_2.bias], "lr": torch.tensor(0.75)})
        saving.save(state(model_2, optimizer_2, 3), emergency=True)
        saving.drain(WAIT_SECONDS_MAX)
    groups = read_commit(tmp_path.as_uri(), 3).optimizer_groups
    assert [(each.parameters, each.settings["lr"]) for each in groups] == [(("weight",), 0.25), (("bias",), 0.75)]
    other, turned, _ = build(plain | {"weight_decay": 0.5}, decays | {"weight_decay": 0.5})
    load(tmp_path.as_uri(), 1, other, turned)
    assert [group["weight_decay"] for group in turned.param_groups] == [0.0, 0.25]
    one, single, _ = build()
    before = one.weight.detach().clone()
    with pytest.raises(CheckpointMismatch, match=r"param_groups\[0\]: the checkpoint has several groups"):
        load(tmp_path.as_uri(), 1, one, single)
    assert torch.equal(one.weight, before)


def test_a_rate_that_is_a_tensor_stays_one(tmp_path: Path) -> None:
    model, optimizer, schedule = build()
    with saver(tmp_path.as_uri()) as saving:
        train(model, optimizer, schedule, 2)
        optimizer.param_groups[0]["made"] = len  # a function is the program's to make again
        saving.save(state(model, optimizer, 2), emergency=True)
        saving.drain(WAIT_SECONDS_MAX)
    model, optimizer, _ = build()
    rate = torch.tensor(0.5)
    optimizer.param_groups[0]["lr"] = rate
    load(tmp_path.as_uri(), 2, model, optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25
    assert "made" not in optimizer.param_groups[0]


@pytest.mark.parametrize(
    ("live", "saved"),
    [(0.1, None), (0.1, "x"), (0.1, True), (0.1, 10**400), ((0.9, 0.99), None), ((0.9, 0.99), [0.9]), (True, 1),
     ((0.9, 0.99), [0.9, "x"]), (torch.tensor(0.1), [0.1]),
     (torch.tensor(0.1), 1e300), ("exact", 3), (None, {}), (len, 0.5)],
)  # fmt: skip
def test_a_setting_of_another_kind_is_a_difference(live: object, saved: object) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0]["made"] = live
    group = {"parameters": ("weight", "bias"), "settings": {"made": saved, "lr": 1}}
    commit = Commit(
        job="j", job_uid="u", attempt=1, step=1, committed_at=1.0, world_size=1, files=(),
        optimizer_groups=(OptimizerGroup.model_validate(group),),
    )  # fmt: skip
    if live is None:  # it was not set
        assert settings_to_adopt(commit, model, optimizer, "here")[0]["made"] == saved
        return
    with pytest.raises(CheckpointMismatch, match=r"optimizer\.param_groups\[0\]: made is .* in the checkpoint, and "):
        settings_to_adopt(commit, model, optimizer, "here")
