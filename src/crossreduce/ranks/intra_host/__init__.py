"""What the ranks of one host share: memory, registers, and the programs that they run on it."""
