"""A small pipelined kernel for sm_90: out = round(query key^T) value, with every kind of synchronisation in it.

Six warps. Warps 0-3 are a warpgroup that owns 64 query rows: scores by wgmma from shared memory, rounded to bf16
registers, out += probs value with probs from registers; the scores of the next block are in flight meanwhile. Last,
the output goes to shared memory and is stored by TMA. Warp 4 loads by TMA a query tile and a ring of two key
blocks of 64, warp 5 a ring of two value blocks. Each CTA walks `tiles` query tiles, so that every barrier goes through
several phases.
"""

from __future__ import annotations

from tests.emulator.mutation import pipeline
from tests.emulator.mutation.ptx_text import Line, Writer, module, registers

ENTRY = "chain_hopper"
THREADS = 192
TILE_ROWS = 64
BLOCK_KEYS = 64
HEAD_DIM = 64
STAGES = 2

QUERY, KEYS, VALUES, OUT = 0, 8192, 24576, 40960  # byte offsets in shared memory
BLOCK_BYTES = BLOCK_KEYS * HEAD_DIM * 2
TILE_BYTES = TILE_ROWS * HEAD_DIM * 2
BARRIERS = OUT + TILE_ROWS * HEAD_DIM * 4
SHARED_BYTES = BARRIERS + 128

# Name: (slot, count of arrivals). Rings have a barrier a stage; counts of four are one lane of each of four warps.
BARRIER_TABLE = {
    "query_full": (0, 1),
    "query_empty": (1, 4),
    "key_full": (2, 1),
    "key_empty": (4, 4),
    "value_full": (6, 1),
    "value_empty": (8, 4),
}
RINGS = ("key_full", "key_empty", "value_full", "value_empty")

# Upper half of a wgmma descriptor: SBO 1024 bytes, 128-byte swizzle.
OPERAND_HIGH = 1024 >> 4 | 1 << 30

DECLARATIONS = [
    *(
        f".b32 %{name}"
        for name in ("thread", "warp", "lane", "base", "tiles", "blocks", "tile", "block", "step", "stage")
    ),
    *(
        f".b32 %{name}"
        for name in ("parity", "tile_parity", "empty_parity", "tile_empty_parity", "first_tile", "row", "key_row")
    ),
    *(f".b32 %{name}" for name in ("a", "b", "at", "low", "count", "released", "swizzle", "chunk", "pair", "flip")),
    *(f".b64 %{name}" for name in ("map", "state", "descriptor_a", "descriptor_b")),
    *(f".pred %{name}" for name in ("waited", "again", "is_rows", "elected", "one_lane", "accumulate", "more")),
    ".b32 %s<32>",
    ".b32 %p<16>",
    ".b32 %o<32>",
]


def slot_offset(name: str) -> int:
    """Shared offset of a barrier (of stage 0 for rings)."""
    return BARRIERS + 8 * BARRIER_TABLE[name][0]


def ring(w: Writer, name: str, stage: str = "%stage") -> str:
    """Computes the address of a ring's barrier into %at."""
    return pipeline.ring(w, slot_offset(name), stage)


def load(w: Writer, name: str, offset: str, rows: str, full: str) -> None:
    """One TMA box of 64 columns, signalled on `full`."""
    w(f"mov.b64 %map, {name}_map")
    w("cvta.param.u64 %map, %map")
    w(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        f"[{offset}], [%map, {{0, {rows}}}], [{full}]",
        f"load {name}",
    )


def setup(w: Writer) -> None:
    """Roles and barriers."""
    w("mov.u32 %thread, %tid.x")
    w("shr.u32 %warp, %thread, 5")
    w("and.b32 %lane, %thread, 31")
    pipeline.start_tiles(w)
    w("setp.lt.u32 %is_rows, %warp, 4")
    w("setp.eq.u32 %one_lane, %lane, 0")
    pipeline.init_barriers(w, BARRIER_TABLE, RINGS, STAGES, BARRIERS)
    w("bar.sync 0", "barrier setup")
    w("mov.u32 %count, 0")


def load_blocks(w: Writer, name: str, offset: int) -> None:
    """All key or value blocks of a tile through their ring."""
    with w.loop("%block", "%blocks"):
        pipeline.stage_and_parity(w, "%count")
        w(f"mul.lo.u32 %key_row, %block, {BLOCK_KEYS}")
        w.wait(ring(w, f"{name}_empty"), "%empty_parity", f"wait {name}_empty")
        full = ring(w, f"{name}_full")
        w(f"mbarrier.arrive.expect_tx.shared::cta.b64 %state, [{full}], {BLOCK_BYTES}", f"expect {name}_full")
        w(f"mad.lo.u32 %a, %stage, {BLOCK_BYTES}, {offset}")
        w("add.u32 %a, %a, %base")
        load(w, name, "%a", "%key_row", full)
        w("add.u32 %count, %count, 1")


def load_roles(w: Writer) -> None:
    """A thread of warp 4 for queries and keys, one of warp 5 for values: each ring has its own barriers alone."""
    w("setp.eq.u32 %elected, %thread, 128")
    with w.when("%elected"), w.loop("%tile", "%tiles"):
        pipeline.tile_parities(w)
        w("add.u32 %row, %first_tile, %tile")
        w(f"mul.lo.u32 %row, %row, {TILE_ROWS}")
        w.wait(f"%base+{slot_offset('query_empty')}", "%tile_empty_parity", "wait query_empty")
        w(f"add.u32 %b, %base, {slot_offset('query_full')}")
        w(f"mbarrier.arrive.expect_tx.shared::cta.b64 %state, [%b], {TILE_BYTES}", "expect query_full")
        w(f"add.u32 %a, %base, {QUERY}")
        load(w, "query", "%a", "%row", "%b")
        load_blocks(w, "key", KEYS)
    w("setp.eq.u32 %elected, %thread, 160")
    with w.when("%elected"), w.loop("%tile", "%tiles"):
        load_blocks(w, "value", VALUES)


def release(w: Writer, address: str, tag: str) -> None:
    """One lane of each warp arrives."""
    w(f"@%one_lane mbarrier.arrive.shared::cta.b64 %state, [{address}]", tag)


def scores_product(w: Writer, count: str) -> None:
    """scores = query key^T: four instructions along head_dim, left in flight."""
    pipeline.stage_and_parity(w, count)
    w.wait(ring(w, "key_full"), "%parity", "wait key_full")
    w("wgmma.fence.sync.aligned", "wgmma fence scores")
    w(f"mad.lo.u32 %b, %stage, {BLOCK_BYTES}, {KEYS}")
    w("add.u32 %b, %b, %base")
    w(f"add.u32 %a, %base, {QUERY}")
    for step in range(HEAD_DIM // 16):
        pipeline.descriptor(w, "%descriptor_a", "%a", 32 * step, OPERAND_HIGH)
        pipeline.descriptor(w, "%descriptor_b", "%b", 32 * step, OPERAND_HIGH)
        w(f"setp.ne.u32 %accumulate, {step}, 0", "accumulate scores")
        w(
            f"wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {registers('s', 32)}, "
            "%descriptor_a, %descriptor_b, %accumulate, 1, 1, 0, 0",
            "product scores",
        )
    w("wgmma.commit_group.sync.aligned", "wgmma commit scores")


def output_product(w: Writer) -> None:
    """out += probs value: four instructions of 16 keys (2048 bytes of value) each, left in flight."""
    pipeline.stage_and_parity(w, "%count")
    w.wait(ring(w, "value_full"), "%parity", "wait value_full")
    w("wgmma.fence.sync.aligned", "wgmma fence out")
    w(f"mad.lo.u32 %b, %stage, {BLOCK_BYTES}, {VALUES}")
    w("add.u32 %b, %b, %base")
    for step in range(BLOCK_KEYS // 16):
        pipeline.descriptor(w, "%descriptor_b", "%b", 2048 * step, OPERAND_HIGH)
        if step == 0:
            w("setp.ne.u32 %accumulate, %block, 0", "accumulate out")
        else:
            w("setp.eq.u32 %accumulate, 0, 0")
        probs = "{" + ", ".join(f"%p{4 * step + i}" for i in range(4)) + "}"
        w(
            f"wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {registers('o', 32)}, {probs}, "
            "%descriptor_b, %accumulate, 1, 1, 1",
            "product out",
        )
    w("wgmma.commit_group.sync.aligned", "wgmma commit out")


def round_scores(w: Writer) -> None:
    """Accumulator fragment to A fragment: the same lanes hold the same elements."""
    for i in range(16):
        w(f"cvt.rn.bf16x2.f32 %p{i}, %s{2 * i + 1}, %s{2 * i}")


def walk_blocks(w: Writer) -> None:
    """All key blocks of a tile; the scores of block i + 1 are issued before the output product of block i."""
    scores_product(w, "%count")
    w("wgmma.wait_group.sync.aligned 0", "wgmma wait first scores")
    release(w, ring(w, "key_empty"), "arrive key_empty")
    round_scores(w)
    with w.loop("%block", "%blocks"):
        w("add.u32 %step, %block, 1")
        w("setp.lt.u32 %more, %step, %blocks")
        with w.when("%more"):
            w("add.u32 %released, %count, 1")
            scores_product(w, "%released")
        output_product(w)
        with w.when("%more"):
            w("wgmma.wait_group.sync.aligned 1", "wgmma wait scores")
            w("and.b32 %released, %released, 1")
            release(w, ring(w, "key_empty", "%released"), "arrive key_empty")
        w("wgmma.wait_group.sync.aligned 0", "wgmma wait out")
        release(w, ring(w, "value_empty"), "arrive value_empty")
        w("add.u32 %count, %count, 1")
        with w.when("%more"):
            round_scores(w)


def store_tile(w: Writer) -> None:
    """The output fragment to swizzled shared memory, TMA store in two boxes of 32 columns."""
    pipeline.begin_staging(w)
    w("shr.u32 %swizzle, %lane, 2", "staging swizzle")
    w("mad.lo.u32 %row, %warp, 16, %swizzle")
    w(f"mad.lo.u32 %row, %row, 128, {OUT}")
    w("add.u32 %row, %row, %base")
    w("and.b32 %pair, %lane, 3")
    w("and.b32 %at, %pair, 1")
    w("mad.lo.u32 %row, %at, 8, %row")
    w("shr.u32 %pair, %pair, 1")
    for group in range(8):
        w(f"add.u32 %chunk, %pair, {2 * (group % 4)}")
        w("xor.b32 %chunk, %chunk, %swizzle")
        w("mad.lo.u32 %at, %chunk, 16, %row")
        for half in range(2):
            offset = group // 4 * TILE_ROWS * 128 + half * 8 * 128
            first = 4 * group + 2 * half
            w(f"st.shared.v2.b32 [%at+{offset}], {{%o{first}, %o{first + 1}}}")
    pipeline.store_staged(w, OUT, TILE_ROWS)


def rows_role(w: Writer) -> None:
    """The warpgroup."""
    w("setp.eq.u32 %elected, %thread, 0")
    with w.when("%is_rows"):
        with w.loop("%tile", "%tiles"):
            pipeline.tile_parities(w)
            w.wait(f"%base+{slot_offset('query_full')}", "%tile_parity", "wait query_full")
            walk_blocks(w)
            w(f"add.u32 %at, %base, {slot_offset('query_empty')}")
            release(w, "%at", "arrive query_empty")
            store_tile(w)
        with w.when("%elected"):
            w("cp.async.bulk.wait_group 0", "wait_group out")


def lines() -> list[Line]:
    """The whole kernel."""
    w = Writer()
    setup(w)
    load_roles(w)
    rows_role(w)
    w("ret")
    return w.lines


def text(body: list[Line], target: str = "sm_90a") -> str:
    """PTX of the kernel. Parameters: maps of query, key, value and out (64, 32 columns); tiles; blocks."""
    maps = [f".align 64 .b8 {name}_map[128]" for name in ("query", "key", "value", "out")]
    return module(target, ENTRY, [*maps, ".u32 tiles", ".u32 blocks"], DECLARATIONS, body, THREADS)
