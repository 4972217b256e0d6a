"""Feeds and speeds: how many clocks each unit of a GPU needs for one tile of attention, and which unit binds.

The formulas and the conventions behind every figure of this project are here, and so are the numbers of each GPU:
matrix rate, shared-memory bandwidth, exponentials, multiprocessors, shared memory, the L2 bytes that schedules count
on. They tell schedules how long a tile takes, benchmarks what a FLOP is, and readers what to expect:

    python -m jax_fa4.cost --arch sm_100 --head-dims 64 128 192/128

All are upper bounds of speed: clocks in which a unit is busy, as if all others waited for nothing. Source of the method
and of most rows: FlashAttention-4 (arXiv 2603.05451), sections 3.1.1 and 3.2.1.
"""

import argparse
import dataclasses
import math
from collections.abc import Sequence

LANES_PER_WARP = 32
SCHEDULERS_PER_SM = 4
DQ_BYTES = 4  # partial sums of the query gradient are float32


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What one GPU can do, per multiprocessor (SM) and clock.

    Attributes:
      name: compute capability, as compilers spell it.
      board: the boards whose numbers these are.
      mma_flops: dense 16-bit matrix FLOP per clock and SM.
      mma_rows: rows of one SM's share of a matrix instruction; B is read from shared memory once for each.
      shared_bytes: shared-memory bytes per clock and SM.
      exps: base-2 exponentials per clock and SM.
      sms: multiprocessors of a board.
      peak_tflops: dense 16-bit peak of the data sheet, which fixes the clock.
      shared_memory_limit: bytes of shared memory that a thread block can ask for.
      tensor_memory_columns: 32-bit columns of tensor memory; 0 where there is none.
      section_l2_bytes: L2 that a schedule may fill with keys and values before it moves on. 50 MiB everywhere: all of
        H200's, and less than half of B200's, whose halves each serve their own side.
      has_pairs: whether two SMs can share one matrix instruction (2-CTA).
      mask_instructions: extra instructions that an element mask costs for a row of 128 scores, in the forward and in
        the backward pass. Counted in machine code of flash-attn-4 4.0.0b36 at head_dim 128, whose backward for sm_90
        masks every tile.
      memory_tbps: bandwidth of the board's memory by its data sheet, TB/s (H200; an H100 has 3.35).
    """

    name: str
    board: str
    mma_flops: int
    mma_rows: int
    shared_bytes: int
    exps: int
    sms: int
    peak_tflops: float
    shared_memory_limit: int
    tensor_memory_columns: int
    section_l2_bytes: int
    has_pairs: bool
    mask_instructions: tuple[int, int]
    memory_tbps: float

    @property
    def memory_bytes(self) -> float:
        """Bytes of memory per clock, of the whole board."""
        return self.memory_tbps * 1e3 / self.clock_ghz

    @property
    def clock_ghz(self) -> float:
        """The clock that the peak implies."""
        return self.peak_tflops * 1e3 / (self.mma_flops * self.sms)

    def tflops(self, flops: float, clocks: float) -> float:
        """TFLOP/s of the whole board, of which each SM does `flops` in `clocks`."""
        return self.peak_tflops * flops / (clocks * self.mma_flops)


ARCHITECTURES = {
    arch.name: arch
    for arch in (
        Architecture("sm_90", "H100, H200", 4096, 64, 128, 16, 132, 989.4, 232448, 0, 50 << 20, False, (180, 0), 4.8),
        Architecture("sm_100", "B200", 8192, 128, 128, 16, 148, 2250.0, 232448, 512, 50 << 20, True, (174, 72), 8.0),
        Architecture("sm_103", "B300", 8192, 128, 128, 32, 148, 2500.0, 232448, 512, 50 << 20, True, (174, 72), 8.0),
    )
}


def forward_flops(visible_pairs: float, head_dim: int, value_dim: int) -> float:
    """FLOP of the forward pass for pairs of (query, key) that see each other, heads and batch counted in.

    By convention a causal problem with T = S counts as T * S / 2 pairs, and a packed one as what its documents hold.
    """
    return 2 * visible_pairs * (head_dim + value_dim)


def backward_flops(visible_pairs: float, head_dim: int, value_dim: int) -> float:
    """FLOP of the backward pass: by convention 2.5 times the forward's, five matrix products for two."""
    return 2.5 * forward_flops(visible_pairs, head_dim, value_dim)


@dataclasses.dataclass(frozen=True)
class TileCost:
    """Clocks in which each unit of one SM is busy with one tile of scores.

    Attributes:
      arch: the GPU.
      matrix_flops: FLOP of the tile's matrix products on this SM.
      mma: matrix unit.
      shared_parts: shared memory, by what it does; `shared` is their sum.
      exp: exponential unit.
      fill: writes of K and V (backward: of queries and output gradients) into shared memory by the copy engine, which
        the published model leaves out; not part of `shared`.
      mask: issue slots of an element mask, for tiles that are not FULL.
    """

    arch: Architecture
    matrix_flops: float
    mma: float
    shared_parts: dict[str, float]
    exp: float
    fill: float
    mask: float

    @property
    def shared(self) -> float:
        """Clocks of shared memory, without the fills."""
        return sum(self.shared_parts.values())

    @property
    def units(self) -> dict[str, float]:
        """The three units' clocks by name."""
        return {"MMA": self.mma, "SMEM": self.shared, "EXP": self.exp}

    @property
    def binding(self) -> tuple[str, ...]:
        """The units that take longest: usually one, two where they tie."""
        return tuple(unit for unit, clocks in self.units.items() if clocks == self.clocks)

    @property
    def clocks(self) -> float:
        """Clocks of the tile if units overlap perfectly: those of the unit that binds."""
        return max(self.units.values())

    @property
    def masked_clocks(self) -> float:
        """Clocks of a tile with an element mask, whose instructions lie on the one path that nothing overlaps."""
        return self.clocks + self.mask

    @property
    def tflops(self) -> float:
        """The bound that follows for a whole board, TFLOP/s."""
        return self.arch.tflops(self.matrix_flops, self.clocks)


def forward_tile(
    arch: Architecture,
    query_rows: int,
    key_rows: int,
    head_dim: int,
    value_dim: int,
    *,
    ctas: int = 1,
    emulated_fraction: float = 0.0,
    itemsize: int = 2,
) -> TileCost:
    """Cost of one key block in the forward pass.

    MMA = 2 M N (d + dv) / rate. Shared memory: S = Q K^T reads both operands, O = P V reads V alone (P lies in tensor
    memory, or in registers on sm_90), once for every `mma_rows` rows. EXP = M N / rate.

    Args:
      arch: the GPU.
      query_rows: M, per CTA.
      key_rows: N.
      head_dim: d.
      value_dim: dv.
      ctas: 2 where a pair of SMs shares each matrix instruction, so that each reads and loads half of K and V.
      emulated_fraction: share of the exponentials computed by polynomials instead.
      itemsize: bytes of an operand's element; 2 for the rates given.

    Returns:
      TileCost, per SM.

    Raises:
      ValueError: if the GPU has no pairs and ctas is 2, or ctas is neither 1 nor 2.
    """
    _check_ctas(arch, ctas)
    read_by_mma = arch.mma_rows * head_dim + key_rows * (head_dim + value_dim) / ctas
    operands = math.ceil(query_rows / arch.mma_rows) * read_by_mma
    flops = 2 * query_rows * key_rows * (head_dim + value_dim)
    return TileCost(
        arch,
        flops,
        mma=flops / arch.mma_flops,
        shared_parts={"operands": operands * itemsize / arch.shared_bytes},
        exp=query_rows * key_rows * (1 - emulated_fraction) / arch.exps,
        fill=key_rows * (head_dim + value_dim) * itemsize / ctas / arch.shared_bytes,
        mask=arch.mask_instructions[0] * _warps_per_scheduler(query_rows) * key_rows / 128,
    )


def backward_tile(
    arch: Architecture,
    query_rows: int,
    key_rows: int,
    head_dim: int,
    value_dim: int,
    *,
    ctas: int = 1,
    exchange_counted_twice: bool = False,
    itemsize: int = 2,
) -> TileCost:
    """Cost of one query block in the backward pass; each CTA owns `key_rows` keys.

    MMA = 2 M N (3 d + 2 dv) / rate. Shared memory reads: S^T = K Q^T and dP^T = V dO^T both operands; dV += P^T dO and
    dK += dS^T Q the second alone; dQ = dS K both. Then dS is written, and dQ is staged in float32 and read back by the
    reducing copy. In a pair each SM reads half of every second operand, stages half of dQ, and trades half of dS with
    its peer.

    Args:
      arch: the GPU.
      query_rows: M.
      key_rows: N, per CTA.
      head_dim: d.
      value_dim: dv.
      ctas: 2 where a pair of SMs shares each matrix instruction.
      exchange_counted_twice: count the half of dS that goes to the peer as written twice, as the published 2688
        clocks do.
      itemsize: bytes of an operand's element; 2 for the rates given.

    Returns:
      TileCost, per SM.

    Raises:
      ValueError: if the GPU has no pairs and ctas is 2, or ctas is neither 1 nor 2.
    """
    _check_ctas(arch, ctas)
    both = head_dim + value_dim
    key_mmas = math.ceil(key_rows / arch.mma_rows)
    scores = key_rows * both + key_mmas * query_rows * both / ctas
    gradients = key_mmas * query_rows * both / ctas
    # A pair splits the rows of dQ and contracts over both SMs' keys: half of A's rows, twice its columns, half of B.
    query_gradient = query_rows * key_rows + math.ceil(query_rows / arch.mma_rows) * key_rows * head_dim
    flops = 2 * query_rows * key_rows * (3 * head_dim + 2 * value_dim)
    shared_bytes = {
        "operands": (scores + gradients + query_gradient) * itemsize,
        "dS": query_rows * key_rows * itemsize,
        "dQ": 2 * query_rows * head_dim * DQ_BYTES / ctas,
    }
    if ctas == 2:  # half of dS is read here to be sent, and as much is received
        shared_bytes["exchange"] = query_rows * key_rows / 2 * itemsize * (3 if exchange_counted_twice else 2)
    return TileCost(
        arch,
        flops,
        mma=flops / arch.mma_flops,
        shared_parts={part: count / arch.shared_bytes for part, count in shared_bytes.items()},
        exp=query_rows * key_rows / arch.exps,
        fill=query_rows * both * itemsize / arch.shared_bytes,
        mask=arch.mask_instructions[1] * _warps_per_scheduler(key_rows) * query_rows / 128,
    )


def _check_ctas(arch: Architecture, ctas: int) -> None:
    if ctas not in (1, 2) or (ctas == 2 and not arch.has_pairs):
        raise ValueError(f"ctas {ctas} is not possible on {arch.name}: 1 is, and 2 on GPUs whose SMs pair.")


def _warps_per_scheduler(rows: int) -> float:
    """Warps that each scheduler runs when a thread owns a row."""
    return rows / LANES_PER_WARP / SCHEDULERS_PER_SM


@dataclasses.dataclass(frozen=True)
class SoftmaxLoop:
    """The softmax side of a forward tile of 256 rows by 128 keys, from instruction counts of upstream's machine code.

    Attributes:
      label: which kernel.
      arch: the GPU.
      exps: exponentials that a thread issues to the unit for its row of 128, the rescale factor among them.
      instructions: of a softmax thread's loop, one row of 128.
      correction: of the correction thread's loop.
      mma: clocks of the matrix unit for the same tile.
      best_tflops: the best published speed of this kernel; None where there is none.
    """

    label: str
    arch: Architecture
    exps: int
    instructions: int
    correction: int
    mma: int
    best_tflops: float | None = None

    @property
    def exp_clocks(self) -> float:
        """Clocks of the exponential unit."""
        return _warps_per_scheduler(256) * self.exps * LANES_PER_WARP * SCHEDULERS_PER_SM / self.arch.exps

    @property
    def issue_clocks(self) -> float:
        """Issue slots of one scheduler: two softmax warps and one correction warp."""
        return _warps_per_scheduler(256) * self.instructions + self.correction

    @property
    def measured_clocks(self) -> float | None:
        """Clocks between two tiles that the published speed implies."""
        return None if self.best_tflops is None else self.mma * self.arch.peak_tflops / self.best_tflops


# Counts: flash-attn-4 4.0.0b36, CUDA 13 disassembly. Speeds: arXiv 2603.05451 (1613), Dao-AILab/flash-attention
# pull request 2605 (879).
SOFTMAX_LOOPS = (
    SoftmaxLoop("d=128 causal, 16 of 128 emulated", ARCHITECTURES["sm_100"], 113, 515, 186, 2048),
    SoftmaxLoop("d=128 dense 2-CTA, 24 emulated", ARCHITECTURES["sm_100"], 105, 543, 185, 2048, 1613),
    SoftmaxLoop("d=128, none emulated", ARCHITECTURES["sm_100"], 129, 459, 186, 2048),
    SoftmaxLoop("d=128, none emulated", ARCHITECTURES["sm_103"], 129, 385, 185, 2048),
    SoftmaxLoop("d=64, 16 emulated", ARCHITECTURES["sm_100"], 113, 514, 107, 1024, 879),
)


# What an item of work costs besides its tiles: its first loads, one pass down the exposed chain from scores to
# probabilities (1840 clocks in the fastest published forward, d=128) and its last stores. An estimate, not a
# measurement.
ITEM_CLOCKS = 3000
# Of these, what remains where a thread block goes on to its next item: the exposed chain (1840) and one trip to memory
# for the queries, whose place is free when the outputs before them are copied. Keys and values are loaded before, and
# nothing is launched, allotted and set up anew. An estimate too.
RESUMED_ITEM_CLOCKS = 2400


@dataclasses.dataclass(frozen=True)
class ItemCost:
    """Clocks of an item of work: `overhead`, and so much for each tile of either class. Per query head of an item."""

    full: int
    partial: int
    overhead: int = ITEM_CLOCKS

    @classmethod
    def of(cls, tile: TileCost) -> "ItemCost":
        """The cost of items whose tiles cost `tile`."""
        return cls(round(tile.clocks), round(tile.masked_clocks))

    def gain_of_persistence(self, tiles: int, items: int, slots: int) -> float:
        """Share of the time that blocks which go on from item to item save, where all items are equally long.

        Args:
          tiles: tiles of an item, none masked.
          items: items in all.
          slots: how many run at a time.
        """
        waves, alone = -(-items // slots), self.overhead + tiles * self.full
        return (waves - 1) * (self.overhead - RESUMED_ITEM_CLOCKS) / (waves * alone)


def _head_dims(text: str) -> tuple[int, int]:
    head_dim, _, value_dim = text.partition("/")
    try:
        return int(head_dim), int(value_dim or head_dim)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a head dimension; 128 is, and 192/128 where values differ"
        ) from None


def tile_rows(arch: Architecture, head_dims: Sequence[tuple[int, int]]) -> list[list[str]]:
    """The table of tiles that the command line prints: one row for each pass, pairing and head dimensions."""
    rows = []
    for head_dim, value_dim in head_dims:
        for ctas in (1, 2) if arch.has_pairs else (1,):
            for label, formula, query_rows in (
                ("fwd", forward_tile, 2 * 128 if arch.has_pairs else 128),
                ("bwd", backward_tile, 128),
            ):
                tile = formula(arch, query_rows, 128, head_dim, value_dim, ctas=ctas)
                rows.append(
                    [
                        f"{head_dim}" if head_dim == value_dim else f"{head_dim}/{value_dim}",
                        label,
                        f"{query_rows}x128",
                        f"{ctas}",
                        *(f"{clocks:.0f}" for clocks in tile.units.values()),
                        f"{tile.fill:.0f}",
                        "=".join(tile.binding),
                        f"{tile.tflops:.0f}",
                        f"{tile.tflops / arch.peak_tflops:.0%}",
                    ]
                )
    return rows


def softmax_rows(arch: Architecture) -> list[list[str]]:
    """The table of softmax loops that the command line prints."""
    return [
        [
            loop.label,
            f"{loop.exp_clocks:.0f}",
            f"{loop.issue_clocks:.0f}",
            f"{loop.mma}",
            "-" if loop.measured_clocks is None else f"{loop.measured_clocks:.0f}",
        ]
        for loop in SOFTMAX_LOOPS
        if loop.arch is arch
    ]


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be, the first to the left and numbers to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    is_text = [not any(row[column][:1].isdigit() for row in rows) for column in range(len(header))]
    is_text[0] = True
    texts = [
        "  ".join(
            f"{cell:<{width}}" if text else f"{cell:>{width}}"
            for cell, width, text in zip(line, widths, is_text, strict=True)
        )
        for line in lines
    ]
    return "\n".join([texts[0].rstrip(), "-" * len(texts[0]), *(text.rstrip() for text in texts[1:])])


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables for the GPUs and head dimensions asked for."""
    parser = argparse.ArgumentParser(prog="python -m jax_fa4.cost", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--arch", nargs="+", choices=[*ARCHITECTURES], default=[*ARCHITECTURES], help="GPUs to tabulate"
    )
    parser.add_argument(
        "--head-dims", nargs="+", type=_head_dims, default=[(64, 64), (128, 128), (192, 128)], metavar="D[/DV]"
    )
    options = parser.parse_args(arguments)
    for name in options.arch:
        arch = ARCHITECTURES[name]
        print(
            f"{arch.name} ({arch.board}): {arch.sms} SMs, {arch.clock_ghz:.2f} GHz, {arch.peak_tflops:g} TFLOP/s;",
            end=" ",
        )
        print("clocks on one SM")
        header = (
            "dims",
            "pass",
            "tile",
            "CTAs",
            *forward_tile(arch, 128, 128, 64, 64).units,
            "fill",
            "binds",
            "TFLOP/s",
            "peak",
        )
        print(format_table(header, tile_rows(arch, options.head_dims)), end="\n\n")
        if softmax := softmax_rows(arch):
            print(format_table(("forward softmax, 256x128", "EXP", "issue", "MMA", "measured"), softmax), end="\n\n")


if __name__ == "__main__":
    main()
