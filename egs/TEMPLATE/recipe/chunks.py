"""How ESPnet cuts audio into chunks for streaming, and what that costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from recipe.files import RecipeError

# ESPnet computes samples from milliseconds at this rate, whatever the model's.
SAMPLES_PER_MILLISECOND = 16
TRIED = 3  # chunks: the first one is shorter, those after it are alike


@dataclass(frozen=True)
class Chunks:
    """Chunks of audio, as an encoder takes them.

    Args:
        samples: Audio in a chunk.
        frame: Audio in an encoder frame.
        frames: Encoder frames that come out of a chunk, the first one aside.
        look_ahead: Audio at the end of a chunk that only the next one decides on, in
            samples.
    """

    samples: int
    frame: int
    frames: int
    look_ahead: int

    @property
    def lost(self) -> int:
        """Encoder frames that get lost at each edge between chunks."""
        return self.samples // self.frame - self.frames

    def remark(self) -> str | None:
        """Say what is lost, if anything."""
        if self.lost == 0:
            return None
        return (
            f"ESPnet's streaming loses {self.lost} of {self.samples // self.frame} "
            "encoder frames at each edge between chunks: it keeps all where n_fft is "
            "an even multiple of hop_length, and subsampling_factor 4 (6 with vgg_like)"
        )


def chunks_of(model, window: int, left_context: int, dynamic_chunks: bool) -> Chunks:
    """Try a model's front-end and encoder on a few chunks of silence.

    Args:
        model: ESPnet's transducer; its streaming caches are used.
        window: ESPnet's ``decoding_window``.
        left_context: ESPnet's ``left_context``.
        dynamic_chunks: Whether the encoder has been built for training with chunks;
            ESPnet's ``Speech2Text`` makes a model forget that.

    Raises:
        RecipeError: If the model cannot be streamed with such chunks; says what can.
    """
    from espnet2.asr.frontend.default import DefaultFrontend
    from espnet2.layers.utterance_mvn import UtteranceMVN

    if not isinstance(model.frontend, DefaultFrontend):
        raise RecipeError(
            "streaming takes audio, through ESPnet's default front-end; this model has "
            + ("none" if model.frontend is None else type(model.frontend).__name__)
        )
    if not dynamic_chunks:
        raise RecipeError(
            "the encoder was not trained for streaming: it needs "
            "encoder_conf.main_conf.dynamic_chunk_training: true"
        )
    if isinstance(model.normalize, UtteranceMVN):
        raise RecipeError(
            "normalize: utterance_mvn would normalise each chunk by itself; train with "
            "global_mvn"
        )
    frame = model.frontend.hop_length * _stride(model)
    step = frame // math.gcd(frame, SAMPLES_PER_MILLISECOND)  # of windows that fit
    if window < 1 or window % step:
        below = window - window % step
        near = [str(fit) for fit in (below, below + step) if fit > 0]
        raise RecipeError(
            f"decoding_window {window} is {window * SAMPLES_PER_MILLISECOND} samples, "
            f"no multiple of the {frame} of an encoder frame; take " + " or ".join(near)
        )
    counts = _encoder_frames(model, window, left_context)
    if counts is None:
        least = window + step
        while _encoder_frames(model, least, left_context) is None:
            least += step
        raise RecipeError(
            f"decoding_window {window} is too short for this encoder; the least is "
            f"{least}"
        )
    samples = window * SAMPLES_PER_MILLISECOND
    # ESPnet leaves out the first frame of all
    return Chunks(samples, frame, counts[-1], samples - (counts[0] + 1) * frame)


def _stride(model) -> int:
    """Count the feature frames in an encoder frame.

    With ``vgg_like`` and ``subsampling_factor: 6`` there are 4.
    """
    import torch

    embed = model.encoder.embed
    like = next(model.encoder.parameters())
    with torch.no_grad():
        short, long = (
            embed(like.new_zeros(1, length, model.frontend.output_size()))[0].size(1)
            for length in (120, 240)
        )
    return 120 // (long - short)


def _encoder_frames(model, window: int, left_context: int) -> list[int] | None:
    """Count the encoder frames of each chunk; None where a chunk is too short."""
    import torch
    from espnet2.asr_transducer.frontend.online_audio_processor import (
        OnlineAudioProcessor,
    )

    front, encoder = model.frontend, model.encoder
    like = next(encoder.parameters())
    processor = OnlineAudioProcessor(
        model._extract_feats,
        model.normalize,
        window,
        encoder.embed.subsampling_factor,
        {"n_fft": front.stft.n_fft, "hop_length": front.hop_length},
        like.device,
    )
    encoder.reset_cache(left_context, device=like.device)
    done = torch.zeros(1, 1, dtype=torch.long, device=like.device)
    counts = []
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(TRIED):
                silence = like.new_zeros(processor.decoding_samples)
                features = processor.compute_features(silence, is_final=False)
                frames = encoder.chunk_forward(
                    *features, done, left_context=left_context
                ).size(1)
                counts.append(frames)
                done += frames
    except RuntimeError:  # torch, on sizes below zero
        return None
    finally:
        model.train(was_training)
        encoder.reset_cache(left_context, device=like.device)
    return counts if min(counts) > 0 else None
