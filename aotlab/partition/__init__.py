"""Stage 5: split the joint graph into a forward and a backward."""
