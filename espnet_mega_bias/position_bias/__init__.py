"""Relative position biases; usable in any attention, they need torch alone."""

from espnet_mega_bias.position_bias.base import OffsetBias
from espnet_mega_bias.position_bias.rotary import RotaryRelativePositionBias
from espnet_mega_bias.position_bias.simple import RelativePositionBias

__all__ = ["OffsetBias", "RelativePositionBias", "RotaryRelativePositionBias"]
