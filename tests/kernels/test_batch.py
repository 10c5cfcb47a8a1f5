"""Plans of passes: which tokens lie on the way to a row."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.kernels.batch import BatchPlan, SequenceRows


@st.composite
def trees(draw: st.DrawFn) -> SequenceRows:
    """A chain, or a tree of which some rows came in passes before."""
    count, length = draw(st.integers(1, 9)), draw(st.integers(0, 6))
    if draw(st.booleans()):
        return SequenceRows(0, length, [0] * count)
    parents = (-1, *(draw(st.integers(-1, i - 1)) for i in range(1, count)))
    done = draw(st.integers(0, count - 1))
    return SequenceRows(0, length + done, [0] * (count - done), parents, done=done)


@given(rows=trees(), count=st.integers(1, 5))
def test_lineage_is_the_end_of_the_path(rows: SequenceRows, count: int) -> None:
    """Columns of the committed text, then of the tree's nodes down to the row itself; negative ones before the text."""
    plan = BatchPlan([SequenceRows(1, 3, [7]), rows])
    found = plan.lineage(1, count)
    for row in range(len(rows.tokens)):
        way = [*range(-count, rows.length - rows.done), *plan.path(1, row).tolist()]
        if rows.parents is None:  # the path of a chain's row begins behind the text
            way = [*range(-count, rows.length + row + 1)]
        assert found[row].tolist() == way[-count:]


def test_rows_of_a_block_see_each_other() -> None:
    plan = BatchPlan([SequenceRows(1, 3, [7, 8]), SequenceRows(0, 2, [5, 6, 6], block=True)])
    assert plan.positions == [3, 4, 2, 3, 4]
    assert plan.visible(1).all()
    assert plan.visible(1).shape == (3, 5)
    assert [plan.path(1, row).tolist() for row in range(3)] == [[2, 3, 4]] * 3
    assert memoryview(plan.packed).cast("i").tolist()[-5:] == [-1, 0, -2, -2, -2]
