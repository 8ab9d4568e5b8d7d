"""Groups that continue without lost ranks, or with new ones."""
