"""tools/decoder_cost.py: what is counted is what the real decoders have and do."""

import inspect

import pytest
import torch
from espnet2.asr_transducer.decoder.mega_decoder import MEGADecoder
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from espnet_mega_bias import MEGABiasDecoder
from espnet_mega_bias.tools import decoder_cost

VOCAB = 7
CLASSES = {"mega": MEGADecoder, "mega_bias": MEGABiasDecoder}

# No two sizes are alike, so that none can stand for another.
SIZES = {
    "block_size": 12,
    "linear_size": 18,
    "qk_size": 8,
    "v_size": 10,
    "num_heads": 3,
    "max_positions": 20,
    "num_blocks": 2,
}

variants = pytest.mark.parametrize(
    "conf",
    [
        {"rel_pos_bias_type": "rotary"},
        {"rel_pos_bias_type": "simple"},
        {"rel_pos_bias_type": "rotary", "chunk_size": 6},
        {"rel_pos_bias_type": "simple", "truncation_length": 4},
        {"rel_pos_bias_type": "rotary", "normalization_type": "scale_norm"},
    ],
    ids=lambda conf: "-".join(map(str, conf.values())),
)
decoders = pytest.mark.parametrize("name", CLASSES)


def build(name, **conf):
    cls = CLASSES[name]
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(cls).parameters.items()
    }
    conf = {**SIZES, **conf}

    return cls(VOCAB, **conf).eval(), {**defaults, **conf}


def grow(decoder, length):
    """Score positions one by one; give the arguments for the one after them."""
    labels, state = [0], decoder.init_state()

    for position in range(length):
        _, state = decoder.score(labels, state)
        labels = [*labels, 1 + position % (VOCAB - 1)]

    return labels, state


@decoders
@variants
def test_parameters_are_those_of_the_real_decoder(name, conf):
    decoder, _ = build(name, **conf)
    mega, feed_forward = decoder.mega_blocks[0]

    def count(*modules):
        return sum(p.numel() for module in modules for p in module.parameters())

    counts = decoder_cost.parameters(decoder)

    assert counts["embedding"] == VOCAB * 12
    assert counts["EMA"] == count(mega.multihead_damped_ema) == 4 * 12 * 3 + 12
    assert counts["attention (W_v, W_h, w, b)"] == (
        count(mega.proj_v, mega.proj_h) + 4 * 8
    )
    assert counts["gates and keys (W_mx)"] == count(mega.proj_mx)
    assert counts["feed-forward"] == count(feed_forward.linear1, feed_forward.linear2)
    assert counts["bias"] == count(mega.rel_pos_bias) > 0
    assert counts["normalisation"] == 2 * count(decoder.final_norm) > 0
    assert counts["final normalisation"] == count(decoder.final_norm)

    ends = counts["embedding"] + counts["final normalisation"]
    total = counts.pop("total")
    block = sum(counts.values()) - ends
    assert total == count(decoder) == ends + 2 * block


@decoders
@variants
@pytest.mark.parametrize("length", [1, 2, 5])
def test_matrix_products_are_those_of_the_real_step(name, conf, length):
    decoder, settings = build(name, **conf)

    with torch.no_grad():
        arguments = grow(decoder, length - 1)

        with FlopCounterMode(display=False) as flops:
            decoder.score(*arguments)

    cost = decoder_cost.step(name, settings, length)
    # ESPnet's EMA sums over heads by a product.
    in_ema = 2 * 12 * 3 if name == "mega" else 0

    assert flops.get_total_flops() == 2 * (cost.linear + cost.attention + in_ema)
    assert cost.total == cost.linear + cost.attention + cost.ema


class Multiplications(TorchDispatchMode):
    """Counts elementwise multiplications, and those of matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__

        if name in ("mul", "addcmul"):
            self.count += out.numel()
        elif name == "bmm":
            self.count += out.numel() * args[0].size(-1)

        return out


@decoders
@variants
@pytest.mark.parametrize("length", [1, 2, 5, 11])
def test_multiplications_of_the_ema_are_those_of_the_real_step(name, conf, length):
    decoder, settings = build(name, **conf)
    ema = decoder.mega_blocks[0][0].multihead_damped_ema
    ema.activation = torch.nn.Identity()
    inputs = torch.randn(length, 1, 12)

    with torch.no_grad():
        if name == "mega":
            state = torch.zeros(1, 12, 3)
            ema.get_ema_coefficients()
            with Multiplications() as counted:
                ema(inputs[:1], state={"ema_state": state})
        else:
            state, coefficients = ema.init_state().unsqueeze(0), ema.step_coefficients()
            for x in inputs:
                with Multiplications() as counted:
                    _, state = ema.step(x, state, None, coefficients)

    assert decoder_cost.step(name, settings, length).ema == 2 * counted.count


@decoders
@variants
@pytest.mark.parametrize("length", [1, 2, 4])
def test_bytes_of_a_state_are_those_of_its_tensors(name, conf, length):
    decoder, settings = build(name, **conf)

    with torch.no_grad():
        _, state = grow(decoder, length)

    if name == "mega":
        held = sum(tensor.nbytes for block in state for tensor in block.values())
    else:
        ((rows, _),) = state.history_from(0)
        held = state.ema_state.nbytes + state.cache.buffer[:, rows].nbytes

    assert decoder_cost.state_bytes(name, settings, length) == held


def test_each_label_adds_its_key_and_value_to_the_state():
    _, settings = build("mega_bias")
    more, less = (decoder_cost.state_bytes("mega_bias", settings, u) for u in (8, 7))

    assert more - less == 2 * decoder_cost.label_bytes(settings) == 2 * 4 * (8 + 10)
    assert decoder_cost.ema_bytes("mega_bias", settings) == 4 * 12 * 3


@variants
def test_bytes_of_the_tables_are_those_of_the_buffers(conf):
    decoder, settings = build("mega_bias", **conf)
    bias = decoder.mega_blocks[0][0].rel_pos_bias
    held = sum(buffer.nbytes for name, buffer in bias.named_buffers() if name != "_pe")

    assert decoder_cost.table_bytes(settings) == held


@decoders
@pytest.mark.parametrize(
    ("conf", "length"),
    [
        ({}, 13),
        ({}, 60),
        ({}, 150),
        ({"att_dropout_rate": 0.5}, 150),
        ({"chunk_size": 30}, 75),
        ({"chunk_size": 30}, 20),
    ],
)
def test_training_bytes_are_those_that_autograd_keeps(name, conf, length):
    decoder, settings = build(
        name, rel_pos_bias_type="rotary", **{**conf, "max_positions": 200}
    )
    labels = torch.randint(1, VOCAB, (1, length))
    labels[:, 0] = 0
    # Of queries by keys, a block of queries at a time or all of them.
    side = min(length, conf.get("chunk_size", length))
    blocks = {side} if side <= 128 or name == "mega" else {75}
    kept = {}

    def note(tensor):
        if (
            tensor.dim() >= 3
            and tensor.is_floating_point()
            and tensor.size(-2) in blocks
            and tensor.size(-1) in {side, *blocks}
            and tensor.size(0) in {1, -(-length // side)}
        ):
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = decoder.train()(labels)

    held = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())

    assert out.requires_grad
    assert decoder_cost.training_bytes(name, settings, length) == held


def test_attention_reaches_as_far_as_the_chunk_or_max_positions():
    for conf, reach in (
        ({}, 20),
        ({"chunk_size": 6}, 6),
        ({"chunk_size": 0}, 20),
        ({"max_positions": None, "rel_pos_bias_type": "rotary"}, None),
    ):
        _, settings = build("mega_bias", **conf)
        far, farther = (decoder_cost.step("mega_bias", settings, u) for u in (50, 51))

        assert decoder_cost.limit(settings) == reach
        assert (far == farther) == (reach is not None)
