"""What the library needs of JAX: operations on its arrays, and their memory."""
