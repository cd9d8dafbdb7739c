"""From the records of a run to its figures: summaries, comparisons, knees, reports."""
