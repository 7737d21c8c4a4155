"""MEGA decoder (prediction network) for ESPnet's Transducer."""

from collections.abc import Sequence
from typing import Any

import torch
from espnet2.asr_transducer.activation import get_activation
from espnet2.asr_transducer.beam_search_transducer import Hypothesis
from espnet2.asr_transducer.decoder.abs_decoder import AbsDecoder
from espnet2.asr_transducer.decoder.modules.mega.feed_forward import (
    NormalizedPositionwiseFeedForward,
)
from espnet2.asr_transducer.normalization import get_normalization
from torch.nn.utils.rnn import pad_sequence
from typeguard import typechecked

from espnet_mega_bias.block import MEGA, REL_POS_BIAS_TYPES

# What ESPnet's get_activation and get_normalization know; they keep the names inside.
ACTIVATION_TYPES = (
    "ftswish",
    "hardtanh",
    "identity",
    "leaky_relu",
    "mish",
    "relu",
    "selu",
    "smish",
    "swish",
    "tanh",
)
NORMALIZATION_TYPES = ("basic_norm", "layer_norm", "rms_norm", "scale_norm")

# Outputs that `score` keeps between two calls of `reset_cache`.
SCORE_CACHE_SIZE = 64

State = list[dict[str, Any]]


class MEGABiasDecoder(AbsDecoder):
    """MEGA decoder that computes one function in training and in the beam search.

    A stack of MEGA and feed-forward blocks over the embedded labels. Keys, defaults
    and parameter names are those of ESPnet's `decoder: mega`. A label equal to
    `embed_pad` after position 0 is padding: kept out of the EMA and never attended to.

    The state of one hypothesis is a list with, for each block, "ema_state" (see
    `MultiHeadDampedEMA.init_state`), "prev_key" (L, qk_size) and "prev_value"
    (L, v_size), L being the number of earlier positions within reach: all of them, at
    most `max_positions` - 1, or those of the current chunk. A batch of states has a
    batch dimension in front, its keys and values filled up on the left, and "length",
    the L of each hypothesis. States are never modified.

    Source: arXiv:2209.10655, and
    espnet/espnet@202511 espnet2/asr_transducer/decoder/mega_decoder.py

    Args:
        vocab_size: Vocabulary size.
        block_size: Input/output size of the blocks.
        linear_size: Hidden size of the feed-forward modules.
        qk_size: Query and key size, even with `rel_pos_bias_type: rotary`.
        v_size: Value size.
        num_heads: Number of EMA heads.
        rel_pos_bias_type: Relative position bias, "simple" or "rotary".
        max_positions: Longest label sequence in training, the blank in front included
            (null = no limit, rotary only). Longer ones in decoding attend to the last
            `max_positions` positions.
        truncation_length: Number of inputs that an EMA output depends on (null = all).
        normalization_type: Normalization type.
        normalization_args: Normalization arguments.
        activation_type: Activation function type.
        activation_args: Activation function arguments.
        chunk_size: Chunk size of the attention (-1 = full context).
        num_blocks: Number of blocks.
        dropout_rate: Dropout rate of the values and of the MEGA output.
        embed_dropout_rate: Dropout rate of the embedding.
        att_dropout_rate: Dropout rate of the attention weights.
        ema_dropout_rate: Dropout rate of the EMA output.
        ffn_dropout_rate: Dropout rate of the feed-forward modules.
        embed_pad: Label whose embedding is zero and which pads label sequences.

    Raises:
        ValueError: If a value is out of range or unknown; the message names the key.

    """

    @typechecked
    def __init__(
        self,
        vocab_size: int,
        block_size: int = 512,
        linear_size: int = 1024,
        qk_size: int = 128,
        v_size: int = 1024,
        num_heads: int = 4,
        rel_pos_bias_type: str = "simple",
        max_positions: int | None = 2048,
        truncation_length: int | None = None,
        normalization_type: str = "layer_norm",
        normalization_args: dict = {},  # noqa: B006 (ESPnet's default; only read)
        activation_type: str = "swish",
        activation_args: dict = {},  # noqa: B006 (likewise)
        chunk_size: int = -1,
        num_blocks: int = 4,
        dropout_rate: float = 0.0,
        embed_dropout_rate: float = 0.0,
        att_dropout_rate: float = 0.0,
        ema_dropout_rate: float = 0.0,
        ffn_dropout_rate: float = 0.0,
        embed_pad: int = 0,
    ) -> None:
        """Construct a MEGABiasDecoder object."""
        super().__init__()

        _check_at_least_one(
            vocab_size=vocab_size,
            block_size=block_size,
            linear_size=linear_size,
            qk_size=qk_size,
            v_size=v_size,
            num_heads=num_heads,
            max_positions=max_positions,
            truncation_length=truncation_length,
            num_blocks=num_blocks,
        )
        _check_rates(
            dropout_rate=dropout_rate,
            embed_dropout_rate=embed_dropout_rate,
            att_dropout_rate=att_dropout_rate,
            ema_dropout_rate=ema_dropout_rate,
            ffn_dropout_rate=ffn_dropout_rate,
        )
        _check_known("rel_pos_bias_type", rel_pos_bias_type, REL_POS_BIAS_TYPES)
        _check_known("normalization_type", normalization_type, NORMALIZATION_TYPES)
        _check_known("activation_type", activation_type, ACTIVATION_TYPES)

        if rel_pos_bias_type == "rotary" and qk_size % 2 != 0:
            raise ValueError(
                f"qk_size must be even with rel_pos_bias_type rotary, got {qk_size}"
            )

        if not 0 <= embed_pad < vocab_size:
            raise ValueError(
                f"embed_pad must be a label below vocab_size {vocab_size}, "
                f"got {embed_pad}"
            )

        self.embed = torch.nn.Embedding(vocab_size, block_size, padding_idx=embed_pad)
        self.dropout_embed = torch.nn.Dropout(p=embed_dropout_rate)

        activation = get_activation(activation_type, **activation_args)
        norm_class, norm_args = get_normalization(
            normalization_type, **normalization_args
        )

        self.mega_blocks = torch.nn.ModuleList(
            [
                torch.nn.ModuleList(
                    [
                        MEGA(
                            block_size,
                            num_heads=num_heads,
                            qk_size=qk_size,
                            v_size=v_size,
                            activation=activation,
                            normalization=norm_class(block_size, **norm_args),
                            rel_pos_bias_type=rel_pos_bias_type,
                            max_positions=max_positions,
                            truncation_length=truncation_length,
                            chunk_size=chunk_size,
                            dropout_rate=dropout_rate,
                            att_dropout_rate=att_dropout_rate,
                            ema_dropout_rate=ema_dropout_rate,
                        ),
                        NormalizedPositionwiseFeedForward(
                            block_size,
                            linear_size,
                            normalization=norm_class(block_size, **norm_args),
                            activation=activation,
                            dropout_rate=ffn_dropout_rate,
                        ),
                    ]
                )
                for _ in range(num_blocks)
            ]
        )

        self.final_norm = norm_class(block_size, **norm_args)

        self.vocab_size = vocab_size
        self.output_size = block_size
        self.chunk_size = chunk_size
        self.max_positions = max_positions
        self.pad_idx = embed_pad
        self.num_blocks = num_blocks

        # ESPnet's beam search writes both.
        self.score_cache = {}
        self.device = next(self.parameters()).device

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        """Encode label sequences.

        Args:
            labels: Label sequences, the blank in front. (B, U), int64 or int32

        Returns:
            : Decoder output sequences. (B, U, D_dec)

        Raises:
            ValueError: If U is above `max_positions`, with full-context attention.

        """
        length = labels.size(1)

        if (
            self.chunk_size <= 0
            and self.max_positions is not None
            and length > self.max_positions
        ):
            raise ValueError(
                f"label sequence of {length} positions (blank included) is longer than "
                f"max_positions {self.max_positions}: set decoder_conf.max_positions "
                f"to {length} or more"
            )

        padding = labels == self.pad_idx
        padding[:, 0] = False

        x = self.dropout_embed(self.embed(labels))

        for mega, feed_forward in self.mega_blocks:
            x = feed_forward(mega(x, padding))

        return self.final_norm(x)

    def set_device(self, device: torch.device) -> None:
        """Set the device that ESPnet's search puts its own tensors on.

        Args:
            device: Device; the decoder itself works where its weights are.

        """
        self.device = device

    def score(
        self, label_sequence: list[int], states: State
    ) -> tuple[torch.Tensor, State]:
        """Compute the decoder output after the last label of one hypothesis.

        Args:
            label_sequence: Labels from the blank in front on. (U,)
            states: State before the last label.

        Returns:
            : Decoder output. (1, D_dec)
            : State after the last label.

        Raises:
            ValueError: If the state belongs to a sequence of another length.

        """
        weights = self._weights_version()

        if self.score_cache.get("weights") != weights:
            self.score_cache.clear()
            self.score_cache["weights"] = weights

        prefix = tuple(label_sequence)
        scored = self.score_cache.pop(prefix, None)

        if scored is None:
            out, batch = self._step([label_sequence], [states])
            scored = (out, self.select_state(batch, 0))

        # The latest entry goes last, so the first ones are those longest unused.
        self.score_cache[prefix] = scored

        if len(self.score_cache) > SCORE_CACHE_SIZE + 1:
            oldest = next(key for key in self.score_cache if key != "weights")
            del self.score_cache[oldest]

        return scored

    def batch_score(self, hyps: list[Hypothesis]) -> tuple[torch.Tensor, State]:
        """Compute the decoder output after the last label of each hypothesis.

        Args:
            hyps: Hypotheses, of any lengths. [B]

        Returns:
            : Decoder outputs. (B, D_dec)
            : Batch of states after the last labels.

        Raises:
            ValueError: If a state belongs to a sequence of another length.

        """
        return self._step([hyp.yseq for hyp in hyps], [hyp.dec_state for hyp in hyps])

    def init_state(self, batch_size: int = 0) -> State:
        """Make the state of a hypothesis without labels.

        Args:
            batch_size: Not used: the state is that of one hypothesis.

        Returns:
            : State.

        """
        return [
            {
                "ema_state": mega.multihead_damped_ema.init_state(),
                "prev_key": mega.qk_bias.new_zeros(0, mega.qk_size),
                "prev_value": mega.qk_bias.new_zeros(0, mega.v_size),
            }
            for mega, _ in self.mega_blocks
        ]

    def select_state(self, states: State, idx: int) -> State:
        """Take the state of one hypothesis out of a batch.

        Args:
            states: Batch of states.
            idx: Index of the hypothesis.

        Returns:
            : State.

        """
        selected = []

        for state in states:
            start = state["prev_key"].size(1) - state["length"][idx]

            selected.append(
                {
                    "ema_state": state["ema_state"][idx],
                    "prev_key": state["prev_key"][idx, start:],
                    "prev_value": state["prev_value"][idx, start:],
                }
            )

        return selected

    def create_batch_states(self, new_states: list[State]) -> State:
        """Make a batch of states.

        Args:
            new_states: States of B hypotheses, of any lengths.

        Returns:
            : Batch of states.

        """
        lengths = [state[0]["prev_key"].size(0) for state in new_states]

        return [
            {
                **{
                    name: _stack([state[block][name] for state in new_states])
                    for name in ("ema_state", "prev_key", "prev_value")
                },
                "length": lengths,
            }
            for block in range(self.num_blocks)
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the search in progress: its tensors may belong to a graph."""
        return {**self.__dict__, "score_cache": {}}

    def _step(
        self, sequences: Sequence[list[int]], states: Sequence[State]
    ) -> tuple[torch.Tensor, State]:
        """Feed the last label of each sequence.

        Args:
            sequences: Label sequences from the blank in front on. [B]
            states: State before the last label of each. [B]

        Returns:
            : Decoder outputs. (B, D_dec)
            : Batch of states after the last labels.

        """
        reach = [self._reach(len(sequence) - 1) for sequence in sequences]

        for sequence, state, expected in zip(sequences, states, reach, strict=True):
            held = state[0]["prev_key"].size(0)

            if held != expected:
                raise ValueError(
                    f"the state holds {held} positions, but a sequence of "
                    f"{len(sequence)} labels needs {expected} before its last label"
                )

        device = self.embed.weight.device
        labels = torch.tensor([sequence[-1] for sequence in sequences], device=device)
        padding = self._padding(sequences, reach, device)

        x = self.embed(labels)

        lengths = [self._reach(len(sequence)) for sequence in sequences]
        new_states = []

        for (mega, feed_forward), state in zip(
            self.mega_blocks, self.create_batch_states(states), strict=True
        ):
            x, ema_state, keys, values = mega.step(
                x, state["ema_state"], state["prev_key"], state["prev_value"], padding
            )
            x = feed_forward(x)

            new_states.append(
                {
                    "ema_state": ema_state,
                    "prev_key": keys,
                    "prev_value": values,
                    "length": lengths,
                }
            )

        return self.final_norm(x), new_states

    def _reach(self, position: int) -> int:
        """Count the earlier positions that the given one attends to.

        Args:
            position: Position, from 0.

        Returns:
            : Number of positions.

        """
        if self.chunk_size > 0:
            return position % self.chunk_size

        if self.max_positions is None:
            return position

        return min(position, self.max_positions - 1)

    def _padding(
        self,
        sequences: Sequence[list[int]],
        reach: Sequence[int],
        device: torch.device,
    ) -> torch.Tensor | None:
        """Mark the positions that are not to be attended to.

        Args:
            sequences: Label sequences from the blank in front on. [B]
            reach: Number of positions before the last label of each. [B]
            device: Device of the result.

        Returns:
            : True for filling and padding labels, the last label last, or None where
                there is neither. (B, max(reach) + 1), bool

        """
        width = max(reach)
        padded = any(self.pad_idx in sequence[1:] for sequence in sequences)

        if not padded and min(reach) == width:
            return None

        rows = []

        for sequence, count in zip(sequences, reach, strict=True):
            start = len(sequence) - 1 - count

            rows.append(
                [True] * (width - count)
                + [
                    position > 0 and sequence[position] == self.pad_idx
                    for position in range(start, len(sequence))
                ]
            )

        return torch.tensor(rows, device=device)

    def _weights_version(self) -> tuple[tuple[int, int], ...]:
        """Identify the current weights: changed in place, or replaced.

        Returns:
            : Version counter and address of each parameter.

        """
        return tuple(
            (0 if weight.is_inference() else weight._version, weight.data_ptr())
            for weight in self.parameters()
        )


def _stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Stack tensors, shorter ones filled up with zeros in front.

    Args:
        tensors: Tensors of the same trailing shape. [B x (L_b, ...)]

    Returns:
        : Stacked tensors. (B, max(L_b), ...)

    """
    if len({tensor.size(0) for tensor in tensors}) == 1:
        return torch.stack(tensors)

    return pad_sequence(tensors, batch_first=True, padding_side="left")


def _check_at_least_one(**values: int | None) -> None:
    for key, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{key} must be at least 1, got {value}")


def _check_rates(**rates: float) -> None:
    for key, rate in rates.items():
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"{key} must be between 0 and 1, got {rate}")


def _check_known(key: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{key} must be one of {', '.join(known)}, got {value!r}")
