import sys

import pytest
import torch
from reference.rnnt_loss import transducer_loss

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


def draw(frames, labels, extra_frames=0, extra_labels=0, dtype=torch.float32):
    """Logits and targets, wider than the longest item by what is asked for."""
    batch = len(frames)
    width = max(labels) + extra_labels
    logits = torch.randn(batch, max(frames) + extra_frames, width + 1, VOCAB) * 2

    return (
        logits.to(dtype).requires_grad_(),
        torch.randint(1, VOCAB, (batch, width)),
        torch.tensor(frames),
        torch.tensor(labels),
    )


def reference(logits, targets, frames, labels, blank=0):
    return torch.stack(
        [
            transducer_loss(item[:t, : u + 1].double(), target[:u].tolist(), blank)
            for item, target, t, u in zip(
                logits, targets, frames.tolist(), labels.tolist(), strict=True
            )
        ]
    )


def assert_loss_and_gradient(actual, expected, logits, atol=1e-5):
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=atol)

    cotangent = torch.randn_like(expected)
    (ours,) = torch.autograd.grad(actual, logits, cotangent.to(actual.dtype))
    (theirs,) = torch.autograd.grad(expected, logits, cotangent)

    assert ours.dtype == logits.dtype
    assert theirs.abs().max() > 0 or logits.size(-1) == 1
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=atol)

    return ours


@pytest.mark.parametrize(("frames", "labels"), CASES)
@pytest.mark.parametrize("blank", [0, VOCAB - 1])
def test_value_and_gradient_equal_the_sum_over_alignments(frames, labels, blank):
    logits, targets, *lengths = draw(frames, labels)
    targets = (targets - 1) if blank else targets

    actual = RNNTLoss(blank=blank, reduction="none")(logits, targets, *lengths)

    assert_loss_and_gradient(
        actual, reference(logits, targets, *lengths, blank=blank), logits
    )


@pytest.mark.parametrize(("frames", "labels"), CASES)
def test_padding_wider_than_the_longest_item_counts_for_nothing(frames, labels):
    logits, targets, *lengths = draw(frames, labels, extra_frames=2, extra_labels=3)
    targets[:, max(labels) :] = -1

    actual = RNNTLoss(reduction="none")(logits, targets, *lengths)
    gradient = assert_loss_and_gradient(
        actual, reference(logits, targets, *lengths), logits
    )

    for row, (t, u) in enumerate(zip(frames, labels, strict=True)):
        assert gradient[row, t:].abs().sum() == 0
        assert gradient[row, :, u + 1 :].abs().sum() == 0
        assert gradient[row, :t, : u + 1].sum(-1).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integer_types_and_layouts_do_not_matter(dtype):
    logits, targets, frames, labels = draw([4, 3], [3, 2])
    clean = RNNTLoss(reduction="none")(logits, targets, frames, labels)
    (clean_gradient,) = torch.autograd.grad(clean.sum(), logits)

    turned = logits.detach().transpose(1, 2).contiguous().transpose(1, 2)
    turned.requires_grad_()
    wide = torch.stack([targets, targets], dim=-1).to(dtype)
    lengths = torch.stack([frames, labels], dim=-1).to(dtype)

    loss = RNNTLoss(reduction="none")(
        turned, wide[..., 0], lengths[:, 0], lengths[:, 1]
    )
    (gradient,) = torch.autograd.grad(loss.sum(), turned)

    assert not turned.is_contiguous()
    assert torch.equal(loss, clean)
    assert torch.equal(gradient, clean_gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_any_floating_type(dtype):
    logits, targets, *lengths = draw([4, 3], [3, 2], dtype=dtype)

    actual = RNNTLoss(reduction="none")(logits, targets, *lengths)

    assert actual.dtype == torch.float32
    assert_loss_and_gradient(
        actual, reference(logits, targets, *lengths), logits, atol=1e-2
    )


def test_reductions():
    inputs = draw([4, 3, 2], [3, 2, 1])
    each = RNNTLoss(reduction="none")(*inputs)

    assert each.shape == (3,)
    torch.testing.assert_close(RNNTLoss()(*inputs), each.sum() / 3)
    torch.testing.assert_close(RNNTLoss(reduction="sum")(*inputs), each.sum())


def test_blank_is_the_first_label_unless_said():
    inputs = draw([3], [2])

    assert torch.equal(RNNTLoss()(*inputs), RNNTLoss(blank=0)(*inputs))
    assert not torch.allclose(RNNTLoss()(*inputs), RNNTLoss(blank=4)(*inputs))


def test_too_many_elements_are_split_over_the_batch(monkeypatch):
    inputs = draw([4, 3, 4, 1], [3, 2, 0, 1])
    expected = RNNTLoss(reduction="none")(*inputs)

    monkeypatch.setattr(rnnt_loss, "MAX_ELEMENTS", 4 * 4 * VOCAB)
    actual = RNNTLoss(reduction="none")(*inputs)

    torch.testing.assert_close(actual, expected)
    (gradient,) = torch.autograd.grad(actual.sum(), inputs[0])
    (whole,) = torch.autograd.grad(expected.sum(), inputs[0])
    torch.testing.assert_close(gradient, whole)

    monkeypatch.setattr(rnnt_loss, "MAX_ELEMENTS", 4 * 4 * VOCAB - 1)
    with pytest.raises(ValueError, match="one item have 80 elements, more than the 79"):
        RNNTLoss()(*inputs)


def test_logits_that_fit_are_not_copied(monkeypatch):
    logits, targets, *lengths = draw([4, 3], [3, 2])
    seen = []

    def watch(logits, *args, **kwargs):
        seen.append(logits.data_ptr())
        return logits.sum((1, 2, 3))

    monkeypatch.setattr(rnnt_loss, "_load_rnnt_loss", lambda: watch)
    RNNTLoss()(logits, targets, *lengths)

    assert seen == [logits.data_ptr()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frames": [4, 0]}, "item 1 has 0 frames"),
        ({"frames": [5, 3]}, "logit_lengths go up to 5, but logits have 4 frames"),
        ({"labels": [4, 2]}, "target_lengths must be between 0 and 3.*got 2 to 4"),
        ({"labels": [-1, 2]}, "target_lengths must be between 0 and 3.*got -1"),
        ({"targets": [[1, 2, 5], [1, 1, 0]]}, "labels must be from 0 to 4, got 5"),
        ({"targets": [[1, -1, 2], [1, 1, 0]]}, "labels must be from 0 to 4, got -1"),
        ({"targets": [[1.0, 1.0, 1.0]] * 2}, "targets must be integers"),
        ({"frames": [4]}, "logit_lengths must have 1 dimensions, 2 items"),
        ({"logits": torch.zeros(2, 4, 3, VOCAB)}, "3 label positions.*3 labels need 4"),
        ({"logits": torch.zeros(2, 4, 4)}, r"logits must be .*\(2, 4, 4\)"),
        ({"logits": torch.zeros(2, 4, 4, VOCAB).long()}, "logits must be floating"),
    ],
)
def test_inputs_that_do_not_go_together_are_refused(change, message):
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


def test_labels_after_the_end_may_be_anything():
    logits, targets, frames, labels = draw([4, 3], [3, 2])
    expected = RNNTLoss()(logits, targets, frames, labels)
    targets[1, 2] = 999

    assert torch.equal(RNNTLoss()(logits, targets, frames, labels), expected)


def test_options_that_cannot_be_served_are_refused_at_construction():
    with pytest.raises(ValueError, match=r"fastemit_lambda must be 0.* got 0.001"):
        RNNTLoss(fastemit_lambda=0.001)

    with pytest.raises(ValueError, match="reduction must be one of none, mean, sum"):
        RNNTLoss(reduction="average")

    with pytest.raises(ValueError, match="blank must be at least 0, got -1"):
        RNNTLoss(blank=-1)

    with pytest.raises(ValueError, match="blank 9 is not below the vocabulary size 5"):
        RNNTLoss(blank=9)(*draw([4, 3], [3, 2]))


def test_torchaudio_that_does_not_load_names_both_versions(monkeypatch, tmp_path):
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
