"""tools/step_time.py: what is timed is a real step of the search."""

import time

import pytest
import torch
from espnet2.asr_transducer.decoder.mega_decoder import MEGADecoder

from espnet_mega_bias import MEGABiasDecoder
from espnet_mega_bias.tools import step_time
from tools.conftest import DECODER_CONF, TOKENS

CLASSES = {"mega": MEGADecoder, "mega_bias": MEGABiasDecoder}
PREPARED = {"mega": step_time._prepared_mega, "mega_bias": step_time._prepared}


def build(name, **conf):
    return CLASSES[name](len(TOKENS), **{**DECODER_CONF, **conf}).eval()


def grow(decoder, length):
    labels, state = [0], decoder.init_state()

    for _ in range(length - 1):
        _, state = decoder.score(labels, state)
        labels = [*labels, 1]

    return labels, state


def shapes(decoder, state):
    """Shapes of all that a step reads."""
    if isinstance(decoder, MEGADecoder):
        # The EMA state gets its batch of one only by the first step.
        return [
            {key: x.squeeze(0).shape for key, x in block.items()} for block in state
        ]

    history = state.history_from(state.first)

    return state.ema_state.shape, state.length, [rows.shape for rows, _ in history]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(
    "conf", [{}, {"chunk_size": 7}, {"truncation_length": 3}, {"embed_pad": 3}], ids=str
)
@pytest.mark.parametrize("length", [1, 2, 6])
@torch.no_grad()
def test_a_made_up_hypothesis_has_the_shapes_of_a_grown_one(name, conf, length):
    decoder = build(name, **conf)
    labels, state = PREPARED[name](decoder, length)()
    grown_labels, grown = grow(decoder, length)

    assert len(labels) == len(grown_labels)
    assert decoder.pad_idx not in labels
    assert shapes(decoder, state) == shapes(decoder, grown)

    (out, after), (grown_out, grown_after) = (
        decoder.score(grown_labels, start) for start in (state, grown)
    )
    assert out.shape == grown_out.shape
    assert shapes(decoder, after) == shapes(decoder, grown_after)


@pytest.mark.parametrize("name", CLASSES)
def test_each_label_that_is_timed_is_computed(name, monkeypatch):
    decoder = build(name)
    passes = []
    hook = decoder.final_norm.register_forward_hook(lambda *_: passes.append(1))
    scored = []
    score = decoder.score
    monkeypatch.setattr(
        decoder, "score", lambda *args: scored.append(1) or score(*args)
    )

    assert step_time.milliseconds(decoder, 5) > 0.0
    hook.remove()

    assert len(passes) == len(scored) > step_time._FEWEST


def test_the_median_is_in_milliseconds(monkeypatch):
    decoder = build("mega_bias")
    waits = iter([0.0, *[0.02] * 2, *[0.2] * 1])
    monkeypatch.setattr(step_time, "_MOST", 3)
    monkeypatch.setattr(decoder, "score", lambda *_: time.sleep(next(waits)))

    # Neither the warm-up nor the outlier counts.
    assert 20.0 <= step_time.milliseconds(decoder, 3) < 200.0


def test_the_machine_line_names_threads_and_torch():
    assert f"{torch.get_num_threads()} thread" in step_time.machine()
    assert f"torch {torch.__version__}" in step_time.machine()
