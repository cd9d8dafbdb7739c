"""What other replicas and routers learn of this engine's blocks, through Redis."""
