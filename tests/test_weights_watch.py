import pytest
import torch

from espnet_mega_bias.weights_watch import WeightsWatch


def build():
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))


@torch.no_grad()
def write(model):
    model[0].weight[0, 0] = 5.0


def load(model):
    model.load_state_dict(build().state_dict())


def assign(model):
    model.load_state_dict(build().state_dict(), assign=True)


def replace_parameter(model):
    model[1].bias = torch.nn.Parameter(torch.zeros(3))


def replace_module(model):
    model[0] = torch.nn.Linear(2, 3)


def optimize(model):
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()


@pytest.mark.parametrize(
    "change",
    [
        write,
        load,
        assign,
        replace_parameter,
        replace_module,
        optimize,
        torch.nn.Module.double,
        torch.nn.utils.parametrizations.weight_norm,
    ],
)
def test_a_change_is_noticed(change):
    model = build()
    watch = WeightsWatch(model)
    assert watch.unchanged()

    change(model[0] if "weight_norm" in change.__name__ else model)

    assert not watch.unchanged()


HOOKS = [
    torch.nn.Module.register_forward_hook,
    torch.nn.Module.register_forward_pre_hook,
    torch.nn.Module.register_full_backward_hook,
    torch.nn.Module.register_full_backward_pre_hook,
]


@pytest.mark.parametrize("register", HOOKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("other", [False, True])
def test_hooks_that_come_and_go_are_noticed(register, other):
    model = build()
    if other:
        model[1].register_forward_hook(print)

    watch = WeightsWatch(model)
    assert watch.unchanged()

    hook = register(model[0], print)
    assert not watch.unchanged()
    assert WeightsWatch(model).unchanged()

    hook.remove()
    assert watch.unchanged()


@pytest.mark.parametrize("place", [0, 1])
def test_a_hook_that_takes_the_place_of_another_is_noticed(place):
    model = build()
    hook = model[1].register_forward_hook(print)
    watch = WeightsWatch(model)

    hook.remove()
    model[place].register_forward_hook(print)

    assert not watch.unchanged()


def test_use_is_no_change():
    model = build()
    watch = WeightsWatch(model)

    model.eval()
    model(torch.ones(1, 2)).sum().backward()
    model.zero_grad()
    model.requires_grad_(False)

    assert watch.unchanged()


def test_weights_made_in_inference_mode_can_be_watched():
    with torch.inference_mode():
        model = build()

    watch = WeightsWatch(model)
    assert watch.unchanged()

    model[0].weight = torch.nn.Parameter(torch.ones(3, 2))
    assert not watch.unchanged()


def test_hooks_of_other_modules_do_not_count():
    model, other = build(), build()
    watch = WeightsWatch(model)

    other[0].register_forward_hook(print)
    assert watch.unchanged()

    model[0].register_forward_hook(print)
    assert not watch.unchanged()
