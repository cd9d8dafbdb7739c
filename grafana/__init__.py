"""The operator's view: a Grafana dashboard as code, and a picture of it."""
