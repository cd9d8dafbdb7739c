"""A real Ray is too large for every run. `make ray-test` installs it, and sets QUIRE_RAY."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("QUIRE_RAY") else ["test_ray_serve.py"]
