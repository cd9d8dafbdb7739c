"""Requests as OpenTelemetry traces."""
