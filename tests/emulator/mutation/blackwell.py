"""A small pipelined kernel for sm_100: out = round(query key^T) value, with every kind of synchronisation in it.

Ten warps. Warps 0-3 ("rows"): a thread owns one of 128 rows; they read the scores from tensor memory and round them to
bf16 back into tensor memory. Warps 4-7 ("store") move the finished output tile to shared memory and store it by TMA.
Warp 8 loads by TMA: a query tile, and rings of two key and two value blocks of 64. Warp 9 issues the products: scores =
query key^T from shared memory, out += probs value with probs from tensor memory. Each CTA walks `tiles` query tiles, so
that every barrier goes through several phases.
"""

from __future__ import annotations

from tests.emulator.mutation import pipeline
from tests.emulator.mutation.ptx_text import Line, Writer, module, registers

ENTRY = "chain_blackwell"
THREADS = 320
TILE_ROWS = 128
BLOCK_KEYS = 64
HEAD_DIM = 64
STAGES = 2

QUERY, KEYS, VALUES, OUT = 0, 16384, 32768, 49152  # byte offsets in shared memory
BLOCK_BYTES = BLOCK_KEYS * HEAD_DIM * 2
TILE_BYTES = TILE_ROWS * HEAD_DIM * 2
BARRIERS = OUT + TILE_ROWS * HEAD_DIM * 4
SHARED_BYTES = BARRIERS + 128

# Name: (slot, count of arrivals). Rings have a barrier a stage; counts of four are one lane of each of four warps.
BARRIER_TABLE = {
    "query_full": (0, 1),
    "query_empty": (1, 1),
    "key_full": (2, 1),
    "key_empty": (4, 1),
    "value_full": (6, 1),
    "value_empty": (8, 1),
    "scores_full": (10, 1),
    "probs_full": (11, 4),
    "out_full": (12, 1),
    "out_empty": (13, 4),
}
RINGS = ("key_full", "key_empty", "value_full", "value_empty")
TENSOR_POINTER = BARRIERS + 14 * 8

SCORES, PROBS, OUTPUT, COLUMNS = 0, 64, 128, 256  # tensor-memory columns

# Instruction descriptor: f32 sums, bf16 operands, N 64, M 128; bit 16: B is MN-major (values, read along the keys).
SCORES_DESCRIPTOR = 1 << 4 | 1 << 7 | 1 << 10 | (64 // 8) << 17 | (128 // 16) << 24
OUTPUT_DESCRIPTOR = SCORES_DESCRIPTOR | 1 << 16
# Upper half of a shared memory descriptor: SBO 1024 bytes, version 1, 128-byte swizzle.
OPERAND_HIGH = 1024 >> 4 | 1 << 14 | 2 << 29

DECLARATIONS = [
    *(
        f".b32 %{name}"
        for name in ("thread", "warp", "base", "tiles", "blocks", "tile", "block", "step", "stage", "parity")
    ),
    *(
        f".b32 %{name}"
        for name in ("tile_parity", "empty_parity", "tile_empty_parity", "first_tile", "row", "key_row", "tensor")
    ),
    *(f".b32 %{name}" for name in ("a", "b", "at", "low", "lane_address", "count", "swizzle", "chunk", "flip")),
    *(f".b64 %{name}" for name in ("map", "state", "descriptor_a", "descriptor_b")),
    *(
        f".pred %{name}"
        for name in (
            "waited",
            "again",
            "is_rows",
            "is_store",
            "is_mma",
            "one_lane",
            "elected",
            "accumulate",
            "first",
            "more",
        )
    ),
    ".b32 %s<64>",
    ".b32 %p<32>",
]


def barrier(name: str) -> str:
    """Address operand of a barrier; rings add the stage through %at."""
    return f"%base+{BARRIERS + 8 * BARRIER_TABLE[name][0]}"


def ring(w: Writer, name: str) -> str:
    """Computes the address of a ring's barrier of %stage into %at."""
    return pipeline.ring(w, BARRIERS + 8 * BARRIER_TABLE[name][0])


def load(w: Writer, name: str, offset: str, rows: str, full: str, tag: str) -> None:
    """One TMA box of 64 columns, signalled on `full`."""
    w(f"mov.b64 %map, {name}_map")
    w("cvta.param.u64 %map, %map")
    w(
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
        f"[{offset}], [%map, {{0, {rows}}}], [{full}]",
        tag,
    )


def setup(w: Writer) -> None:
    """Roles, barriers, tensor memory."""
    w("mov.u32 %thread, %tid.x")
    w("shr.u32 %warp, %thread, 5")
    pipeline.start_tiles(w)
    w("setp.lt.u32 %is_rows, %warp, 4")
    w("and.b32 %a, %warp, 12")
    w("setp.eq.u32 %is_store, %a, 4")
    w("setp.eq.u32 %is_mma, %warp, 9")
    w("and.b32 %a, %thread, 31")
    w("setp.eq.u32 %one_lane, %a, 0")
    pipeline.init_barriers(w, BARRIER_TABLE, RINGS, STAGES, BARRIERS)
    with w.when("%is_mma"):
        w(f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%base+{TENSOR_POINTER}], {COLUMNS}")
        w("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned")
    w("tcgen05.fence::before_thread_sync", "fence before setup")
    w("bar.sync 0", "barrier setup")
    w("tcgen05.fence::after_thread_sync", "fence after setup")
    w(f"ld.shared.u32 %tensor, [%base+{TENSOR_POINTER}]")
    w("and.b32 %lane_address, %warp, 3")  # warp w reaches lanes 32 (w mod 4) and up
    w("shl.b32 %lane_address, %lane_address, 21")
    w("add.u32 %lane_address, %lane_address, %tensor")
    w("mov.u32 %count, 0")


def load_role(w: Writer) -> None:
    """One elected thread of warp 8."""
    w("setp.eq.u32 %elected, %thread, 256")
    with w.when("%elected"), w.loop("%tile", "%tiles"):
        pipeline.tile_parities(w)
        w("add.u32 %row, %first_tile, %tile")
        w(f"mul.lo.u32 %row, %row, {TILE_ROWS}")
        w.wait(barrier("query_empty"), "%tile_empty_parity", "wait query_empty")
        w(
            f"mbarrier.arrive.expect_tx.shared::cta.b64 %state, [{barrier('query_full')}], {TILE_BYTES}",
            "expect query_full",
        )
        w(f"add.u32 %a, %base, {QUERY}")
        w(f"add.u32 %b, %base, {BARRIERS + 8 * BARRIER_TABLE['query_full'][0]}")
        load(w, "query", "%a", "%row", "%b", "load query")
        with w.loop("%block", "%blocks"):
            pipeline.stage_and_parity(w)
            w(f"mul.lo.u32 %key_row, %block, {BLOCK_KEYS}")
            for name, offset in (("key", KEYS), ("value", VALUES)):
                w.wait(ring(w, f"{name}_empty"), "%empty_parity", f"wait {name}_empty")
                full = ring(w, f"{name}_full")
                w(f"mbarrier.arrive.expect_tx.shared::cta.b64 %state, [{full}], {BLOCK_BYTES}", f"expect {name}_full")
                w(f"mad.lo.u32 %a, %stage, {BLOCK_BYTES}, {offset}")
                w("add.u32 %a, %a, %base")
                load(w, name, "%a", "%key_row", full, f"load {name}")
            w("add.u32 %count, %count, 1")


def commit(w: Writer, address: str, tag: str) -> None:
    """Arrives when all products issued so far have completed."""
    w(f"tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{address}]", tag)


def scores_product(w: Writer) -> None:
    """scores = query key^T of the block at %count: four instructions along head_dim."""
    pipeline.stage_and_parity(w)
    w.wait(ring(w, "key_full"), "%parity", "wait key_full")
    w(f"mad.lo.u32 %b, %stage, {BLOCK_BYTES}, {KEYS}")
    w("add.u32 %b, %b, %base")
    w(f"add.u32 %a, %base, {QUERY}")
    for step in range(HEAD_DIM // 16):
        pipeline.descriptor(w, "%descriptor_a", "%a", 32 * step, OPERAND_HIGH)
        pipeline.descriptor(w, "%descriptor_b", "%b", 32 * step, OPERAND_HIGH)
        w(f"setp.ne.u32 %accumulate, {step}, 0", "accumulate scores")
        w(
            "tcgen05.mma.cta_group::1.kind::f16 "
            f"[%tensor], %descriptor_a, %descriptor_b, {SCORES_DESCRIPTOR}, %accumulate",
            "product scores",
        )
    commit(w, ring(w, "key_empty"), "commit key_empty")
    commit(w, barrier("scores_full"), "commit scores_full")


def output_product(w: Writer) -> None:
    """out += probs value: four instructions along the keys, 16 keys (2048 bytes of value, 8 columns of probs) each."""
    pipeline.stage_and_parity(w)
    w.wait(ring(w, "value_full"), "%parity", "wait value_full")
    w("and.b32 %parity, %count, 1")
    w.wait(barrier("probs_full"), "%parity", "wait probs_full")
    w("tcgen05.fence::after_thread_sync", "fence after probs_full")
    w(f"mad.lo.u32 %b, %stage, {BLOCK_BYTES}, {VALUES}")
    w("add.u32 %b, %b, %base")
    w(f"add.u32 %a, %tensor, {OUTPUT}")
    for step in range(BLOCK_KEYS // 16):
        pipeline.descriptor(w, "%descriptor_b", "%b", 2048 * step, OPERAND_HIGH)
        w(f"add.u32 %low, %tensor, {PROBS + 8 * step}", "probs column")
        if step == 0:
            w("setp.ne.u32 %accumulate, %block, 0", "accumulate out")
        else:
            w("setp.eq.u32 %accumulate, 0, 0")
        w(
            f"tcgen05.mma.cta_group::1.kind::f16 [%a], [%low], %descriptor_b, {OUTPUT_DESCRIPTOR}, %accumulate",
            "product out",
        )
    commit(w, ring(w, "value_empty"), "commit value_empty")


def mma_role(w: Writer) -> None:
    """One elected thread of warp 9: scores of block i + 1 are issued after the output product of block i."""
    w("setp.eq.u32 %elected, %thread, 288")
    with w.when("%elected"), w.loop("%tile", "%tiles"):
        pipeline.tile_parities(w)
        w.wait(barrier("query_full"), "%tile_parity", "wait query_full")
        w("mov.u32 %block, 0")
        scores_product(w)
        with w.loop("%block", "%blocks"):
            w("setp.eq.u32 %first, %block, 0")
            with w.when("%first"):
                w.wait(barrier("out_empty"), "%tile_empty_parity", "wait out_empty")
                w("tcgen05.fence::after_thread_sync", "fence after out_empty")
            output_product(w)
            w("add.u32 %count, %count, 1")
            w("add.u32 %step, %block, 1")
            w("setp.lt.u32 %more, %step, %blocks")
            with w.when("%more"):
                scores_product(w)
        commit(w, barrier("query_empty"), "commit query_empty")
        commit(w, barrier("out_full"), "commit out_full")


def release(w: Writer, address: str, tag: str) -> None:
    """One lane of each warp arrives: the tcgen05 waits before it hold the whole warp."""
    w("bar.warp.sync -1")
    w(f"@%one_lane mbarrier.arrive.shared::cta.b64 %state, [{address}]", tag)


def round_scores(w: Writer) -> None:
    """Scores of one block: tensor memory to registers, to bf16, back to tensor memory."""
    w("and.b32 %parity, %count, 1")
    w.wait(barrier("scores_full"), "%parity", "wait scores_full")
    w("tcgen05.fence::after_thread_sync", "fence after scores_full")
    w(f"tcgen05.ld.sync.aligned.32x32b.x64.b32 {registers('s', 64)}, [%lane_address]")
    w("tcgen05.wait::ld.sync.aligned", "wait::ld scores")
    for i in range(32):
        w(f"cvt.rn.bf16x2.f32 %p{i}, %s{2 * i + 1}, %s{2 * i}")
    w(f"tcgen05.st.sync.aligned.32x32b.x32.b32 [%lane_address+{PROBS}], {registers('p', 32)}", "store probs")
    w("tcgen05.wait::st.sync.aligned", "wait::st probs")
    w("tcgen05.fence::before_thread_sync", "fence before probs_full")
    release(w, barrier("probs_full"), "arrive probs_full")
    w("add.u32 %count, %count, 1")


def store_tile(w: Writer) -> None:
    """The output tile: tensor memory, registers, swizzled shared memory, TMA store in two boxes of 32 columns."""
    w.wait(barrier("out_full"), "%tile_parity", "wait out_full")
    w("tcgen05.fence::after_thread_sync", "fence after out_full")
    w(f"tcgen05.ld.sync.aligned.32x32b.x64.b32 {registers('s', 64)}, [%lane_address+{OUTPUT}]")
    w("tcgen05.wait::ld.sync.aligned", "wait::ld out")
    w("tcgen05.fence::before_thread_sync", "fence before out_empty")
    release(w, barrier("out_empty"), "arrive out_empty")
    pipeline.begin_staging(w)
    w("and.b32 %swizzle, %thread, 7", "staging swizzle")
    w("and.b32 %row, %thread, 127")
    w(f"mad.lo.u32 %row, %row, 128, {OUT}")
    w("add.u32 %row, %row, %base")
    for half in range(2):
        for chunk in range(8):
            w(f"xor.b32 %chunk, %swizzle, {chunk}")
            w(f"mad.lo.u32 %at, %chunk, 16, {half * TILE_ROWS * 128}")
            w("add.u32 %at, %at, %row")
            first = 32 * half + 4 * chunk
            w(f"st.shared.v4.b32 [%at], {{%s{first}, %s{first + 1}, %s{first + 2}, %s{first + 3}}}")
    pipeline.store_staged(w, OUT, TILE_ROWS)


def rows_role(w: Writer) -> None:
    """Warps 0-3."""
    with w.when("%is_rows"), w.loop("%tile", "%tiles"), w.loop("%block", "%blocks"):
        round_scores(w)


def store_role(w: Writer) -> None:
    """Warps 4-7."""
    w("setp.eq.u32 %elected, %thread, 128")
    with w.when("%is_store"):
        with w.loop("%tile", "%tiles"):
            pipeline.tile_parities(w)
            store_tile(w)
        with w.when("%elected"):
            w("cp.async.bulk.wait_group 0", "wait_group out")


def lines() -> list[Line]:
    """The whole kernel."""
    w = Writer()
    setup(w)
    load_role(w)
    mma_role(w)
    rows_role(w)
    store_role(w)
    w("tcgen05.fence::before_thread_sync")
    w("bar.sync 0", "barrier before dealloc")
    w("tcgen05.fence::after_thread_sync")
    with w.when("%is_mma"):
        w(f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tensor, {COLUMNS}")
    w("ret")
    return w.lines


def text(body: list[Line], target: str = "sm_100a") -> str:
    """PTX of the kernel. Parameters: maps of query, key, value and out (64, 32 columns); tiles; blocks."""
    maps = [f".align 64 .b8 {name}_map[128]" for name in ("query", "key", "value", "out")]
    return module(target, ENTRY, [*maps, ".u32 tiles", ".u32 blocks"], DECLARATIONS, body, THREADS)
