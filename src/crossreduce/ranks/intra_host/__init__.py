"""The memory and registers that the ranks of one host share, and the programs that they run on them."""
