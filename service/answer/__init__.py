"""From a request that is admitted to the bytes of its answer."""
