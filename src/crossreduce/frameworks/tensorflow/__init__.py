"""What the library needs of TensorFlow: operations on its arrays, and their memory."""
