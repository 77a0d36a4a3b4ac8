"""The stages, in order: capture, dedupe, synthetic_bases, trace, partition, compile, runtime.

Each file is a page: the problem with a small example, its frozen record, and ``run``.
"""
