"""The metrics, as plain numbers and in Prometheus' text format."""
