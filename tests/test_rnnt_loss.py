import math
import sys

import pytest
import torch
from reference.rnnt_loss import fastemit_gradient, transducer_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torchaudio import functional

from espnet_mega_bias import RNNTLoss, rnnt_loss

CASES = [
    # frames, labels
    ([4, 3], [3, 2]),
    ([4, 4], [3, 0]),
    ([2, 3], [0, 0]),
    ([1, 1], [5, 2]),
    ([2, 1], [4, 4]),
    ([1], [0]),
]
VOCAB = 5

# warp-transducer divides the sum by the batch size, not by frames or labels.
REDUCE = {
    "none": lambda costs: costs,
    "mean": lambda costs: costs.sum() / len(costs),
    "sum": lambda costs: costs.sum(),
}

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def draw(frames, labels, extra=0, blank=0, dtype=torch.float32):
    """Logits and targets, `extra` frames and labels wider than the longest item."""
    batch = len(frames)
    width = max(labels) + extra
    logits = torch.randn(batch, max(frames) + extra, width + 1, VOCAB) * 2

    return (
        logits.to(dtype).requires_grad_(),
        torch.randint(1, VOCAB, (batch, width)) - int(blank > 0),
        torch.tensor(frames),
        torch.tensor(labels),
    )


def reference(loss, logits, targets, frames, labels, cotangent):
    """Value and gradient of the sum over alignments, in float64."""
    logits = logits.detach().double().requires_grad_()
    items = [
        (logits[row, :t, : u + 1], targets[row, :u].tolist(), loss.blank)
        for row, (t, u) in enumerate(zip(frames.tolist(), labels.tolist(), strict=True))
    ]
    costs = torch.stack([transducer_loss(*item) for item in items])
    value = REDUCE[loss.reduction](costs)

    if loss.fastemit_lambda == 0.0:
        return value, *torch.autograd.grad(value, logits, cotangent.double())

    (shares,) = torch.autograd.grad(value, costs, cotangent.double())
    gradient = torch.zeros_like(logits, requires_grad=False)

    for row, (item, share) in enumerate(zip(items, shares, strict=True)):
        t, u, _ = item[0].shape
        scaled = fastemit_gradient(*item, loss.fastemit_lambda).detach()
        gradient[row, :t, :u] = share * scaled

    return value, gradient


@pytest.fixture
def assert_equals_reference(assert_close_espnet, assert_no_worse):
    """Compare value and gradient with the sum over alignments; return the gradient."""

    def check(loss, logits, *rest):
        actual = loss(logits, *rest)
        cotangent = torch.randn_like(actual)
        (gradient,) = torch.autograd.grad(actual, logits, cotangent)
        value, exact = reference(loss, logits, *rest, cotangent)

        assert actual.dtype == torch.float32
        assert_close_espnet(actual.double(), value)

        if torch.finfo(logits.dtype).bits == 16:
            assert_no_worse(gradient, exact.to(logits.dtype), exact)
        else:
            assert gradient.dtype == logits.dtype
            assert_close_espnet(gradient.double(), exact)

        return gradient

    return check


@pytest.mark.parametrize(("frames", "labels"), CASES)
@pytest.mark.parametrize("blank", [0, VOCAB - 1])
def test_value_and_gradient_equal_the_sum_over_alignments(
    frames, labels, blank, assert_equals_reference
):
    """F7: no labels, fewer frames than labels, a single frame."""
    inputs = draw(frames, labels, blank=blank)

    assert_equals_reference(RNNTLoss(blank=blank, reduction="none"), *inputs)


@pytest.mark.parametrize(("frames", "labels"), CASES)
@pytest.mark.parametrize(("weight", "blank"), [(0.01, 0), (2.0, VOCAB - 1)])
def test_fastemit_scales_the_gradient_of_labels_and_leaves_the_loss(
    frames, labels, weight, blank, assert_equals_reference
):
    """F8."""
    loss = RNNTLoss(blank=blank, fastemit_lambda=weight, reduction="none")

    assert_equals_reference(loss, *draw(frames, labels, extra=1, blank=blank))


@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("reduction", REDUCE)
def test_reductions_are_those_of_warp_transducer(
    reduction, weight, assert_equals_reference
):
    loss = RNNTLoss(fastemit_lambda=weight, reduction=reduction)

    assert_equals_reference(loss, *draw([4, 3, 2], [3, 2, 1]))


@pytest.mark.parametrize(("frames", "labels"), CASES)
def test_padding_wider_than_the_longest_item_counts_for_nothing(
    frames, labels, assert_equals_reference
):
    """F1, F5: gradients are exactly 0 in the padding, and sum to 0 before it."""
    inputs = draw(frames, labels, extra=3)

    gradient = assert_equals_reference(RNNTLoss(reduction="none"), *inputs)

    for row, (t, u) in enumerate(zip(frames, labels, strict=True)):
        assert not gradient[row, t:].any()
        assert not gradient[row, :, u + 1 :].any()
        assert gradient[row, :t, : u + 1].sum(-1).abs().max() < 1e-5


def test_padding_may_hold_anything():
    logits, targets, *lengths = draw([4, 3], [3, 2], extra=1)
    loss = RNNTLoss()
    expected = loss(logits, targets, *lengths)
    (gradient,) = torch.autograd.grad(expected, logits)

    dirty = logits.detach().clone()

    for row, (t, u) in enumerate(zip(*lengths, strict=True)):
        dirty[row, t:] = math.nan
        dirty[row, :, u + 1 :] = math.nan
        targets[row, u:] = -1 if row else 999

    actual = loss(dirty.requires_grad_(), targets, *lengths)

    assert torch.equal(actual, expected)
    assert torch.equal(*torch.autograd.grad(actual, dirty), gradient)


@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integer_types_and_layouts_do_not_matter(dtype, weight):
    """F2."""
    logits, targets, frames, labels = draw([4, 3], [3, 2])
    loss = RNNTLoss(fastemit_lambda=weight)
    expected = loss(logits, targets, frames, labels)
    (gradient,) = torch.autograd.grad(expected, logits)

    turned = logits.detach().transpose(1, 2).contiguous().transpose(1, 2)
    turned.requires_grad_()
    wide = torch.stack([targets, targets], dim=-1).to(dtype)
    lengths = torch.stack([frames, labels], dim=-1).to(dtype)

    actual = loss(turned, wide[..., 0], lengths[:, 0], lengths[:, 1])

    assert not turned.is_contiguous()
    assert torch.equal(actual, expected)
    assert torch.equal(*torch.autograd.grad(actual, turned), gradient)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_any_floating_type(dtype, weight, autocast, assert_equals_reference):
    """F6."""
    inputs = draw([4, 3], [3, 2], dtype=dtype)
    loss = RNNTLoss(fastemit_lambda=weight, reduction="none")

    with torch.autocast("cpu", enabled=autocast):
        assert_equals_reference(loss, *inputs)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_loss_without_a_gradient_is_the_same(weight):
    inputs = draw([4, 3], [3, 2])
    loss = RNNTLoss(fastemit_lambda=weight)

    with torch.no_grad():
        value = loss(*inputs)

    assert torch.equal(value, loss(*inputs).detach())


def test_blank_is_the_first_label_and_the_reduction_the_mean_unless_said():
    """F10: torchaudio's own default is the last label."""
    logits, targets, *lengths = draw([3, 2], [2, 1])
    targets.clamp_(max=VOCAB - 2)
    loss = RNNTLoss()(logits, targets, *lengths)

    explicit = RNNTLoss(blank=0, reduction="mean")(logits, targets, *lengths)
    last = RNNTLoss(blank=VOCAB - 1)(logits, targets, *lengths)

    assert torch.equal(loss, explicit)
    assert not torch.allclose(loss, last)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_too_many_elements_are_split_over_the_batch(
    weight, monkeypatch, assert_equals_reference
):
    inputs = draw([4, 3, 4, 1], [3, 2, 0, 1], extra=1)
    loss = RNNTLoss(fastemit_lambda=weight, reduction="none")
    sizes = []

    def watch(logits, *args, **kwargs):
        sizes.append(logits.numel())
        return functional.rnnt_loss(logits, *args, **kwargs)

    monkeypatch.setattr(rnnt_loss, "_load_rnnt_loss", lambda: watch)
    monkeypatch.setattr(rnnt_loss, "MAX_ELEMENTS", 4 * 4 * VOCAB)
    assert_equals_reference(loss, *inputs)

    assert sizes == [4 * 4 * VOCAB, 3 * 3 * VOCAB, 2 * 4 * 2 * VOCAB]

    monkeypatch.setattr(rnnt_loss, "MAX_ELEMENTS", 4 * 4 * VOCAB - 1)
    with pytest.raises(ValueError, match="one item have 80 elements, more than the 79"):
        loss(*inputs)


class Allocations(TorchDispatchMode):
    """Record the operations that allocate as much memory as the logits take."""

    def __init__(self, logits):
        super().__init__()
        self.size = logits.untyped_storage().nbytes()
        # Kept alive, so that no address is used twice.
        self.storages = {logits.data_ptr(): logits}
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))

        for tensor in result if isinstance(result, tuple) else (result,):
            storage = tensor.untyped_storage()

            if (
                storage.nbytes() >= self.size
                and storage.data_ptr() not in self.storages
            ):
                self.storages[storage.data_ptr()] = tensor
                self.operations.append(str(func))

        return result


def test_nothing_of_the_size_of_the_logits_is_allocated_that_torchaudio_does_not():
    """D12."""
    logits, targets, *lengths = draw([40, 30], [30, 20])
    integers = [tensor.int() for tensor in (targets, *lengths)]

    with Allocations(logits) as ours:
        RNNTLoss()(logits, targets, *lengths).backward()

    logits.grad = None

    with Allocations(logits) as torchaudios:
        functional.rnnt_loss(logits, *integers, blank=0).backward()

    assert "torchaudio.rnnt_loss_forward.default" in ours.operations
    assert ours.operations == torchaudios.operations


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cuda_equals_the_reference_wherever_targets_and_lengths_are(
    device, weight, assert_equals_reference
):
    """F2, F5."""
    logits, *rest = draw([4, 3], [3, 2], extra=1)
    logits = logits.detach().cuda().requires_grad_()
    rest = [tensor.to(device) for tensor in rest]

    assert_equals_reference(RNNTLoss(fastemit_lambda=weight), logits, *rest)


@pytest.mark.gpu
@needs_gpu
def test_the_peak_of_memory_is_that_of_torchaudio():
    """D12."""
    logits = torch.randn(4, 200, 51, 2000, device="cuda", requires_grad=True)
    rest = [
        torch.randint(1, 2000, (4, 50), device="cuda", dtype=torch.int32),
        torch.full((4,), 200, device="cuda", dtype=torch.int32),
        torch.full((4,), 50, device="cuda", dtype=torch.int32),
    ]

    def peak(loss):
        logits.grad = None
        torch.cuda.reset_peak_memory_stats()
        loss().backward()
        return torch.cuda.max_memory_allocated() - logits.nbytes

    native = peak(lambda: functional.rnnt_loss(logits, *rest, blank=0))

    assert native > logits.nbytes
    assert peak(lambda: RNNTLoss()(logits, *rest)) <= 1.05 * native


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frames": [4, 0]}, "item 1 has 0 frames"),
        ({"frames": [5, 3]}, "logit_lengths go up to 5, but logits have 4 frames"),
        ({"labels": [4, 2]}, "target_lengths must be between 0 and 3.*got 2 to 4"),
        ({"labels": [-1, 2]}, "target_lengths must be between 0 and 3.*got -1"),
        ({"targets": [[1, 2, 5], [1, 1, 0]]}, "labels must be from 0 to 4.* got 5"),
        ({"targets": [[1, -1, 2], [1, 1, 0]]}, "labels must be from 0 to 4.* got -1"),
        ({"targets": [[1, 2, 2], [0, 1, 0]]}, "labels must .*not the blank 0, got 0"),
        ({"targets": [[1.0, 1.0, 1.0]] * 2}, "targets must be integers"),
        ({"frames": [4]}, "logit_lengths must have 1 dimensions, 2 items"),
        ({"logits": torch.zeros(2, 4, 3, VOCAB)}, "3 label positions.*3 labels need 4"),
        ({"logits": torch.zeros(2, 4, 4)}, r"logits must be .*\(2, 4, 4\)"),
        ({"logits": torch.zeros(())}, r"logits must be .*\(\)"),
        ({"logits": torch.zeros(0, 4, 4, VOCAB)}, r"logits must be .*\(0, 4, 4, 5\)"),
        ({"logits": torch.zeros(2, 4, 4, VOCAB).long()}, "logits must be floating"),
    ],
)
def test_inputs_that_do_not_go_together_are_refused(change, message):
    """F7, F10: no frames; logits without the row after the last label."""
    logits, targets, frames, labels = draw([4, 3], [3, 2])
    inputs = {
        "logits": logits,
        "targets": targets,
        "frames": frames,
        "labels": labels,
    }
    inputs.update({name: torch.as_tensor(value) for name, value in change.items()})

    with pytest.raises(ValueError, match=message):
        RNNTLoss()(*inputs.values())


def test_options_that_cannot_be_served_are_refused_at_construction():
    for weight in (-0.001, math.inf, math.nan):
        message = f"fastemit_lambda must be finite and at least 0, got {weight}"

        with pytest.raises(ValueError, match=message):
            RNNTLoss(fastemit_lambda=weight)

    with pytest.raises(ValueError, match="reduction must be one of none, mean, sum"):
        RNNTLoss(reduction="average")

    with pytest.raises(ValueError, match="blank must be at least 0, got -1"):
        RNNTLoss(blank=-1)

    with pytest.raises(ValueError, match="blank 9 is not below the vocabulary size 5"):
        RNNTLoss(blank=9)(*draw([4, 3], [3, 2]))


def test_torchaudio_that_does_not_load_names_both_versions(monkeypatch, tmp_path):
    """D7."""
    broken = tmp_path / "torchaudio"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise OSError('undefined symbol: _ZN3c10')")

    for name in [name for name in sys.modules if name.split(".")[0] == "torchaudio"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ImportError) as caught:
        RNNTLoss()(*draw([4, 3], [3, 2]))

    message = str(caught.value)
    assert torch.__version__ in message
    assert rnnt_loss.metadata.version("torchaudio") in message
    assert "undefined symbol" in message
    assert "pip install 'torchaudio==2.11." in message
    assert isinstance(caught.value.__cause__, OSError)
