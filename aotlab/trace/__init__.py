"""One run of the function on fake tensors: what it computes, writes and aliases; the joint graph."""
