"""The parts of a transducer in the form in which they become ONNX graphs."""

import copy
import math
from typing import NamedTuple

import torch

from espnet_mega_bias.block import MEGA
from espnet_mega_bias.decoder import MEGABiasDecoder
from espnet_mega_bias.ema import EMAStepCoefficients
from espnet_mega_bias.tools.error import ToolError


class Encoder(torch.nn.Module):
    """ESPnet's features, normalisation and encoder, for one utterance.

    What ESPnet's modules do about padding and about streaming is left out: there is one
    utterance, and it is there as a whole. SpecAugment, dropout, dropping of blocks and
    random chunks belong to training. (ESPnet's encoder draws random chunks in
    evaluation too where it was trained with `dynamic_chunk_training`; its
    `Speech2Text` turns them off, which is what is done here.)

    Args:
        model: ESPnetASRTransducerModel, in evaluation mode.

    Raises:
        ToolError: If the model has a frontend that is not supported.

    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Construct an Encoder object."""
        super().__init__()

        encoder = copy.deepcopy(model.encoder)

        self.frontend = None if model.frontend is None else _LogMel(model.frontend)
        self.normalize = _Normalization(model.normalize)
        self.embed = encoder.embed
        self.positions = _RelativePositions(encoder.pos_enc.size)
        self.blocks = encoder.encoders.blocks
        self.final_norm = encoder.encoders.norm_blocks

    def forward(self, speech: torch.Tensor) -> torch.Tensor:
        """Encode one utterance.

        Args:
            speech: Waveform, from -1 to 1, (1, S); without a frontend, features,
                (1, T_in, F).

        Returns:
            : Encoder output sequence. (1, T, D_enc)

        """
        features = speech if self.frontend is None else self.frontend(speech)

        x, _ = self.embed(self.normalize(features), None)
        positions = self.positions(x)
        mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)

        for block in self.blocks:
            x, mask, positions = block(x, positions, mask)

        return self.final_norm(x)


class DecoderStep(torch.nn.Module):
    """One label for each of B hypotheses, with the state as plain tensors.

    The function of `MEGABiasDecoder.score`. Keys and values of earlier labels come with
    their positions, in any order, and -1 where there is none: a row that fills up the
    history of a shorter hypothesis, or belongs to a padding label. Rows out of reach
    (`history` labels back, or in an earlier chunk) are masked and may be left away.

    Args:
        decoder: Decoder, in evaluation mode.

    Attributes:
        history: Number of earlier labels that are enough (None = all).

    """

    def __init__(self, decoder: MEGABiasDecoder) -> None:
        """Construct a DecoderStep object."""
        super().__init__()

        decoder = copy.deepcopy(decoder)

        self.embed = decoder.embed
        self.blocks = decoder.mega_blocks
        self.final_norm = decoder.final_norm
        self.coefficients = [_Coefficients.of(mega) for mega, _ in self.blocks]

        self.padding_label = decoder.pad_idx
        self.chunk_size = decoder.chunk_size
        self.biases = [mega.rel_pos_bias for mega, _ in self.blocks]
        self.limit = self.biases[0].max_positions
        self.history = None if self.limit is None else self.limit - 1

        if self.limit is None:
            # Without a table, the bias is computed for as many labels as there are.
            for bias in self.biases:
                bias.sine, bias.cosine = bias.sine[:0], bias.cosine[:0]
        else:
            self.register_buffer("bias_by_distance", self._by_distance(self.limit))

    def init_state(self) -> dict[str, torch.Tensor]:
        """Make the state of one hypothesis without labels.

        Returns:
            : Arguments of `forward` other than the labels, by name.

        """
        mega = self.blocks[0][0]
        count, ema = len(self.blocks), mega.multihead_damped_ema
        like = self.embed.weight

        # Inputs that are not there count as zeros, so there can be all from the start.
        state = (
            (ema.num_heads, ema.size)
            if ema.truncation_length is None
            else (ema.truncation_length - 1, ema.size)
        )

        return {
            "length": torch.zeros(1, dtype=torch.int64),
            "ema": like.new_zeros(count, 1, *state),
            "keys": like.new_zeros(count, 1, 0, mega.qk_size),
            "values": like.new_zeros(count, 1, 0, mega.v_size),
            "positions": torch.zeros(1, 0, dtype=torch.int64),
        }

    def forward(
        self,
        labels: torch.Tensor,
        length: torch.Tensor,
        ema: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Feed one label to each hypothesis.

        Args:
            labels: Newest label of each. (B,), int64
            length: Number of labels before it. (B,), int64
            ema: EMA state of each block. (N, B, H, D); with `truncation_length` M, the
                inputs so far, older ones first, zeros where there were none.
                (N, B, M - 1, D)
            keys: Keys of earlier labels. (N, B, P, S)
            values: Values of earlier labels. (N, B, P, V)
            positions: Their positions, from 0, or -1. (B, P), int64

        Returns:
            : Decoder output. (B, D_dec)
            : EMA state after the label. Shape as `ema`
            : Key of the label, to be appended. (N, B, 1, S)
            : Value of the label, to be appended. (N, B, 1, V)
            : Its position, to be appended. (B, 1), int64

        """
        padding = (labels == self.padding_label) & (length > 0)
        newest = torch.where(padding, -1, length).unsqueeze(1)
        bias = self._bias(length, torch.cat([positions, newest], dim=1))

        x = self.embed(labels)
        after = []

        for n, (mega, feed_forward) in enumerate(self.blocks):
            x, *state = _step(
                mega,
                self.coefficients[n],
                x,
                ema[n],
                keys[n],
                values[n],
                bias[n],
                padding,
            )
            x = feed_forward(x)
            after.append(state)

        ema, new_keys, new_values = (
            torch.stack(tensors) for tensors in zip(*after, strict=True)
        )

        return self.final_norm(x), ema, new_keys, new_values, newest

    def _bias(self, length: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Look up the bias of each row, -inf where it is not attended to.

        Args:
            length: Position of the newest label. (B,)
            positions: Positions of all rows. (B, P + 1)

        Returns:
            : Bias of each block. (N, B, P + 1)

        """
        length = length.unsqueeze(1)
        first = torch.zeros_like(length)

        if self.chunk_size > 0:
            first = length - length % self.chunk_size
        elif self.limit is not None:
            first = (length - self.limit + 1).clamp(min=0)

        by_distance = (
            self._by_distance(positions.size(1))
            if self.limit is None
            else self.bias_by_distance
        )
        seen = positions >= first
        distance = torch.where(seen, length - positions, 0)

        return torch.where(seen, by_distance[:, distance], float("-inf"))

    def _by_distance(self, length: int) -> torch.Tensor:
        """Compute the bias at the distances 0, ..., length - 1. (N, length)."""
        return torch.stack([bias.last_row(length).flip(0) for bias in self.biases])


class Joint(torch.nn.Module):
    """Joint network for every pair of a frame and a hypothesis.

    Args:
        joint_network: ESPnet's joint network, in evaluation mode.

    """

    def __init__(self, joint_network: torch.nn.Module) -> None:
        """Construct a Joint object."""
        super().__init__()

        self.joint_network = joint_network

    def forward(self, encoder: torch.Tensor, decoder: torch.Tensor) -> torch.Tensor:
        """Compute the log-probabilities of the labels.

        Args:
            encoder: Encoder outputs of F frames. (F, D_enc)
            decoder: Decoder outputs of B hypotheses. (B, D_dec)

        Returns:
            : Log-probabilities. (F, B, vocab_size)

        """
        logits = self.joint_network(encoder.unsqueeze(1), decoder.unsqueeze(0))

        return torch.log_softmax(logits, dim=-1)


class _Coefficients(NamedTuple):
    """What a block derives from its weights alone.

    Args:
        ema: Coefficients of its EMA.
        query_weight: Weight that makes the query from the key. (S,)
        query_bias: Bias that makes the query from the key. (S,)

    """

    ema: EMAStepCoefficients
    query_weight: torch.Tensor
    query_bias: torch.Tensor

    @classmethod
    def of(cls, mega: MEGA) -> "_Coefficients":
        """Compute them.

        Args:
            mega: Block.

        """
        ema = mega.multihead_damped_ema.step_coefficients()

        return cls(ema, mega.query_weight(), mega.query_bias())


def _step(
    mega: MEGA,
    coefficients: _Coefficients,
    x: torch.Tensor,
    ema: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Do what `block_step` does, with keys and values of each sequence for itself.

    Args:
        mega: Block.
        coefficients: What it derives from its weights.
        x: Input. (B, D)
        ema: EMA state before this position.
        keys: Earlier keys. (B, P, S)
        values: Earlier values. (B, P, V)
        bias: Bias, -inf where a key is not attended to. (B, P + 1)
        padding: True where this position is padding. (B,), bool

    Returns:
        : Output. (B, D)
        : EMA state after this position.
        : New key. (B, 1, S)
        : New value. (B, 1, V)

    """
    new_value = mega.activation(mega.proj_v(x)).unsqueeze(1)
    average, ema = mega.multihead_damped_ema.step(x, ema, padding, coefficients.ema)

    update, key, gate, candidate = mega.gates(average)
    query = torch.addcmul(coefficients.query_bias, key, coefficients.query_weight)
    new_key = key.unsqueeze(1)

    keys = torch.cat([keys, new_key], dim=1)
    values = torch.cat([values, new_value], dim=1)

    scores = torch.bmm(query.unsqueeze(1), keys.transpose(1, 2)) + bias.unsqueeze(1)
    nothing = bias.isneginf().all(-1).view(-1, 1, 1)
    weights = torch.softmax(scores, dim=-1).masked_fill(nothing, 0.0)
    attended = torch.bmm(weights, values).squeeze(1)

    return mega.output(x, update, attended, gate, candidate), ema, new_key, new_value


class _LogMel(torch.nn.Module):
    """Log mel energies of a waveform.

    The Fourier transform is a convolution with windowed cosines and sines: exporters
    have no torch.stft with complex numbers, and what its ONNX counterpart computes is
    left to each runtime.

    Source: espnet/espnet@202511 espnet2/asr/frontend/default.py and
    espnet2/layers/stft.py

    Args:
        frontend: ESPnet's DefaultFrontend.

    Raises:
        ToolError: If it is another one, or enhances speech, or takes spectra.

    """

    def __init__(self, frontend: torch.nn.Module) -> None:
        """Construct a _LogMel object."""
        super().__init__()

        if not hasattr(frontend, "logmel"):
            raise ToolError(
                f"frontend {type(frontend).__name__} cannot be exported: only "
                "`frontend: default`, or features with `input_size`"
            )

        if not frontend.apply_stft:
            raise ToolError("a frontend that takes spectra cannot be exported")

        stft = frontend.stft
        size = stft.n_fft
        window = (
            torch.ones(stft.win_length, dtype=torch.float64)
            if stft.window is None
            else getattr(torch, f"{stft.window}_window")(
                stft.win_length, dtype=torch.float64
            )
        )
        before = (size - stft.win_length) // 2
        window = torch.nn.functional.pad(
            window, (before, size - stft.win_length - before)
        )

        if stft.normalized:
            window = window / math.sqrt(size)

        bins, samples = torch.arange(size // 2 + 1), torch.arange(size)
        angle = 2.0 * math.pi / size * (bins.unsqueeze(1) * samples % size).double()
        basis = torch.cat([torch.cos(angle), torch.sin(angle)]) * window

        self.register_buffer("basis", basis.float().unsqueeze(1))
        self.logmel = frontend.logmel
        self.hop_length = stft.hop_length
        self.margin = size // 2 if stft.center else 0

    def forward(self, speech: torch.Tensor) -> torch.Tensor:
        """Compute log mel energies.

        Args:
            speech: Waveform. (1, S)

        Returns:
            : Features. (1, T_in, F)

        """
        speech = torch.nn.functional.pad(
            speech.unsqueeze(1), (self.margin, self.margin), mode="reflect"
        )
        spectrum = torch.nn.functional.conv1d(
            speech, self.basis, stride=self.hop_length
        )
        real, imaginary = spectrum.transpose(1, 2).chunk(2, dim=-1)
        features, _ = self.logmel(real.square() + imaginary.square())

        return features


class _Normalization(torch.nn.Module):
    """ESPnet's normalisation of features, for one utterance.

    Source: espnet/espnet@202511 espnet2/layers/global_mvn.py and
    espnet2/layers/utterance_mvn.py

    Args:
        normalize: ESPnet's GlobalMVN or UtteranceMVN, or None.

    """

    def __init__(self, normalize: torch.nn.Module | None) -> None:
        """Construct a _Normalization object."""
        super().__init__()

        self.means = normalize is not None and normalize.norm_means
        self.variances = normalize is not None and normalize.norm_vars
        self.eps = getattr(normalize, "eps", 0.0)

        # GlobalMVN has them; UtteranceMVN takes those of the utterance.
        for name in ("mean", "std"):
            self.register_buffer(name, getattr(normalize, name, None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise features.

        Args:
            x: Features. (1, T_in, F)

        Returns:
            : Features. (1, T_in, F)

        """
        if self.mean is not None:
            mean, std = self.mean.to(x.dtype), self.std.to(x.dtype)
        else:
            mean = x.mean(dim=1, keepdim=True)
            variance = (x - mean).square().mean(dim=1, keepdim=True)
            std = variance.sqrt().clamp(min=self.eps)

        if self.means:
            x = x - mean

        return x / std if self.variances else x


class _RelativePositions(torch.nn.Module):
    """ESPnet's relative positional encoding, of any length.

    ESPnet keeps a table that grows; a graph computes what it needs.

    Source: espnet/espnet@202511
    espnet2/asr_transducer/encoder/modules/positional_encoding.py

    Args:
        size: Size of the encoding, even.

    """

    def __init__(self, size: int) -> None:
        """Construct a _RelativePositions object."""
        super().__init__()

        exponent = torch.arange(0, size, 2, dtype=torch.float32)
        self.register_buffer(
            "frequency", torch.exp(exponent * -(math.log(10000.0) / size))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the encoding of the offsets T - 1, ..., 1 - T.

        Args:
            x: Sequence. (1, T, ?)

        Returns:
            : Sine and cosine in turn. (1, 2T - 1, size)

        """
        length = x.size(1)
        offset = length - 1 - torch.arange(2 * length - 1, dtype=x.dtype)
        angle = offset.unsqueeze(1) * self.frequency

        return torch.stack([torch.sin(angle), torch.cos(angle)], -1).flatten(1)[None]
