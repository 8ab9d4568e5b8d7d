"""Plans of several groups on shared links."""
