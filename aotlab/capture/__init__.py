"""The stages before the trace: flatten a call, lift tensors, deduplicate them, and group those that share memory."""
