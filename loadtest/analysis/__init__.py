"""Make figures of the records of a run: summaries, comparisons, knees, reports."""
