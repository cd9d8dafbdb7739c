"""Tests of models read many folders of the same configurations."""

from tests.models.dry_runs import shared_dry_runs

__all__ = ["shared_dry_runs"]
