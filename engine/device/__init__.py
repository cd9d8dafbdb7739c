"""The device's side of a step: inputs, graphs, streams and the KV cache's tensor."""
