"""What the library needs of CuPy: operations on its arrays, and their memory."""
