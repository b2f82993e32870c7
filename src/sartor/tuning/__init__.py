"""Tuning: which tile, as data with provenance."""
