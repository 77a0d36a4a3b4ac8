"""How the joint graph is split into a forward and a backward."""
