"""Trace the user's function once on fake tensors, and record its ops, its writes, its aliases and the joint graph."""
