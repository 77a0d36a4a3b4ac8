"""From a call to its flat tensors: flatten, lift, deduplicate, and find inputs that share memory."""
