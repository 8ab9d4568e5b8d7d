"""Records of what groups do, and their readers."""
