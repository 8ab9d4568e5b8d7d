"""What the library needs of NumPy: operations on its arrays, and their memory."""
