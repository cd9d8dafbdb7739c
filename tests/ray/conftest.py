"""A real Ray is too large for every run. `make ray-test` installs it, and sets QUIRE_RAY."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("QUIRE_RAY") else ["test_ray_serve.py", "test_routing.py"]
os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"  # where other tests run on the same cores
