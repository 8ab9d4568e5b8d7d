"""How ranks agree on who of them is left."""
