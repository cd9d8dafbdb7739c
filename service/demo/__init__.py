"""The demo model: a tiny chat model, and the scripts that make it."""

from pathlib import Path

MODEL_FOLDER = str(Path(__file__).parent / "model")
MODEL_NAME = "quire-demo"
