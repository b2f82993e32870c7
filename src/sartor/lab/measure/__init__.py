"""Measuring: providers, the timer, errors, memory, records."""
