"""Sizes that vary from call to call."""
