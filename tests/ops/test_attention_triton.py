"""The Triton kernels of attention, run by Triton's interpreter on the CPU.

Whether a kernel is interpreted is decided when triton is imported, so the cases run in a process of
their own; a failure there is a failure here, with its output.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
HERE = Path(__file__).parent


def test_every_case_agrees_with_the_reference_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.interpret_attention"],
        cwd=HERE.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert int(done.stdout.split()[-2]) >= 33, done.stdout


def test_attention_on_the_cpu_does_not_import_triton() -> None:
    code = (
        "import sys, torch, kerf_runtime.ops.attention as a\n"
        "from kerf_runtime.forward_context import *\n"
        "q = torch.zeros(1, 2, 8)\n"
        "with set_forward_context(ForwardContext()):\n"
        "    torch.ops.kerf.attention(q, q, q, torch.empty_like(q), 'layer')\n"
        "assert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HERE.parents[1])


@given(st.integers(1, 4096), st.integers(1, 64), st.sampled_from([4, 78, 108, 132, 144]))
def test_parts_fill_the_device_and_fit_the_workspace(
    sequences: int, kv_heads: int, multiprocessors: int
) -> None:
    from kerf_runtime.ops.attention_triton import MAX_SPLITS, choose_splits

    splits = choose_splits(sequences, kv_heads, multiprocessors)
    programs = sequences * kv_heads * splits
    assert 1 <= splits <= MAX_SPLITS
    assert splits & (splits - 1) == 0
    assert programs >= 2 * multiprocessors or splits == MAX_SPLITS
    assert splits == 1 or programs <= 8 * multiprocessors


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", range(1, 17))
def test_tiles_hold_a_group_and_fit_shared_memory(
    group: int, head_size: int, itemsize: int
) -> None:
    """Queries and two tiles of keys and of values within the 227 KiB that a block may use."""
    from kerf_runtime.ops.attention_triton import decode_tiles, mixed_tiles

    for tiles in (
        decode_tiles(group, head_size, itemsize),
        mixed_tiles(group, head_size, itemsize, long=True),
        mixed_tiles(group, head_size, itemsize, long=False),
    ):
        assert tiles.rows >= group
        padded = 1 << (head_size - 1).bit_length()
        assert (tiles.rows + 2 * 2 * tiles.keys) * padded * itemsize <= 227 * 1024


def test_compiled_kernels_get_every_argument_in_their_own_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launching by address binds nothing by name, so the order is checked here, without a GPU."""
    import dataclasses
    import math

    import torch
    from tests.ops.attention_cases import LAYER, make_case

    from kerf_runtime.ops import attention_triton

    launches: list[tuple[tuple[int, ...], dict[str, object]]] = []

    class Compiled:
        function = packed_metadata = None

        def __init__(self, names: list[str]) -> None:
            self.names = names

        def run(self, *arguments: object) -> None:
            grid, rest = arguments[:3], arguments[9:]
            launches.append((grid, dict(zip(self.names, rest, strict=True))))  # type: ignore[arg-type]

    def ready(kernel: attention_triton._Kernel, *_: object) -> attention_triton._Kernel:
        return dataclasses.replace(kernel, compiled=Compiled(kernel.function.arg_names))

    monkeypatch.setattr(attention_triton._Kernel, "ready", ready)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(attention_triton, "_ready", {})
    decode = make_case([(5, 1), (9, 1)], heads=6, kv_heads=2, size=64, block_size=16)
    mixed = make_case([(5, 1), (9, 30)], heads=6, kv_heads=2, size=64, block_size=16)
    for case in (decode, mixed):
        case.run(attention_triton.paged_attention)

    assert [grid for grid, _ in launches] == [(2, 2, 2), (31, 1, 1), (2, 31 // 10 + 2, 1)]
    for case, (_, found) in zip((decode, mixed, mixed), launches, strict=True):
        metadata = case.metadata
        tensors = {
            **{"q": case.q, "k": case.k, "v": case.v},
            **dict(zip(("key_cache", "value_cache"), case.kv_caches[LAYER], strict=True)),
            **{"block_table": metadata.block_table, "seq_lens": metadata.seq_lens},
            **{"slot_mapping": metadata.slot_mapping, "query_start": metadata.query_start},
        }
        numbers = {
            **{"q_token": 6 * 64, "q_head": 64, "k_token": 128, "k_head": 64, "v_token": 128},
            **{"v_head": 64, "out_token": 6 * 64, "out_head": 64, "splits": 2, "sequences": 2},
            **{"table_row": metadata.block_table.stride(0), "scale": math.log2(math.e) / 8},
            **{"G": 3, "G_PAD": 4, "HEADS": 6, "KV_HEADS": 2, "D": 64, "D_PAD": 64, "S": 16},
            **{"MIN_TILES": 2, "UNROLL": 8, "STORE": 128, "ZERO": 512, "STAGES": 1, "TILE": 32},
            **{"PRECISION": "ieee", "SCALED": False, "FP8_MAX": 448.0, "WINDOW": 0},
        }
        for name, value in found.items():
            if name in tensors:
                assert value == tensors[name].data_ptr(), name
            elif name in numbers:
                assert value == numbers[name], name
            else:
                assert name in {
                    *("output", "output_scale", "partial", "statistics", "arrivals"),
                    *("ROWS", "QUERIES"),
                }
