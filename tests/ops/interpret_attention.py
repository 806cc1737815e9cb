"""Cases of attention for Triton's interpreter: ``TRITON_INTERPRET=1 python -m tests.ops.interpret_attention``.

Prints the number of cases; exits with 1 and says which ones failed.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator

import torch
from tests.ops.attention_cases import LAYER, Case, make_case, relative_error
from triton.runtime import interpreter

from kerf_runtime.ops import attention_triton

DECODE = [(5, 1), (70, 1), (0, 1), (150, 1)]
MIXED = [(3, 1), (0, 40), (65, 1), (33, 20), (0, 3)]
CHUNK = [(70, 45)]
SHORT = [(40, 1), (0, 9), (17, 16)]


def cases() -> Iterator[tuple[str, Case, float]]:
    """Name, case and largest relative error."""
    shapes = [(4, 2, 64, 16), (3, 1, 80, 16), (2, 2, 96, 32), (14, 2, 128, 64), (16, 1, 16, 3)]
    batches = {"decode": DECODE, "mixed": MIXED, "chunk": CHUNK, "short": SHORT}
    for (name, batch), (heads, kv_heads, size, block) in itertools.product(batches.items(), shapes):
        padding = 0 if name == "chunk" else 2
        yield (
            f"{name} {heads}/{kv_heads} heads of {size}, blocks of {block}",
            make_case(
                batch,
                heads=heads,
                kv_heads=kv_heads,
                size=size,
                block_size=block,
                padding_tokens=padding,
                padding_sequences=padding,
                unused=float("nan"),
            ),
            1e-5,
        )
    windows = {"decode": (1, 50, 200), "mixed": (16, 50), "chunk": (50,), "short": (16,)}
    for name, narrow in windows.items():
        for window in narrow:
            yield (
                f"{name} with a window of {window}",
                make_case(
                    batches[name],
                    heads=4,
                    kv_heads=2,
                    size=64,
                    block_size=16,
                    unused=float("nan"),
                    window=window,
                ),
                1e-5,
            )
    # No bfloat16: the interpreter computes with its bits.
    for name, batch in batches.items():
        half = make_case(
            batch,
            heads=4,
            kv_heads=1,
            size=64,
            block_size=16,
            dtype=torch.float16,
            unused=float("nan"),
        )
        yield f"{name} in float16", half, 1e-2
    strided = make_case(MIXED, size=32)
    fused = torch.cat([strided.k.flatten(1), strided.v.flatten(1)], dim=1)
    strided.k, strided.v = (part.view(strided.k.shape) for part in fused.chunk(2, dim=1))
    yield "keys and values as views", strided, 1e-5
    yield "padding alone", make_case([], padding_tokens=3, padding_sequences=3), 0.0


def stored(case: Case) -> bool:
    """Whether the new keys and values are in the cache."""
    real = case.metadata.slot_mapping >= 0
    slots = case.metadata.slot_mapping[real]
    return all(
        torch.equal(cache.view(-1, *cache.shape[2:])[slots], new[real])
        for cache, new in zip(case.kv_caches[LAYER], (case.k, case.v), strict=True)
    )


def mend_the_interpreter() -> None:
    """Let it loop up to a computed bound: it converts one-element arrays in a way newer numpys refuse."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patched


def main() -> int:
    """Run all cases, each twice: counters must be back at zero after the first."""
    mend_the_interpreter()
    failures, count = [], 0
    for name, case, limit in cases():
        count += 1
        for _ in range(2):
            error = relative_error(case.run(attention_triton.paged_attention), case.expected)
            if not error <= limit or not stored(case):
                failures.append(f"{name}: error {error}, stored {stored(case)}")
                break
        if case.metadata.uniform_decode:
            as_mixed = dataclasses.replace(case.metadata, uniform_decode=False)
            other = dataclasses.replace(case, metadata=as_mixed)
            error = relative_error(other.run(attention_triton.paged_attention), case.expected)
            if not error <= limit:
                failures.append(f"{name}, by the mixed kernel: error {error}")
    for failure in failures:
        sys.stdout.write(f"FAILED {failure}\n")
    sys.stdout.write(f"{count - len(failures)} passed\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
