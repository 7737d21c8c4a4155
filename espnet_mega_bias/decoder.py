"""MEGA decoder (prediction network) for ESPnet's Transducer."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from espnet2.asr_transducer.activation import get_activation
from espnet2.asr_transducer.beam_search_transducer import Hypothesis
from espnet2.asr_transducer.decoder.abs_decoder import AbsDecoder
from espnet2.asr_transducer.decoder.modules.mega.feed_forward import (
    NormalizedPositionwiseFeedForward,
)
from espnet2.asr_transducer.normalization import get_normalization
from typeguard import typechecked

from espnet_mega_bias.autocast import autocast_dtype
from espnet_mega_bias.block import MEGA, REL_POS_BIAS_TYPES
from espnet_mega_bias.block_step import block_step
from espnet_mega_bias.decoder_state import DecoderState, History
from espnet_mega_bias.ema import EMAStepCoefficients, masked, stack_ema_coefficients
from espnet_mega_bias.feed_forward import feed_forward, feed_forward_step
from espnet_mega_bias.key_value_cache import KeyValueCache, join, new_cache
from espnet_mega_bias.light_call import light_call
from espnet_mega_bias.weights_watch import WeightsWatch

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

# Outputs that are kept between two calls of ESPnet's `reset_cache`.
SCORE_CACHE_SIZE = 256

# Distances that a search computes the bias for, until it needs more.
_FIRST_DISTANCES = 64


class _Block(NamedTuple):
    """What a step calls in a block.

    Args:
        mega: MEGA block, for a step.
        feed_forward: Feed-forward module, for few rows.

    """

    mega: Callable[..., torch.Tensor]
    feed_forward: Callable[[torch.Tensor], torch.Tensor]


class _Derived(NamedTuple):
    """What a search derives from the weights alone, and the modules that it calls.

    Args:
        mode: What `_mode` gave.
        device: Type of device.
        weights: Notices when this is out of date.
        embed: Embedding.
        blocks: Blocks. [N]
        emas: Coefficients of the EMAs of all blocks.
        row_sizes: Sizes of key and value.
        final_norm: Normalization of the output.
        bias: Bias of each block by distance, -inf at the end. (N, L + 1)
        reach: Length of the longest sequence that the bias is enough for.

    """

    mode: tuple[bool, torch.dtype | None, bool]
    device: str
    weights: WeightsWatch
    embed: Callable[[torch.Tensor], torch.Tensor]
    blocks: list[_Block]
    emas: EMAStepCoefficients
    row_sizes: tuple[int, int]
    final_norm: Callable[[torch.Tensor], torch.Tensor]
    bias: torch.Tensor
    reach: float


class MEGABiasDecoder(AbsDecoder):
    """MEGA decoder that computes one function in training and in the beam search.

    A stack of MEGA and feed-forward blocks over the embedded labels. Keys, defaults
    and parameter names are those of ESPnet's `decoder: mega`. A label equal to
    `embed_pad` after position 0 is padding: kept out of the EMA and never attended to.

    The state of a hypothesis is a `DecoderState`; a batch of states is a list of them.
    States are never modified.

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

        # ESPnet's Swish hands over to a module of torch's: one call less, ten a label.
        if isinstance(getattr(activation, "swish", None), torch.nn.Module):
            activation = activation.swish

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

        for mega, module in self.mega_blocks:
            x = feed_forward(module, mega(x, padding))

        return self.final_norm(x)

    def set_device(self, device: torch.device) -> None:
        """Set the device that ESPnet's search puts its own tensors on.

        Args:
            device: Device; the decoder itself works where its weights are.

        """
        self.device = device

    def score(
        self, label_sequence: list[int], states: DecoderState
    ) -> tuple[torch.Tensor, DecoderState]:
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
        ((out, state),) = self._score([label_sequence], [states])

        return out, state

    def batch_score(
        self, hyps: list[Hypothesis]
    ) -> tuple[torch.Tensor, list[DecoderState]]:
        """Compute the decoder output after the last label of each hypothesis.

        Args:
            hyps: Hypotheses, of any lengths. [B]

        Returns:
            : Decoder outputs. (B, D_dec)
            : States after the last labels. [B]

        Raises:
            ValueError: If a state belongs to a sequence of another length.

        """
        outs, states = zip(
            *self._score([hyp.yseq for hyp in hyps], [hyp.dec_state for hyp in hyps]),
            strict=True,
        )

        return torch.cat(outs), list(states)

    def init_state(self, batch_size: int = 0) -> DecoderState:
        """Make the state of a hypothesis without labels.

        Args:
            batch_size: Not used: the state is that of one hypothesis.

        Returns:
            : State.

        """
        return DecoderState(
            torch.stack(
                [mega.multihead_damped_ema.init_state() for mega, _ in self.mega_blocks]
            )
        )

    def select_state(self, states: list[DecoderState], idx: int) -> DecoderState:
        """Take the state of one hypothesis out of a batch.

        Args:
            states: States. [B]
            idx: Index of the hypothesis.

        Returns:
            : State.

        """
        return states[idx]

    def create_batch_states(self, new_states: list[DecoderState]) -> list[DecoderState]:
        """Make a batch of states.

        Args:
            new_states: States of B hypotheses, of any lengths. [B]

        Returns:
            : States. [B]

        """
        return list(new_states)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the search in progress: its tensors may belong to a graph."""
        return {**self.__dict__, "score_cache": {}}

    def _score(
        self, sequences: Sequence[list[int]], states: Sequence[DecoderState]
    ) -> list[tuple[torch.Tensor, DecoderState]]:
        """Give the output and state after the last label of each sequence.

        The searches ask again and again for what a hypothesis that did not grow has
        led to. Two calls mean the same where they give the same state object.

        Args:
            sequences: Label sequences from the blank in front on. [B]
            states: State before the last label of each. [B]

        Returns:
            : Decoder output (1, D_dec) and state of each. [B]

        """
        derived = self._derived(max(map(len, sequences)))
        cache, keys, new = self.score_cache, [], {}

        for sequence, state in zip(sequences, states, strict=True):
            if state.length != len(sequence) - 1:
                raise ValueError(
                    f"the state has seen {state.length} labels, but it takes one that "
                    f"has seen {len(sequence) - 1} to score the last of "
                    f"{len(sequence)} labels"
                )

            keys.append(key := (id(state), sequence[-1]))

            # The latest go last, so the first ones are those longest unused.
            if key in cache:
                cache[key] = cache.pop(key)
            else:
                new[key] = state

        if new:
            outs, after = self._step(
                [label for _, label in new], list(new.values()), derived
            )

            for (key, before), out, state in zip(
                new.items(), outs.chunk(len(new)), after, strict=True
            ):
                # Holding the state before keeps its id from being used again.
                cache[key] = (out, state, before)

        scored = [cache[key][:2] for key in keys]

        while len(cache) > SCORE_CACHE_SIZE + 1:
            del cache[next(key for key in cache if key != "derived")]

        return scored

    def _step(
        self, labels: list[int], states: list[DecoderState], derived: _Derived
    ) -> tuple[torch.Tensor, list[DecoderState]]:
        """Feed one label to each of B hypotheses.

        Args:
            labels: Label of each. [B]
            states: State before the label of each. [B]
            derived: What follows from the weights.

        Returns:
            : Decoder outputs. (B, D_dec)
            : States after the labels. [B]

        """
        count, device = len(labels), derived.bias.device

        first = [self._first_in_reach(state.length) for state in states]
        cache, histories = self._histories(states, first)
        used, total = cache.used, cache.used + count

        newest, lengths, rows = torch.tensor(
            [labels, [state.length for state in states], list(range(used, total))],
            device=device,
        ).unbind()
        pads = [
            label == self.pad_idx and state.length > 0
            for label, state in zip(labels, states, strict=True)
        ]
        histories = [
            history if pad else (*history, here)
            for history, pad, *here in zip(
                histories, pads, rows.chunk(count), lengths.chunk(count), strict=True
            )
        ]

        distances = _distances(histories, lengths, total, derived.bias.size(1) - 1)
        bias = derived.bias.index_select(1, distances).view(-1, count, total)
        padding = torch.tensor(pads, device=device) if any(pads) else None

        ema_states = _stack([state.ema_state for state in states])
        kept, carried = derived.emas.carry(ema_states)
        attended = cache.buffer.narrow(1, 0, total)

        if torch.is_grad_enabled():
            # Autograd keeps what a block attends to, and notices what is written beside
            # it, by the next one too.
            parts = [part.clone() for part in attended.unbind()]
            views = zip(
                *(_views(part, count, derived.row_sizes) for part in parts), strict=True
            )
        else:
            views = (
                view.unbind() for view in _views(attended, count, derived.row_sizes)
            )

        inputs = zip(carried.unbind(), *views, bias.unbind(), strict=True)
        x, block_inputs = derived.embed(newest), []

        for block, arguments in zip(derived.blocks, inputs, strict=True):
            block_inputs.append(x)
            x = block.mega(x, *arguments, padding)
            x = block.feed_forward(x)

        block_inputs = masked(torch.stack(block_inputs), padding)
        ema_states = derived.emas.advance(kept, block_inputs).to(ema_states.dtype)

        if torch.is_grad_enabled():
            cache.buffer = torch.stack(parts)

        # Only now: the rows of a step that was interrupted are to be overwritten.
        cache.used = total

        after = [
            DecoderState(ema_state, state.length + 1, cache, history, start)
            for ema_state, state, history, start in zip(
                ema_states.unbind(1), states, histories, first, strict=True
            )
        ]

        return derived.final_norm(x), after

    def _histories(
        self, states: list[DecoderState], first: list[int]
    ) -> tuple[KeyValueCache, list[History]]:
        """Bring what B hypotheses attend to into one cache, with room for B labels.

        Args:
            states: States. [B]
            first: First position that each attends to. [B]

        Returns:
            : Cache.
            : Rows and positions of the earlier labels of each hypothesis. [B]

        """
        histories = [
            state.history_from(start)
            for state, start in zip(states, first, strict=True)
        ]
        parts = [
            (state.cache, rows)
            for state, history in zip(states, histories, strict=True)
            for rows, _ in history
        ]

        if not parts:
            mega, _ = self.mega_blocks[0]
            like = self.embed.weight.new_empty(
                len(self.mega_blocks), 0, mega.qk_size + mega.v_size
            )

            return new_cache(like, len(states)), histories

        cache, places = join(parts, len(states))
        moved = iter(places)
        histories = [
            tuple((next(moved), positions) for _, positions in history)
            for history in histories
        ]

        # Autograd: what this step adds to the graph is none of the states' business.
        if not torch.is_grad_enabled():
            for state, history, start in zip(states, histories, first, strict=True):
                # A state with a graph keeps it.
                if history and not state.cache.buffer.requires_grad:
                    state.move(cache, history, start)

        return cache, histories

    def _first_in_reach(self, position: int) -> int:
        """Find the first position that the given one attends to.

        Args:
            position: Position, from 0.

        Returns:
            : Position.

        """
        if self.chunk_size > 0:
            return position - position % self.chunk_size

        if self.max_positions is None:
            return 0

        return max(position - self.max_positions + 1, 0)

    def _derived(self, length: int) -> _Derived:
        """Give what follows from the weights, formed anew where they changed.

        Args:
            length: Length of the longest sequence to score, in positions.

        Returns:
            : Coefficients, and bias at least as far as any of its positions attends.

        """
        derived = self.score_cache.get("derived")

        if (
            derived is not None
            # A graph serves one backward pass.
            and not torch.is_grad_enabled()
            and derived.mode == _mode(derived.device, self.training)
            and derived.weights.unchanged()
        ):
            if length <= derived.reach:
                return derived
        else:
            self.score_cache.clear()

        biases = [mega.rel_pos_bias for mega, _ in self.mega_blocks]
        limit = biases[0].max_positions or math.inf
        distances = min(max(_FIRST_DISTANCES, 2 * length), limit)

        by_distance = torch.stack([bias.last_row(distances).flip(0) for bias in biases])
        emas = [
            mega.multihead_damped_ema.step_coefficients()
            for mega, _ in self.mega_blocks
        ]
        blocks = [
            _Block(block_step(mega, ema), feed_forward_step(module))
            for (mega, module), ema in zip(self.mega_blocks, emas, strict=True)
        ]
        device = self.embed.weight.device
        derived = _Derived(
            _mode(device.type, self.training),
            device.type,
            WeightsWatch(self),
            self.embed,
            blocks,
            stack_ema_coefficients(emas),
            (self.mega_blocks[0][0].qk_size, self.mega_blocks[0][0].v_size),
            light_call(self.final_norm),
            torch.nn.functional.pad(by_distance, (0, 1), value=float("-inf")),
            math.inf if distances == limit else distances,
        )
        self.score_cache["derived"] = derived

        return derived


def _views(
    rows: torch.Tensor, count: int, sizes: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take rows of a cache apart.

    Args:
        rows: Rows that are attended to. (..., R, S + V)
        count: Number of new ones B, at the end.
        sizes: Sizes of key and value, S and V.

    Returns:
        : New rows. (..., B, S + V)
        : Keys, transposed. (..., S, R)
        : Values. (..., R, V)

    """
    key, value = sizes

    return (
        rows.narrow(-2, -count, count),
        rows.narrow(-1, 0, key).transpose(-1, -2),
        rows.narrow(-1, key, value),
    )


def _mode(device: str, training: bool) -> tuple[bool, torch.dtype | None, bool]:
    """Tell what else than weights the step depends on.

    Args:
        device: Type of device.
        training: Whether the decoder is in training mode.

    Returns:
        : Inference mode, type of autocast, and training.

    """
    return torch.is_inference_mode_enabled(), autocast_dtype(device), training


def _distances(
    histories: list[History], lengths: torch.Tensor, total: int, out_of_reach: int
) -> torch.Tensor:
    """Lay out how far back each row of the cache is, as each hypothesis sees it.

    Args:
        histories: Rows and positions of what each hypothesis attends to. [B]
        lengths: Position of the newest label of each. (B,), int64
        total: Number of rows R.
        out_of_reach: What stands for a row that is not attended to.

    Returns:
        : Number of labels back. (B * R,), int64

    """
    count = len(histories)
    distances = lengths.new_full((count * total,), out_of_reach)
    parts = [part for history in histories for part in history]

    if not parts:
        return distances

    rows, positions = (torch.cat(tensors) for tensors in zip(*parts, strict=True))

    if count > 1:
        held = [sum(part.numel() for part, _ in history) for history in histories]
        # torch's repeat_interleave wakes all threads, however little there is to do.
        batch = torch.from_numpy(np.arange(count).repeat(held)).to(lengths.device)
        rows = rows + total * batch
        lengths = lengths[batch]

    return distances.scatter_(0, rows, lengths - positions)


def _stack(states: list[torch.Tensor]) -> torch.Tensor:
    """Stack EMA states; where these are inputs so far, fewer ones get zeros in front.

    Args:
        states: EMA states. [B x (N, ...)]

    Returns:
        : Batch of EMA states. (N, B, ...)

    """
    longest = max(state.size(1) for state in states)

    return torch.stack(
        [
            state
            if state.size(1) == longest
            else torch.nn.functional.pad(state, (0, 0, longest - state.size(1), 0))
            for state in states
        ],
        dim=1,
    )


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
