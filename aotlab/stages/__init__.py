"""The stages, in order: capture, dedupe, synthetic_bases, trace, partition, compile, runtime.

Each file is a page: the problem with a small example, its frozen record, and ``run``. Trace and runtime take several:
their first page is the package.
"""
