"""recipe.footprint: memory of the process and of objects."""

import mmap
import sys

import torch


def test_each_storage_and_object_counts_once(local):
    footprint = local("footprint").footprint
    tensor = torch.zeros(1000)
    views = [tensor[:10], tensor.view(10, 100), tensor]
    number = 10**6

    assert footprint(tensor) == 4000
    assert footprint(views) == 4000 + sys.getsizeof(views)
    assert footprint([number, number]) == sys.getsizeof([0, 0]) + sys.getsizeof(number)
    assert footprint({"a": tensor}, tensor) == footprint({"a": tensor})


def test_attributes_and_cycles_are_followed_but_not_into_modules(local):
    footprint = local("footprint").footprint
    module = torch.nn.Linear(100, 100)

    class Node:
        def __init__(self, tensor):
            self.tensor = tensor
            self.itself = self
            self.module = module

    small, large = Node(torch.zeros(10)), Node(torch.zeros(1010))
    assert footprint(large) - footprint(small) == 4000
    assert footprint(small) < 2000


def test_what_a_module_holds_can_be_left_out(local):
    footprint = local("footprint").footprint
    module = torch.nn.Linear(100, 10, bias=False)

    assert footprint(module.weight[:2]) == 4000
    assert footprint(module.weight[:2], without=module) == 0


def test_the_resident_memory_grows_with_what_is_held(local):
    resident = local("footprint").resident_bytes
    before = resident()

    # Not a tensor: it may get memory that the process holds from earlier tensors.
    with mmap.mmap(-1, 100_000_000) as held:
        for _ in range(100):
            held.write(bytes(1_000_000))

        assert 80e6 < resident() - before < 200e6
