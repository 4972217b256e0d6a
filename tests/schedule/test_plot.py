"""Pictures: they are drawn, show what they should, stay small, and say what they need."""

import subprocess
import sys

import numpy as np
import pytest

from jax_fa4.cost import ARCHITECTURES
from jax_fa4.problem import AttentionOperands
from jax_fa4.schedule import plot
from jax_fa4.schedule.order import forward_table
from jax_fa4.schedule.simulate import simulate
from jax_fa4.schedule.tiles import TileClass

B200 = ARCHITECTURES["sm_100"]


def texts(figure):
    found = [axes.get_title(loc="left") for axes in figure.axes]
    for axes in figure.axes:
        if axes.get_legend() is not None:
            found += [text.get_text() for text in axes.get_legend().get_texts()]
    return found


def test_documentation_pictures(tmp_path, capsys):
    plot.main(["--out", str(tmp_path / "pictures")])
    written = sorted((tmp_path / "pictures").iterdir())
    assert [file.name for file in written] == ["orders.png", "schedule.png"]
    for file in written:
        assert file.read_bytes().startswith(b"\x89PNG")
        assert 10_000 < file.stat().st_size < 100_000
    assert sorted(capsys.readouterr().out.split()) == [str(file) for file in written]


def test_schedule_figure_tells_its_figures():
    figure = plot.schedule_figure(plot.packed_problem([300, 212], heads=2), B200, query_tile=128)
    # Of 16 tiles one is full; partial are 1 + 1 + 3 + 2, as the border at 300 cuts the third row of tiles.
    assert "full (no mask), 6%" in texts(figure)
    assert "partial (element mask), 44%" in texts(figure)
    assert "skipped, 50%" in texts(figure)
    assert any(text.startswith("B200: 0.0% over the lower bound, ") for text in texts(figure))


def test_orders_figure_compares_all_orders():
    figure = plot.orders_figure(plot.packed_problem([4096]), B200)
    titles = [text.split(":")[0] for text in texts(figure) if text]
    assert titles == ["plain", "reversed", "longest first"]
    ends = {axes.get_xlim() for axes in figure.axes[:3]}
    assert len(ends) == 1


def test_tile_map_colours_each_class():
    figure = plot.new_figure(3, 3)
    axes = figure.add_axes((0, 0, 1, 1))
    classes = np.array([[TileClass.PARTIAL, TileClass.SKIP], [TileClass.FULL, TileClass.PARTIAL]])
    plot.draw_tile_map(axes, classes, 128, 64, ranks=np.array([1, 0]))
    (image,) = axes.images
    assert image.get_array().shape == (2, 2, 3)
    assert len(np.unique(image.get_array().reshape(4, 3), axis=0)) == 3
    assert image.get_extent() == [0, 128, 256, 0]
    (strip,) = axes.child_axes
    assert [text.get_text() for text in strip.texts] == ["2", "1"]


@pytest.mark.parametrize("lengths", [[60000, 5536], [1]], ids=["many tiles", "one tile"])
def test_any_number_of_tiles(lengths, tmp_path):
    plot.schedule_figure(plot.packed_problem(lengths, heads=1), B200).savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000


def test_ranks_follow_the_table():
    problem = plot.packed_problem([1024], heads=2)
    table = forward_table(problem, AttentionOperands(), 256, 128, B200)
    assert plot.tile_ranks(table, head=1).tolist() == [3, 2, 1, 0]
    assert plot.item_lengths(table).tolist() == [8, 8, 6, 6, 4, 4, 2, 2]


def test_nothing_to_draw():
    axes = plot.new_figure(3, 3).add_axes((0, 0, 1, 1))
    plot.draw_gantt(axes, simulate(np.zeros(0, np.int32), 4), np.zeros(0, np.int32))
    assert axes.get_title(loc="left") == "0.0% over the lower bound, 0.0% idle"


def test_missing_matplotlib_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'jax_fa4\[plot\]'"):
        plot.new_figure(1, 1)


def test_matplotlib_is_imported_only_to_draw():
    code = "import sys, jax_fa4.schedule.plot; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
