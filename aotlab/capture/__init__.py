"""From a call to its flat tensors: flatten, lift, dedupe, find inputs that share memory."""
