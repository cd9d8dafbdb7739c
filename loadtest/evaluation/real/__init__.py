"""The paper's experiments on a real engine and its device: `python -m quire.loadtest.evaluation.real`."""
