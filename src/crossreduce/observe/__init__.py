"""Records of what groups do, and what reads them."""
