"""Triton kernels of paged attention: store, decode with split keys, prefill and mixed batches.

All three find their work from metadata on the device, and their launch grids depend on the padded batch
alone, so a recorded launch stays right for any lengths.  The host side, which chooses grids and tile
sizes, is ``kerf_runtime.ops.attention_triton``.

Legend: T tokens, B sequences, H query heads, K key/value heads, G = H / K, D head size, S tokens per
cache block.  Softmax is computed in base 2 with a running maximum (Dao, "FlashAttention-2", 2023); the
``scale`` arguments therefore contain log2(e).  Query heads that share a key head are rows of one tile,
so keys and values are read once per group.  Splitting the keys of one sequence over several programs
and combining their results is "Flash-Decoding" (Dao, Haziza, Massa, Sizov, 2023).
"""

# ruff: noqa: N803  constants of a kernel are written in capitals
# Triton's compiler reads annotations of kernel arguments: no ``from __future__ import annotations``.
import triton
import triton.language as tl

__all__ = ["decode_kernel", "mixed_kernel", "store_kernel"]


@triton.jit
def _write(pointers, values, mask, scale, SCALED: tl.constexpr, FP8_MAX: tl.constexpr):
    """Store float32 ``values``, divided by ``scale`` and clamped when the output is quantised."""
    if SCALED:
        values = values / scale
        values = tl.minimum(tl.maximum(values, -FP8_MAX), FP8_MAX)
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def store_kernel(
    k,
    v,
    output,
    key_cache,
    value_cache,
    slot_mapping,
    k_token,
    k_head,
    v_token,
    v_head,
    out_token,
    out_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    STORE: tl.constexpr,
    ZERO: tl.constexpr,
):
    """One token: its key and value go to its slot; a token of padding gets zeros as its output.

    Grid: (T,).  ``STORE`` and ``ZERO`` are the powers of two that hold K * D and H * D.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        # Names of their own: Triton merges the types of variables that both branches assign.
        out_element = tl.arange(0, ZERO)
        where = token * out_token + (out_element // D) * out_head + out_element % D
        zeros = tl.zeros([ZERO], tl.float32).to(output.dtype.element_ty)
        tl.store(output + where, zeros, mask=out_element < HEADS * D)
    else:
        element = tl.arange(0, STORE)
        mask = element < KV_HEADS * D
        head, dim = element // D, element % D
        key = tl.load(k + token * k_token + head * k_head + dim, mask=mask)
        value = tl.load(v + token * v_token + head * v_head + dim, mask=mask)
        tl.store(key_cache + slot * (KV_HEADS * D) + element, key, mask=mask)
        tl.store(value_cache + slot * (KV_HEADS * D) + element, value, mask=mask)


@triton.jit(do_not_specialize=["splits", "table_row"])
def decode_kernel(
    q,
    k,
    v,
    output,
    output_scale,
    key_cache,
    value_cache,
    block_table,
    seq_lens,
    slot_mapping,
    partial,
    statistics,
    arrivals,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    out_token,
    out_head,
    table_row,
    splits,
    scale,
    G: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    S: tl.constexpr,
    MIN_TILES: tl.constexpr,
    G_PAD: tl.constexpr,
    UNROLL: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
    FP8_MAX: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One query token per sequence: store its key and value, then attend over one part of the keys.

    Grid: (K, splits, B).  The keys of a sequence are divided into as many parts as are worth it, at
    most ``splits``; programs without a part return at once.  The program that arrives last at the
    sequence's counter combines the parts and resets the counter for the next launch.

    Args:
        partial: float32 [B, K, splits, ROWS, D_PAD], weighted values of each part.
        statistics: float32 [B, K, splits, 2, ROWS], maximum and sum of each part.
        arrivals: int32 [B, K], zero between launches.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    length = tl.load(seq_lens + sequence)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, D_PAD)
    in_group = row < G
    in_head = dim < D
    head = kv_head * G + row
    out_mask = in_group[:, None] & in_head[None, :]
    # Nothing of this depends on the length: the loads are on their way together.
    queries = tl.load(
        q + sequence * q_token + head[:, None] * q_head + dim[None, :], mask=out_mask, other=0.0
    )
    new_key = tl.load(k + sequence * k_token + kv_head * k_head + dim, mask=in_head, other=0.0)
    new_value = tl.load(v + sequence * v_token + kv_head * v_head + dim, mask=in_head, other=0.0)

    # The newest key comes from ``k``, so no load has to wait until it is stored.
    cached = length - 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0)
    first_tile = begin // TILE
    tiles = tl.cdiv(cached, TILE) - first_tile
    tiles_each = tl.maximum(tl.cdiv(tiles, splits), MIN_TILES)
    parts = tl.maximum(tl.cdiv(tiles, tiles_each), 1)

    out = output + sequence * out_token + head[:, None] * out_head + dim[None, :]
    out_scale = 1.0
    if SCALED:
        out_scale = tl.load(output_scale)
    if length == 0:
        if split == 0:
            nothing = tl.zeros([ROWS, D_PAD], tl.float32)
            _write(out, nothing, out_mask, out_scale, SCALED, FP8_MAX)
        return
    if split >= parts:
        return

    newest = split == parts - 1
    if newest:
        slot = tl.load(slot_mapping + sequence)
        place = slot * (KV_HEADS * D) + kv_head * D + dim
        tl.store(key_cache + place, new_key, mask=in_head & (slot >= 0))
        tl.store(value_cache + place, new_value, mask=in_head & (slot >= 0))
    newest_score = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
    maximum = tl.where(newest, newest_score, -1.0e30)
    total = tl.where(newest, 1.0, 0.0) + tl.zeros([ROWS], tl.float32)
    values = tl.where(
        newest, new_value.to(tl.float32)[None, :], tl.zeros([ROWS, D_PAD], tl.float32)
    )
    in_tile = tl.arange(0, TILE)
    table = block_table + sequence * table_row
    head_offset = kv_head * D + dim
    first = first_tile + split * tiles_each
    last = tl.minimum(first + tiles_each, first_tile + tiles)
    for tile in tl.range(first, last, num_stages=STAGES):
        position = tile * TILE + in_tile
        valid = position < cached
        if WINDOW > 0:
            valid = valid & (position >= begin)
        block = tl.load(table + position // S, mask=valid, other=0).to(tl.int64)
        place = (block * S + position % S) * (KV_HEADS * D)
        where = place[:, None] + head_offset[None, :]
        mask = valid[:, None] & in_head[None, :]
        keys = tl.load(key_cache + where, mask=mask, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores = tl.where(valid[None, :], scores, -float("inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        rescale = tl.exp2(maximum - higher)
        total = total * rescale + tl.sum(weights, 1)
        stored = tl.load(value_cache + where, mask=mask, other=0.0)
        values = values * rescale[:, None]
        values = tl.dot(weights.to(stored.dtype), stored, values, input_precision=PRECISION)
        maximum = higher

    if parts == 1:
        _write(out, values / total[:, None], out_mask, out_scale, SCALED, FP8_MAX)
        return

    pair = sequence * KV_HEADS + kv_head
    mine = pair * splits + split
    here = partial + mine * (ROWS * D_PAD) + row[:, None] * D_PAD + dim[None, :]
    tl.store(here, values, mask=out_mask)
    tl.store(statistics + mine * (2 * ROWS) + row, maximum, mask=in_group)
    tl.store(statistics + mine * (2 * ROWS) + ROWS + row, total, mask=in_group)
    # Every thread's part is written before the program is counted.
    tl.debug_barrier()
    before = tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu")
    if before == parts - 1:
        tl.store(arrivals + pair, 0)
        g = tl.arange(0, G_PAD)
        present = (g < G)[:, None] & in_head[None, :]
        peak = tl.full([G_PAD], -1.0e30, tl.float32)
        count = tl.zeros([G_PAD], tl.float32)
        combined = tl.zeros([G_PAD, D_PAD], tl.float32)
        # No load depends on another part: unrolled, several are on their way at once.
        for part in tl.range(0, parts, loop_unroll_factor=UNROLL):
            theirs = pair * splits + part
            numbers = statistics + theirs * (2 * ROWS) + g
            there = partial + theirs * (ROWS * D_PAD) + g[:, None] * D_PAD + dim[None, :]
            part_peak = tl.load(numbers, mask=g < G, other=0.0, cache_modifier=".cg")
            part_count = tl.load(numbers + ROWS, mask=g < G, other=1.0, cache_modifier=".cg")
            part_values = tl.load(there, mask=present, other=0.0, cache_modifier=".cg")
            higher_peak = tl.maximum(peak, part_peak)
            keep = tl.exp2(peak - higher_peak)
            share = tl.exp2(part_peak - higher_peak)
            count = count * keep + part_count * share
            combined = combined * keep[:, None] + part_values * share[:, None]
            peak = higher_peak
        heads_out = output + sequence * out_token + (kv_head * G + g)[:, None] * out_head
        _write(
            heads_out + dim[None, :], combined / count[:, None], present, out_scale, SCALED, FP8_MAX
        )


@triton.jit
def _attend(
    queries,
    maximum,
    total,
    values,
    key_cache,
    value_cache,
    table,
    head_offset,
    in_head,
    position_of_row,
    first,
    last,
    length,
    scale,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Extend the running softmax over keys ``first`` to ``last``; ``MASKED`` where some are hidden."""
    in_tile = tl.arange(0, TILE)
    for start in tl.range(first, last, TILE, num_stages=STAGES):
        position = start + in_tile
        if MASKED:
            visible = position < length
            block = tl.load(table + position // S, mask=visible, other=0).to(tl.int64)
        else:
            block = tl.load(table + position // S).to(tl.int64)
        place = (block * S + position % S) * (KV_HEADS * D)
        where = place[:, None] + head_offset[None, :]
        if MASKED:
            mask = visible[:, None] & in_head[None, :]
            keys = tl.load(key_cache + where, mask=mask, other=0.0)
        elif PADDED:
            keys = tl.load(key_cache + where, mask=in_head[None, :], other=0.0)
        else:
            keys = tl.load(key_cache + where)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        if MASKED:
            seen = position[None, :] <= position_of_row[:, None]
            if WINDOW > 0:
                seen = seen & (position[None, :] > position_of_row[:, None] - WINDOW)
            scores = tl.where(seen, scores, -float("inf"))
        # Scaled here, where it is one multiply-add with the subtraction.
        higher = tl.maximum(maximum, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        rescale = tl.exp2(maximum - higher)
        total = total * rescale + tl.sum(weights, 1)
        if MASKED:
            stored = tl.load(value_cache + where, mask=mask, other=0.0)
        elif PADDED:
            stored = tl.load(value_cache + where, mask=in_head[None, :], other=0.0)
        else:
            stored = tl.load(value_cache + where)
        values = values * rescale[:, None]
        values = tl.dot(weights.to(stored.dtype), stored, values, input_precision=PRECISION)
        maximum = higher
    return maximum, total, values


@triton.jit(do_not_specialize=["sequences", "table_row"])
def mixed_kernel(
    q,
    output,
    output_scale,
    key_cache,
    value_cache,
    block_table,
    query_start,
    seq_lens,
    q_token,
    q_head,
    out_token,
    out_head,
    table_row,
    sequences,
    scale,
    G: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    S: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
    FP8_MAX: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """``QUERIES`` neighbouring tokens of one sequence and one key head; its keys are in the cache already.

    Grid: (K, T // QUERIES + B).  Sequence i owns the programs from query_start[i] // QUERIES + i on:
    always enough, and found by bisection without anything but ``query_start``.  The last queries have
    the most keys; they start first, for all heads.
    """
    program = tl.num_programs(1) - 1 - tl.program_id(1)
    kv_head = tl.program_id(0)
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // QUERIES + middle <= program:
            low = middle + 1
        else:
            high = middle
    sequence = tl.cast(low - 1, tl.int64)
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    first_query = (program - start // QUERIES - low + 1) * QUERIES
    length = tl.load(seq_lens + sequence)
    if (first_query >= count) | (length == 0):
        return

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, D_PAD)
    in_head = dim < D
    query = first_query + row // G
    head = kv_head * G + row % G
    real = (row < QUERIES * G) & (query < count)
    token = (start + query).to(tl.int64)
    mask = real[:, None] & in_head[None, :]
    queries = tl.load(
        q + token[:, None] * q_token + head[:, None] * q_head + dim[None, :], mask=mask, other=0.0
    )
    position_of_row = length - count + query
    maximum = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, D_PAD], tl.float32)

    table = block_table + sequence * table_row
    head_offset = kv_head * D + dim
    # Every row sees all keys up to the first query's own; the rest differs from row to row.
    first_position = length - count + first_query
    shared = (first_position + 1) // TILE * TILE
    if WINDOW > 0:  # all of it does, from the first key that the first query sees
        shared = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE
    end = length - count + tl.minimum(first_query + QUERIES, count)
    if WINDOW == 0:
        maximum, total, values = _attend(
            queries, maximum, total, values, key_cache, value_cache, table, head_offset, in_head,
            position_of_row, 0, shared, length, scale,
            KV_HEADS, D, S, TILE, STAGES, False, D_PAD > D, PRECISION, WINDOW,
        )  # fmt: skip
    maximum, total, values = _attend(
        queries, maximum, total, values, key_cache, value_cache, table, head_offset, in_head,
        position_of_row, shared, end, length, scale,
        KV_HEADS, D, S, TILE, STAGES, True, D_PAD > D, PRECISION, WINDOW,
    )  # fmt: skip

    out_scale = 1.0
    if SCALED:
        out_scale = tl.load(output_scale)
    where = output + token[:, None] * out_token + head[:, None] * out_head + dim[None, :]
    _write(where, values / total[:, None], mask, out_scale, SCALED, FP8_MAX)
