"""Writes Q4_K and Q6_K blocks, which the gguf package only reads: what was stored is known exactly.

The layouts are those of the GGUF format.  A block holds 256 values.

    Q4_K, 144 bytes   d, dmin: float16; 12 bytes with 8 scales and 8 minima of 6 bits; 128 bytes of nibbles
                      value = d * scale * code - dmin * minimum, with a scale and a minimum per 32 values
    Q6_K, 210 bytes   128 bytes with the low 4 bits, 64 bytes with the high 2 bits of the codes; 16 scales
                      of int8, one per 16 values; d: float16.   value = d * scale * (code - 32)
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np

__all__ = ["Q4KCodes", "Q6KCodes", "expanded", "quantize"]

BLOCK = 256


@dataclass(frozen=True)
class Q4KCodes:
    """What n blocks hold: d, dmin [n] float16; scales, minima [n, 8] in 0..63; codes [n, 8, 32] in 0..15."""

    d: np.ndarray
    dmin: np.ndarray
    scales: np.ndarray
    minima: np.ndarray
    codes: np.ndarray

    def values(self) -> np.ndarray:
        """The numbers that are meant: [n, 256] float32."""
        scale = self.d.astype(np.float32)[:, None] * self.scales.astype(np.float32)
        minimum = self.dmin.astype(np.float32)[:, None] * self.minima.astype(np.float32)
        found = scale[..., None] * self.codes.astype(np.float32) - minimum[..., None]
        return found.reshape(-1, BLOCK)

    def pack(self) -> np.ndarray:
        """The bytes: [n, 144] uint8."""
        return np.stack([self._pack_block(block) for block in range(len(self.d))])

    def _pack_block(self, block: int) -> np.ndarray:
        packed = np.zeros(12, np.uint8)
        for index in range(8):
            scale, minimum = int(self.scales[block, index]), int(self.minima[block, index])
            if index < 4:
                packed[index] |= scale
                packed[index + 4] |= minimum
            else:  # four bits of each in a byte of their own, the other two on top of the earlier ones
                packed[index + 4] = (scale & 15) | (minimum & 15) << 4
                packed[index - 4] |= scale >> 4 << 6
                packed[index] |= minimum >> 4 << 6
        codes = self.codes[block].astype(np.uint8).reshape(4, 2, 32)
        nibbles = codes[:, 0] | codes[:, 1] << 4
        head = np.array([self.d[block], self.dmin[block]], np.float16).view(np.uint8)
        return np.concatenate([head, packed, nibbles.reshape(-1)])


@dataclass(frozen=True)
class Q6KCodes:
    """What n blocks hold: d [n] float16; scales [n, 16] int8; codes [n, 16, 16] in 0..63."""

    d: np.ndarray
    scales: np.ndarray
    codes: np.ndarray

    def values(self) -> np.ndarray:
        """The numbers that are meant: [n, 256] float32."""
        scale = self.d.astype(np.float32)[:, None] * self.scales.astype(np.float32)
        return (scale[..., None] * (self.codes.astype(np.float32) - 32)).reshape(-1, BLOCK)

    def pack(self) -> np.ndarray:
        """The bytes: [n, 210] uint8."""
        return np.stack([self._pack_block(block) for block in range(len(self.d))])

    def _pack_block(self, block: int) -> np.ndarray:
        low, high = np.zeros(128, np.uint8), np.zeros(64, np.uint8)
        for at, code in enumerate(self.codes[block].reshape(-1)):
            half, quarter, lane = at // 128, at % 128 // 32, at % 32
            low[64 * half + 32 * (quarter % 2) + lane] |= (int(code) & 15) << 4 * (quarter // 2)
            high[32 * half + lane] |= int(code) >> 4 << 2 * quarter
        tail = np.array([self.d[block]], np.float16).view(np.uint8)
        return np.concatenate([low, high, self.scales[block].astype(np.int8).view(np.uint8), tail])


def _nearest(values: np.ndarray, top: int) -> np.ndarray:
    return np.clip(np.rint(values), 0, top).astype(np.int64)


def _q4_k(values: np.ndarray) -> Q4KCodes:
    groups = values.reshape(-1, 8, 32)
    minimum = np.maximum(-groups.min(-1), 0)
    scale = (groups.max(-1) + minimum) / 15
    d = (scale.max(-1) / 63).astype(np.float16)
    dmin = (minimum.max(-1) / 63).astype(np.float16)
    scales = _nearest(scale / np.maximum(d, 1e-7)[:, None].astype(np.float32), 63)
    minima = _nearest(minimum / np.maximum(dmin, 1e-7)[:, None].astype(np.float32), 63)
    step = np.maximum(d[:, None] * scales, 1e-7)[..., None].astype(np.float32)
    offset = (dmin[:, None] * minima)[..., None].astype(np.float32)
    return Q4KCodes(d, dmin, scales, minima, _nearest((groups + offset) / step, 15))


def _q6_k(values: np.ndarray) -> Q6KCodes:
    groups = values.reshape(-1, 16, 16)
    scale = np.abs(groups).max(-1) / 31
    d = (scale.max(-1) / 127).astype(np.float16)
    scales = _nearest(scale / np.maximum(d, 1e-7)[:, None].astype(np.float32), 127)
    step = np.maximum(d[:, None] * scales, 1e-7)[..., None].astype(np.float32)
    return Q6KCodes(d, scales, _nearest(groups / step + 32, 63))


def _codes(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> Q4KCodes | Q6KCodes:
    return (_q4_k if kind is gguf.GGMLQuantizationType.Q4_K else _q6_k)(values)


def quantize(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """A matrix as Q4_K or Q6_K: [rows, bytes of a row]; rows are whole blocks."""
    return _codes(values, kind).pack().reshape(values.shape[0], -1)


def expanded(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """What ``quantize`` stores of a matrix, as float32 of the same shape."""
    return _codes(values, kind).values().reshape(values.shape)
