"""Serve as the API process does, without a model behind it.

`python -m quire.loadtest.servers.modelless --port N`

Its engine process is a `quire.loadtest.servers.token_source`.
"""

from __future__ import annotations

import sys

from quire.engine.client import AsyncEngine
from quire.engine.config import EngineConfig
from quire.loadtest.command import command_parser
from quire.service.config import ServiceConfig
from quire.service.demo import MODEL_FOLDER
from quire.service.server import serve
from quire.service.text.tokenizer import Tokenizer


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=0.0, help="time of a step; 0: as fast as it can")
    parser.add_argument("--sequences", type=int, default=256, help="that run at once")
    parser.add_argument("--max-num-queued-reqs", type=int, default=1000)
    parser.add_argument("--stall-timeout", type=float, default=10.0)
    arguments = parser.parse_args()
    program = ("quire.loadtest.servers.token_source", str(arguments.step_ms), str(arguments.sequences))

    async def start_engine() -> AsyncEngine:
        engine = AsyncEngine(EngineConfig(model=MODEL_FOLDER), program=program)
        await engine.start()
        return engine

    service = ServiceConfig(
        served_model_names=("none",),
        port=arguments.port,
        max_num_queued_reqs=arguments.max_num_queued_reqs,
        stall_timeout=arguments.stall_timeout,
    )
    sys.exit(serve(service, start_engine, lambda: Tokenizer.from_folder(MODEL_FOLDER)))


if __name__ == "__main__":
    main()
