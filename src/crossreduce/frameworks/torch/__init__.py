"""What the library needs of PyTorch: operations on its arrays, and their memory."""
