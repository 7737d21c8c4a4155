"""The loss that ESPnet's transducer model gets at its first batch."""

import contextlib
import copy
import importlib
import logging
import pickle
import sys

import pytest
import torch

import espnet_mega_bias
from espnet_mega_bias import RNNTLoss, registration

pytestmark = pytest.mark.host

TOKENS = ["<blank>", "<unk>", "a", "b", "<sos/eos>"]

# A stand-in for warp-transducer's binding that computes the right values.
USABLE = """
import espnet_mega_bias
import torch


class RNNTLoss(torch.nn.Module):
    def __init__(self, blank=0, reduction="mean", fastemit_lambda=0.0):
        super().__init__()
        self.right = espnet_mega_bias.RNNTLoss(blank=blank, reduction=reduction)

    def forward(self, *args):
        return self.right(*args)
"""

DEFECTS = {
    "raises OSError on import": (
        "raise OSError('libwarprnnt.so: cannot open shared object file')",
        "importing warprnnt_pytorch fails (OSError: libwarprnnt.so",
    ),
    "raises ImportError on import": (
        "raise ImportError('undefined symbol: _ZN3c10')",
        "importing warprnnt_pytorch fails (ImportError: undefined symbol",
    ),
    "needs a package that is missing": (
        "import a_package_that_it_needs",
        "importing warprnnt_pytorch fails (ModuleNotFoundError: No module named 'a_pa",
    ),
    "has no RNNTLoss": (
        "class Loss: pass",
        "importing warprnnt_pytorch fails (ImportError: cannot import name 'RNNTLoss'",
    ),
    "rejects fastemit_lambda": (
        USABLE.replace(", fastemit_lambda=0.0", ""),
        "rejects reduction='mean' with fastemit_lambda=0.0 (TypeError",
    ),
    "lacks its GPU part": (
        USABLE.replace("return", "raise AttributeError('no gpu_rnnt')\n        return"),
        "fails on cpu (AttributeError: no gpu_rnnt)",
    ),
    "expects another blank": (
        USABLE.replace("blank=blank", "blank=2"),
        "computes 3.17805 on cpu where 2.07944 is right",
    ),
    "returns no number": (
        USABLE.replace("(*args)", "(*args) * float('nan')"),
        "computes nan on cpu where 2.07944 is right",
    ),
    "loses the gradient": (
        USABLE.replace("(*args)", "(*args).detach() + 0 * args[0].sum()"),
        "computes a wrong gradient on cpu",
    ),
}


def make_model(fastemit_lambda=0.0):
    from espnet2.asr_transducer.encoder.encoder import Encoder
    from espnet2.asr_transducer.espnet_transducer_model import (
        ESPnetASRTransducerModel,
    )
    from espnet2.asr_transducer.joint_network import JointNetwork

    espnet_mega_bias.register()
    torch.manual_seed(0)
    block = {
        "block_type": "conformer",
        "hidden_size": 8,
        "linear_size": 8,
        "heads": 2,
        "conv_mod_kernel_size": 3,
    }
    encoder = Encoder(20, [block])
    decoder = espnet_mega_bias.MEGABiasDecoder(
        len(TOKENS), block_size=8, linear_size=8, qk_size=4, v_size=8, num_blocks=1
    )
    return ESPnetASRTransducerModel(
        len(TOKENS),
        TOKENS,
        frontend=None,
        specaug=None,
        normalize=None,
        encoder=encoder,
        decoder=decoder,
        joint_network=JointNetwork(len(TOKENS), encoder.output_size, 8, 8),
        fastemit_lambda=fastemit_lambda,
    )


def batch():
    torch.manual_seed(1)
    return {
        "speech": torch.randn(2, 60, 20),
        "speech_lengths": torch.tensor([60, 50]),
        "text": torch.tensor([[2, 3, 2], [3, 2, -1]]),
        "text_lengths": torch.tensor([3, 2]),
    }


def best_hypothesis(model):
    from espnet2.asr_transducer.beam_search_transducer import BeamSearchTransducer

    search = BeamSearchTransducer(model.decoder, model.joint_network, beam_size=2)
    with torch.no_grad():
        encoded, _ = model.eval().encoder(
            batch()["speech"][:1], batch()["speech_lengths"][:1]
        )
        return search(encoded[0])[0]


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    """Forget what was decided and said, as a new process would."""
    registration.warprnnt_defect.cache_clear()
    monkeypatch.setattr(registration, "_announced", set())
    yield
    registration.warprnnt_defect.cache_clear()


@pytest.fixture
def warprnnt(tmp_path, monkeypatch):
    """Return a function that puts a module named `warprnnt_pytorch` on the path."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(source):
        (tmp_path / "warprnnt_pytorch.py").write_text(source)
        importlib.invalidate_caches()

    yield write
    sys.modules.pop("warprnnt_pytorch", None)


@pytest.fixture
def missing(monkeypatch):
    """Hide a compiled warp-transducer, if this machine has one."""
    monkeypatch.setitem(sys.modules, "warprnnt_pytorch", None)


def said(caplog):
    return [r.getMessage() for r in caplog.records if "transducer loss" in r.message]


def test_without_warprnnt_the_model_trains_on_torchaudio(missing, caplog):
    caplog.set_level(logging.INFO)
    model = make_model()
    keys = list(model.state_dict())
    loss, _, _ = model(**batch())
    loss.backward()
    assert isinstance(model.criterion_transducer, RNNTLoss)
    assert loss.isfinite()
    assert loss > 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert sys.modules["warprnnt_pytorch"] is None
    assert list(model.state_dict()) == keys
    (line,) = said(caplog)
    assert "torchaudio's: warprnnt_pytorch is not installed" in line


def test_the_loss_is_the_mean_over_the_batch_with_blank_0(missing):
    model = make_model()
    logits = torch.randn(2, 4, 3, len(TOKENS))
    target = torch.tensor([[2, 3], [3, 2]], dtype=torch.int32)
    lengths = [torch.tensor([4, 3]).int(), torch.tensor([2, 1]).int()]
    value = model._calc_transducer_loss(None, logits, target, *lengths)
    each = RNNTLoss(blank=0, reduction="none")(logits, target, *lengths)
    assert torch.equal(value, each.mean())
    assert each[0] != each[1]


def test_the_choice_is_said_once_per_process(missing, caplog):
    for _ in range(2):
        model = make_model()
        model(**batch())
        model(**batch())
    assert len(said(caplog)) == 1


@pytest.mark.parametrize("case", DEFECTS)
def test_an_unusable_warprnnt_is_replaced_and_the_reason_said(case, warprnnt, caplog):
    """D6."""
    source, reason = DEFECTS[case]
    warprnnt(source)
    model = make_model()
    loss, _, _ = model(**batch())
    assert loss.isfinite()
    assert type(model.criterion_transducer) is RNNTLoss
    (line,) = said(caplog)
    assert reason in line


@pytest.mark.parametrize("fastemit_lambda", [0.0, 0.01])
def test_a_usable_warprnnt_is_left_to_espnet(fastemit_lambda, warprnnt, caplog):
    warprnnt(USABLE)
    model = make_model(fastemit_lambda)
    model(**batch())
    assert type(model.criterion_transducer).__module__ == "warprnnt_pytorch"
    assert said(caplog) == []


def test_a_model_keeps_the_loss_that_it_has(missing):
    model = make_model()
    own = model.criterion_transducer = RNNTLoss(reduction="sum")
    model(**batch())
    assert model.criterion_transducer is own


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, contextlib.nullcontext]
)
def test_a_usable_warprnnt_is_recognised_in_any_mode(context, warprnnt):
    warprnnt(USABLE)
    with context():
        assert registration.warprnnt_defect("cpu", 0.0) is None


def test_a_fastemit_that_gives_no_number_is_a_defect(warprnnt):
    warprnnt(
        USABLE.replace(
            "        self.right",
            "        self.weight = fastemit_lambda\n        self.right",
        ).replace("(*args)", "(*args) * (float('inf') if self.weight else 1)")
    )
    assert registration.warprnnt_defect("cpu", 0.0) is None
    assert "not finite on cpu" in registration.warprnnt_defect("cpu", 0.5)


def test_fastemit_makes_training_favour_the_blank_less_at_the_same_loss(missing):
    """F8."""
    losses, gradients = [], []
    for fastemit_lambda in (0.0, 1.0):
        model = make_model(fastemit_lambda).eval()
        loss, _, _ = model(**batch())
        loss.backward()
        losses.append(loss)
        gradients.append(model.joint_network.lin_out.bias.grad[0])
    torch.testing.assert_close(*losses)
    assert gradients[0] < gradients[1] < 0


def test_a_bad_fastemit_weight_stops_training_but_not_decoding(missing):
    """D10."""
    model = make_model(fastemit_lambda=-0.01)
    with pytest.raises(ValueError, match=r"fastemit_lambda must be .* got -0\.01"):
        model(**batch())
    assert model.criterion_transducer is None
    assert best_hypothesis(model).yseq[0] == 0


def test_decoding_asks_for_no_loss(monkeypatch):
    """D10."""

    def refuse(*args):
        raise AssertionError("decoding asked for a loss")

    monkeypatch.setattr(registration, "choose_criterion", refuse)
    model = make_model()
    assert best_hypothesis(model).yseq[0] == 0
    assert model.criterion_transducer is None


def test_a_torchaudio_that_does_not_load_stops_training_but_not_decoding(
    missing, monkeypatch
):
    """D7, D10."""

    class Broken:
        def find_spec(self, fullname, path=None, target=None):
            if fullname.partition(".")[0] == "torchaudio":
                raise OSError("_torchaudio.abi3.so: undefined symbol")
            return None

    model = make_model()
    for name in [n for n in sys.modules if n.partition(".")[0] == "torchaudio"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ImportError, match="pip install") as caught:
        model(**batch())
    assert torch.__version__.partition("+")[0] in str(caught.value)
    assert "torchaudio" in str(caught.value)
    assert best_hypothesis(model).yseq[0] == 0


@torch.no_grad()
def test_a_model_with_its_loss_can_be_copied_and_pickled(missing):
    model = make_model().eval()
    expected, _, _ = model(**batch())
    assert isinstance(model.criterion_transducer, RNNTLoss)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(**batch())[0], expected)


def test_data_parallel_training_takes_the_loss_in_its_stride(missing, tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(make_model())
        for _ in range(2):
            loss, _, _ = model(**batch())
            loss.backward()
    finally:
        torch.distributed.destroy_process_group()
    assert isinstance(model.module.criterion_transducer, RNNTLoss)
