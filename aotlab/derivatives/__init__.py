"""Backward graphs, and the graphs that differentiate a backward again (higher-order derivatives)."""
