"""Sampling of completions: one interface with several backends."""
