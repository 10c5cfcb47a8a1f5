"""Plans of passes: which rows see each other."""

from __future__ import annotations

from sakiyomi.kernels.batch import BatchPlan, SequenceRows


def test_rows_of_a_block_see_each_other() -> None:
    plan = BatchPlan([SequenceRows(1, 3, [7, 8]), SequenceRows(0, 2, [5, 6, 6], block=True)])
    assert plan.positions == [3, 4, 2, 3, 4]
    assert plan.visible(1).all()
    assert plan.visible(1).shape == (3, 5)
    assert [plan.path(1, row).tolist() for row in range(3)] == [[2, 3, 4]] * 3
    assert memoryview(plan.packed).cast("i").tolist()[-5:] == [-1, 0, -2, -2, -2]
