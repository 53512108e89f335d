"""Plots, checked by reading back matplotlib's artists."""

import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from nnxmoe import plot
from nnxmoe.moe.balance import utilization
from nnxmoe.moe.selection import Routing, SoftmaxTopK
from nnxmoe.runtime.extras import install_command

pytestmark = pytest.mark.notebooks

EXPERTS = np.array([[[0, 1], [0, 2], [3, 0]], [[2, 0], [1, 3], [1, 0]]])  # [B=2, T=3, X=2] of 4 experts
COUNTS = [5, 3, 2, 2]
UNPADDED = [3, 2, 2, 1]  # without the last token of either row


@pytest.fixture(autouse=True)
def no_window() -> Any:
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    yield
    plt.close("all")


def routing(valid: Any = None) -> Routing:
    scores = jnp.zeros((2, 3, 4))
    return Routing(jnp.asarray(EXPERTS), jnp.full((2, 3, 2), 0.5), scores, scores, valid)


def texts(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.texts]


def ticks(ax: Any) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


def test_shares_exclude_padding() -> None:
    np.testing.assert_allclose(plot.shares({0: routing()}), [np.array(COUNTS) / 12])
    padded = routing(jnp.array([[True, True, False], [True, True, False]]))
    np.testing.assert_allclose(plot.shares({3: padded, 1: routing()}), [np.array(COUNTS) / 12, np.array(UNPADDED) / 8])
    np.testing.assert_allclose(plot.shares([[1, 3], [0, 0]]), [[0.25, 0.75], [0, 0]])


@pytest.mark.parametrize("bad", [[1, 2], [[1, -1]], [[np.nan, 1]], [], {}])
def test_malformed_loads(bad: Any) -> None:
    with pytest.raises(ValueError, match="layers, experts"):
        plot.shares(bad)


def test_load_heatmap() -> None:
    """A cell is the load divided by the mean, which is 3 for 12 assignments to 4 experts."""
    ax = plot.load({2: routing(), 7: routing(jnp.zeros((2, 3), bool))})
    np.testing.assert_allclose(ax.images[0].get_array(), [[5 / 3, 1, 2 / 3, 2 / 3], [0, 0, 0, 0]])
    assert texts(ax) == ["1.7", "1.0", "0.7", "0.7", *["0.0"] * 4]
    assert ticks(ax) == ["layer 2", "layer 7"] and ax.images[0].get_clim() == (0, 2)
    assert ticks(plot.load([[1, 1]], names=["sums"])) == ["sums"]
    assert plot.load([[4, 0, 0]]).images[0].get_clim() == (0, 3)
    with pytest.raises(ValueError, match=r"1 names, .* 2 rows"):
        plot.load([[1, 1], [1, 1]], names=["a"])


def test_large_heatmaps_have_no_numbers() -> None:
    assert not texts(plot.load(np.ones((10, 64))))


def test_entropy_equals_utilisation() -> None:
    loads = np.array([[5, 3, 2, 2], [12, 0, 0, 0], [3, 3, 3, 3]])
    ax = plot.entropy(loads)
    widths = [bar.get_width() for bar in ax.patches]
    np.testing.assert_allclose(widths, utilization(jnp.asarray(loads), jnp.zeros(3, jnp.int32)).entropy, atol=1e-6)
    assert widths[1:] == [0, 1] and ticks(ax) == ["layer 0", "layer 1", "layer 2"]


def test_load_over_steps() -> None:
    """Experts are rows, steps are columns centred on their step number."""
    ax = plot.over_steps([[1, 1], [2, 0], [0, 4]], steps=[10, 20, 30])
    np.testing.assert_allclose(ax.images[0].get_array(), [[1, 2, 0], [1, 0, 2]])
    assert ax.images[0].get_extent() == [5, 35, 1.5, -0.5]
    assert plot.over_steps([[1, 1]]).images[0].get_extent()[:2] == [0.5, 1.5]


def test_strip_of_layers() -> None:
    """Shows the first choice for the second row, whose last token is padding in layer 5."""
    valid = jnp.array([[True, True, True], [True, True, False]])
    ax = plot.strip(["a b", "\n", "$"], {5: routing(valid), 4: routing()}, row=1)
    cells = {(text.get_position()): text.get_text() for text in ax.texts}
    assert cells == {(0, 0): "2", (1, 0): "1", (2, 0): "1", (0, 1): "2", (1, 1): "1"}
    assert ticks(ax) == ["layer 4", "layer 5"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a·b", "↵", r"\$"]
    from matplotlib.colors import to_hex

    colors = [to_hex(patch.get_facecolor()).upper() for patch in ax.patches]
    assert colors == [plot.PALETTE[int(text)].upper() for text in texts(ax)]
    ax.figure.canvas.draw()  # raises if a lone dollar sign is not escaped


def test_strip_of_choices() -> None:
    ax = plot.strip(["a", "b"], routing())
    assert texts(ax) == ["0", "0", "1", "2"] and ticks(ax) == ["choice 1", "choice 2"]
    with pytest.raises(ValueError, match=r"4 pieces, .* 3 tokens"):
        plot.strip(list("abcd"), routing())


def test_strip_of_more_experts_than_colours() -> None:
    chosen = SoftmaxTopK(1)(jnp.eye(20)[None], None)
    assert texts(plot.strip(["x"] * 20, {0: chosen})) == [str(i) for i in range(20)]


def test_metric_history() -> None:
    steps = [{"step": i, "loss": 1 / i} | ({"eval_loss": 2 / i} if i % 2 == 0 else {}) for i in (1, 2, 3, 4)]
    ax = plot.history(steps, ["loss", "eval_loss"])
    curves = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines}
    assert curves == {"loss": ([1, 2, 3, 4], [1, 1 / 2, 1 / 3, 1 / 4]), "eval loss": ([2, 4], [1, 1 / 2])}
    two = plot.history({"a": steps, "b": steps[:2]}, "loss")
    assert [line.get_label() for line in two.lines] == ["a", "b"] and two.get_ylabel() == "loss"
    assert len({(line.get_color(), line.get_linestyle(), line.get_linewidth()) for line in two.lines}) == 2
    assert plot.history([{"step": 1, "busiest_expert": 2.0}], "busiest_expert").get_ylabel() == "busiest expert"
    with pytest.raises(ValueError, match=r"no step has the metric 'mfu'.* eval_loss, loss"):
        plot.history(steps, "mfu")


def test_bars() -> None:
    ax = plot.bars({"a": 3, "b": -1.5}, "kB")
    assert [bar.get_width() for bar in ax.patches] == [3, -1.5] and texts(ax) == ["3", "-1.5"]
    assert ticks(ax) == ["a", "b"] and ax.get_xlabel() == "kB" and ax.yaxis_inverted()
    assert ax.xaxis.get_major_formatter()(50000.0, 0) == "50,000" and ax.xaxis.get_major_formatter()(0.25, 0) == "0.25"


def test_stacked_bars() -> None:
    """Segments are stacked; a segment missing from a bar has width 0."""
    ax = plot.bars({"a": {"gather": 1, "reduce": 2}, "b": {"reduce": 4}})
    assert [(bar.get_x(), bar.get_width()) for bar in ax.patches] == [(0, 1), (0, 0), (1, 2), (0, 4)]
    assert texts(ax) == ["3", "4"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["gather", "reduce"]


def test_error_dots() -> None:
    """Zeros are hollow, errors beyond the tolerance are red, and NaN is red at the right edge."""
    ax = plot.errors({"a": 0, "b": 1e-6, "c": -1e-2, "d": float("nan")}, 1e-5)
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    x = [float(dot.get_xdata()[0]) for dot in dots]
    assert x[1:3] == [1e-6, 1e-2] and x[0] < 1e-6 and x[3] > 1e-2
    assert [dot.get_markerfacecolor() == "none" for dot in dots] == [True, False, False, False]
    assert [dot.get_color() == "#D55E00" for dot in dots] == [False, False, True, True]
    assert ax.get_xscale() == "log" and "1e-05" in ax.get_xlabel()
    assert all(ax.get_xlim()[0] < value < ax.get_xlim()[1] for value in x)


DRAWN: dict[str, tuple[Any, ...]] = {
    "load": ([[1, 2]],),
    "entropy": ([[1, 2]],),
    "over_steps": ([[1, 2]],),
    "strip": (["a"], {0: SoftmaxTopK(1)(jnp.zeros((1, 1, 2)), None)}),
    "history": ([{"step": 1, "loss": 2.0}],),
    "bars": ({"a": 1},),
    "errors": ({"a": 1},),
}


@pytest.mark.parametrize("name", DRAWN)
def test_plots_draw_into_the_given_axes(name: str) -> None:
    import matplotlib.pyplot as plt

    _, ax = plt.subplots()
    before = plt.get_fignums()
    assert getattr(plot, name)(*DRAWN[name], ax=ax) is ax and ax.has_data()
    assert plt.get_fignums() == before
    assert getattr(plot, name)(*DRAWN[name]).figure is not ax.figure


@pytest.mark.commands
def test_without_matplotlib() -> None:
    """The module imports; plotting raises an ImportError that names the extra to install."""
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from nnxmoe import plot\n"
        "assert plot.shares([[1, 3]]).tolist() == [[0.25, 0.75]]\n"
        "plot.bars({'a': 1})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == f"ImportError: nnxmoe.plot needs matplotlib: {install_command('notebooks')}"
