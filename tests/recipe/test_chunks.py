"""recipe.chunks: what ESPnet's chunks take in, and what they lose."""

import pytest
import torch
from espnet2.asr_transducer.frontend.online_audio_processor import OnlineAudioProcessor
from espnet2.layers.utterance_mvn import UtteranceMVN
from streaming_model import build


@pytest.fixture
def chunks(local):
    return local("chunks")


def test_counts_what_a_chunk_gives(chunks):
    _, model = build()

    found = chunks.chunks_of(model, 640, 32, dynamic_chunks=True)

    # 80 frames of 128 samples, 20 after subsampling; the encoder waits for 8 more
    assert found == chunks.Chunks(10240, 512, 20, 1024)
    assert found.lost == 0
    assert found.remark() is None
    assert not model.training


@torch.no_grad()
@pytest.mark.parametrize(
    ("hop", "window", "lost"), [(128, 640, 0), (64, 640, 0), (160, 640, 1)]
)
def test_says_whether_features_are_lost(chunks, hop, window, lost):
    args, model = build({"hop_length": hop})
    speech = torch.randn(3 * window * 16)
    processor = OnlineAudioProcessor(
        model._extract_feats, None, window, 4, args.frontend_conf, "cpu"
    )
    parts = [
        processor.compute_features(chunk, is_final=False)[0]
        for chunk in speech.split(window * 16)
    ]
    new = torch.cat([parts[0], *(part[:, 11:] for part in parts[1:])], dim=1)[0]
    whole = model._extract_feats(speech[None], torch.tensor([len(speech)]))[0][0]

    found = chunks.chunks_of(model, window, 32, dynamic_chunks=True)

    assert found.lost == lost
    if lost:
        assert len(new) < len(whole) - 2 * 2  # of three chunks, two edges
        assert "loses 1 of 16 encoder frames" in found.remark()
    else:
        torch.testing.assert_close(new, whole[: len(new)])


def test_counts_what_subsampling_does_rather_than_what_it_is_called(chunks):
    _, named_six = build(input_conf={"subsampling_factor": 6})
    _, six = build(input_conf={"subsampling_factor": 6, "vgg_like": False})

    assert chunks.chunks_of(named_six, 640, 32, True).frame == 4 * 128
    assert chunks.chunks_of(six, 960, 32, True).frame == 6 * 128
    assert chunks.chunks_of(six, 960, 32, True).lost == 1


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (650, "650 is 10400 samples, no multiple of the 512 .*; take 640 or 672"),
        (0, "take 32$"),
        (64, "64 is too short for this encoder; the least is 128"),
    ],
)
def test_names_a_window_that_fits(chunks, window, message):
    _, model = build()

    with pytest.raises(chunks.RecipeError, match=message):
        chunks.chunks_of(model, window, 32, dynamic_chunks=True)


def test_says_why_a_model_cannot_stream(chunks):
    _, model = build()
    with pytest.raises(chunks.RecipeError, match="dynamic_chunk_training: true"):
        chunks.chunks_of(model, 640, 32, dynamic_chunks=False)

    model.normalize = UtteranceMVN()
    with pytest.raises(chunks.RecipeError, match=r"utterance_mvn .* global_mvn"):
        chunks.chunks_of(model, 640, 32, dynamic_chunks=True)

    _, model = build(input_size=16)
    with pytest.raises(chunks.RecipeError, match="this model has none"):
        chunks.chunks_of(model, 640, 32, dynamic_chunks=True)
