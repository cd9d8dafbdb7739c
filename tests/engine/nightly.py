"""The length of random tests: HYPOTHESIS_PROFILE=nightly makes it more than ten times as long."""

from __future__ import annotations

import os

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
