"""The comparison of two trees reads what scheduler_cost prints; how much anything costs, no test says."""

from __future__ import annotations

from quire.loadtest.why_cost import output_cost, read_columns, record_cost, request_cost

PRINTED = """\
256 sequences decode; µs, medians but for the last two columns
 context  schedule    commit    both    step   ratio   least     p99
     256        70        28      98     142    0.75      90     160
   churn       120        90     210     260    1.62     180     400
"""


def test_columns_are_read() -> None:
    columns = read_columns(PRINTED)
    assert list(columns) == ["256", "churn"]
    assert (columns["256"]["ratio"], columns["churn"]["step"]) == (0.75, 260)


def test_what_is_timed_runs() -> None:
    assert all(isinstance(cost(), float) for cost in (output_cost, request_cost, record_cost))
