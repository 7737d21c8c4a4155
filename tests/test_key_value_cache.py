import pytest
import torch

from espnet_mega_bias.key_value_cache import join, new_cache


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def append(cache, numbers):
    """Append rows that hold their number in each of two blocks."""
    first, cache.used = cache.used, cache.used + len(numbers)

    for block, buffer in enumerate(cache.buffer):
        for row, number in zip(range(first, cache.used), numbers, strict=True):
            buffer[row] = 100.0 * block + number

    return torch.arange(first, cache.used)


def make(count):
    return new_cache(torch.empty(2, 0, 3), count)


def read(cache, rows):
    """The numbers in some rows, checked to be the same in both blocks."""
    first, second = cache.buffer[:, rows]

    assert (second - first == 100.0).all()
    assert (second == second[:, :1]).all()
    assert (rows < cache.used).all()

    return first[:, 0].tolist()


def test_rows_are_appended_in_place_while_there_is_room():
    cache = make(2)
    rows = append(cache, [1, 2])
    joint, (where,) = join([(cache, rows)], 5)

    assert joint is cache
    assert where is rows


def test_a_full_cache_is_left_and_all_who_follow_meet_again():
    cache = make(1)
    room = cache.buffer.size(1)
    rows = append(cache, range(room))
    ours, theirs, others = rows[:4], rows[2:9], rows[[0, 30]]

    joint, places = join([(cache, ours), (cache, theirs)], 2)
    append(joint, [50, 51])
    later, (place,) = join([(cache, others)], 1)

    assert joint is not cache
    assert later is joint
    assert read(joint, places[0]) == [0, 1, 2, 3]
    assert read(joint, places[1]) == list(range(2, 9))
    assert read(joint, place) == [0, 30]
    # Shared rows are held once: 0 to 8, two new ones, and the one that came later.
    assert joint.used == 9 + 2 + 1
    assert read(cache, rows) == list(range(room))


def test_rows_are_found_through_many_moves():
    cache = first = make(1)
    rows = kept = append(cache, [7, 8, 9])

    for number in range(400):
        cache, (rows,) = join([(cache, rows[-3:])], 1)
        rows = torch.cat([rows, append(cache, [number])])

    assert read(cache, rows) == [396, 397, 398, 399]

    last, (place,) = join([(first, kept)], 1)
    assert read(last, place) == [7, 8, 9]
    # Nothing that is out of use is carried along.
    assert cache.buffer.size(1) < 100


def test_rows_of_strangers_are_joined():
    one, other = make(2), make(3)
    rows, more = append(one, [1, 2]), append(other, [3, 4, 5])

    joint, places = join([(one, rows), (other, more), (one, rows[1:])], 2)

    assert [read(joint, place) for place in places] == [[1, 2], [3, 4, 5], [2]]
    assert joint.used == 5
    assert joint.has_room(2)


def test_rows_that_autograd_may_need_are_never_written_beside():
    cache = make(2)
    rows = append(cache, [1, 2])

    with torch.enable_grad():
        joint, (place,) = join([(cache, rows)], 1)

    assert joint is not cache
    assert read(joint, place) == [1, 2]
    # And those without gradients go on in place, as if nothing had been.
    assert join([(cache, rows)], 1)[0] is cache


def test_rows_made_in_inference_mode_can_be_gone_on_from_outside():
    with torch.inference_mode():
        cache = make(2)
        rows = append(cache, [1, 2])
        assert join([(cache, rows)], 1)[0] is cache

    joint, (place,) = join([(cache, rows.clone())], 1)
    append(joint, [3])

    assert read(joint, place) == [1, 2]
