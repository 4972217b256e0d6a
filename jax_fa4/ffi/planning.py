"""What a mask of traced ids and lengths comes to, by two small kernels: intervals of both sides, order of both passes.

The results are those of `jax_fa4.schedule`, which XLA would need dozens of kernels and three sorts for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from jax_fa4.ffi.forward_call import UNBOUNDED, band_edges
from jax_fa4.ffi.launch import CUDA_DRIVER, launch
from jax_fa4.kernels import bundle
from jax_fa4.kernels.planning_plans import (
    MOST_BATCH,
    MOST_COLUMNS,
    MOST_SECTIONS,
    SIDES,
    order_plan,
    rows_plan,
)
from jax_fa4.problem import PlannedGrids
from jax_fa4.schedule.order import Column, WorkGrid, item_tables
from jax_fa4.schedule.tiles import Intervals, MaskOperands, MaskRule, key_intervals, query_intervals

SHARE_ROWS = 2048  # rows of a block where ids ascend: two for each thread
TILE = 128  # where no table is wanted
ORDER_BLOCKS = 264  # two for each multiprocessor of the largest GPU here; blocks walk what there is


class Planned(NamedTuple):
    """Intervals of queries and of keys, and the items of the forward and backward pass; None where none is wanted."""

    queries: Intervals
    keys: Intervals
    forward_items: jax.Array | None
    backward_items: jax.Array | None


def why_not(rule: MaskRule, batch: int, masks: MaskOperands, grids: PlannedGrids, architecture: str) -> str | None:
    """None where the kernels plan such a mask; else why not."""
    most = max(rule.query_length, rule.key_length)
    if min(rule.query_length, rule.key_length, batch) == 0:
        return "there is nothing to plan"
    if most > MOST_COLUMNS:
        return f"{most} tokens are more than {MOST_COLUMNS}"
    if batch > MOST_BATCH or any(grid is not None and batch * grid.sections > MOST_SECTIONS for grid in grids):
        return f"more than {MOST_BATCH} batch rows, or {MOST_SECTIONS} sections"
    if not (_has_ids(masks) or _has_lengths(masks)):
        return "the mask has neither ids nor lengths"
    rows = zip(grids, (rule.query_length, rule.key_length), strict=True)
    if any(grid is not None and _items(grid, length) * len(Column) >= 1 << 31 for grid, length in rows):
        return "the tables have more than 2^31 numbers"
    plans = [rows_plan(architecture, ids=_has_ids(masks), lengths=_has_lengths(masks)), order_plan(architecture)]
    return next(filter(None, map(bundle.why_unavailable, plans)), None)


def plan(
    rule: MaskRule,
    batch: int,
    masks: MaskOperands,
    grids: PlannedGrids,
    *,
    architecture: str,
    driver: str = CUDA_DRIVER,
) -> Planned:
    """Runs the kernels; mapped by `jax.vmap`, where each mask has tables of its own, leaves planning to XLA.

    Args:
      rule: the mask's static part.
      batch: batch rows.
      masks: ids (batch or 1, T) and (batch or 1, S), lengths (batch or 1,), int32, or None.
      grids: what the tables are for.
      architecture: one of `jax_fa4.kernels.plan.ARCHITECTURES`.
      driver: the driver library that launches the kernels.

    Returns:
      What was planned, for every batch row.

    Raises:
      KernelUnavailableError: no binary is at hand.
    """
    call = custom_vmap(lambda masks: _launch(rule, batch, masks, grids, architecture, driver))

    @call.def_vmap
    def by_xla(axis_size: int, in_batched: list[Any], masks: MaskOperands) -> tuple[Planned, Any]:
        """Every mask for itself."""
        axes = (MaskOperands(*(0 if is_batched else None for is_batched in in_batched[0])),)
        found = jax.vmap(lambda masks: formula(rule, batch, masks, grids), axes, axis_size=axis_size)(masks)
        return found, jax.tree.map(lambda _: True, found)

    return call(MaskOperands(*(None if one is None else jnp.asarray(one, jnp.int32) for one in masks)))


def formula(rule: MaskRule, batch: int, masks: MaskOperands, grids: PlannedGrids) -> Planned:
    """`plan` in plain JAX, for any device: what the kernels are checked against."""
    both = query_intervals(rule, masks), key_intervals(rule, masks)
    queries, keys = (
        Intervals(*(jnp.broadcast_to(one, (batch, *one.shape[1:])) for one in intervals)) for intervals in both
    )
    return Planned(queries, keys, *item_tables(grids, both))


def _launch(
    rule: MaskRule, batch: int, masks: MaskOperands, grids: PlannedGrids, architecture: str, driver: str
) -> Planned:
    entries = 1 << (2 * max(rule.query_length, rule.key_length) - 1).bit_length()
    shares = -(-max(rule.query_length, rule.key_length) // SHARE_ROWS)
    integers = {"batch": batch, "sides": 2, "shares": shares, "hash_entries": entries} | _row_integers(rule, grids)
    lengths = {"query": rule.query_length, "key": rule.key_length}
    results: dict[str, jax.ShapeDtypeStruct] = {}
    for side in SIDES:
        tiles = -(-lengths[side] // integers[f"{side}_row_tile"])
        for name, shape in (("lo", (lengths[side],)), ("hi", (lengths[side],)), ("bounds", (tiles, 4))):
            results[f"{side}_{name}"] = jax.ShapeDtypeStruct((batch, *shape), jnp.int32)
        results[f"{side}_clocks"] = jax.ShapeDtypeStruct((batch, tiles), jnp.int32)
        results[f"{side}_exact"] = jax.ShapeDtypeStruct((batch,), jnp.bool_)
    if _has_ids(masks):
        results["hash_table"] = jax.ShapeDtypeStruct((batch, 2, entries, 3), jnp.int32)
    rows = rows_plan(architecture, ids=_has_ids(masks), lengths=_has_lengths(masks))
    found = launch(rows, _operands(rule, batch, masks), results, integers, driver=driver)
    queries, keys = (Intervals(*(found[f"{side}_{name}"] for name in Intervals._fields)) for side in SIDES)
    forward, backward = _order(grids, found, architecture, driver)
    return Planned(queries, keys, forward, backward)


def _has_ids(masks: MaskOperands) -> bool:
    return masks.query_ids is not None


def _has_lengths(masks: MaskOperands) -> bool:
    return masks.query_lengths is not None or masks.key_lengths is not None


def _operands(rule: MaskRule, batch: int, masks: MaskOperands) -> dict[str, jax.Array | np.ndarray]:
    """Ids and lengths by the plan's names, one row for each batch row; a length that is not given is the whole."""
    found: dict[str, jax.Array | np.ndarray] = {}
    for side, ids, lengths, whole in (
        ("query", masks.query_ids, masks.query_lengths, rule.query_length),
        ("key", masks.key_ids, masks.key_lengths, rule.key_length),
    ):
        if _has_ids(masks):
            found[f"{side}_ids"] = jnp.broadcast_to(jnp.asarray(ids, jnp.int32), (batch, whole))
        if _has_lengths(masks):
            all_whole = np.full(batch, whole, np.int32)
            found[f"{side}_lengths"] = all_whole if lengths is None else jnp.broadcast_to(lengths, (batch,))
    return found


def _row_integers(rule: MaskRule, grids: PlannedGrids) -> dict[str, int]:
    """Bands and tiles of both directions: keys of a query, queries of a key."""
    left, right = band_edges(rule)
    right = max(right, -UNBOUNDED)
    offset = rule.diagonal_offset
    found = {"query_length": rule.query_length, "key_length": rule.key_length}
    found |= {"query_lower": offset - left, "query_upper": offset + right}
    found |= {"key_lower": -offset - right, "key_upper": -offset + left}
    for side, grid in zip(SIDES, grids, strict=True):
        found[f"{side}_row_tile"] = TILE if grid is None else grid.row_tile
        found[f"{side}_column_tile"] = TILE if grid is None else grid.column_tile
        found[f"{side}_full_clocks"] = 0 if grid is None else grid.cost.full
        found[f"{side}_partial_clocks"] = 0 if grid is None else grid.cost.partial
        found[f"{side}_overhead"] = 0 if grid is None else grid.cost.overhead
    return found


def _items(grid: WorkGrid, rows: int) -> int:
    """Items of a grid with so many rows."""
    return grid.batch * grid.heads * -(-rows // grid.row_tile)


def _order(
    grids: PlannedGrids, found: dict[str, jax.Array], architecture: str, driver: str
) -> tuple[jax.Array | None, jax.Array | None]:
    """The items of both passes by one launch."""
    if all(grid is None for grid in grids):
        return None, None
    operands: dict[str, jax.Array] = {}
    results: dict[str, jax.ShapeDtypeStruct] = {}
    integers = {"blocks": ORDER_BLOCKS, "sides": 2}
    for side, name, grid in zip(SIDES, ("forward_items", "backward_items"), grids, strict=True):
        operands |= {f"{side}_{one}": found[f"{side}_{one}"] for one in ("exact", "bounds", "clocks")}
        batch, row_tiles = found[f"{side}_clocks"].shape
        integers["batch"] = batch
        sizes = (0, 0, 1, 1, 1, 0)
        if grid is not None:
            section = grid.section_heads, grid.sections
            sizes = (row_tiles, grid.heads, *section, grid.slots, grid.clock_bits[1])
        names = ("row_tiles", "heads", "section_heads", "sections", "slots", "dropped")
        integers |= {f"{side}_{one}": size for one, size in zip(names, sizes, strict=True)}
        items = 0 if grid is None else batch * row_tiles * grid.heads
        results[name] = jax.ShapeDtypeStruct((max(items, 1), len(Column)), jnp.int32)
    tables = launch(order_plan(architecture), operands, results, integers, driver=driver)
    forward, backward = (
        None if grid is None else tables[name]
        for name, grid in zip(("forward_items", "backward_items"), grids, strict=True)
    )
    return forward, backward
