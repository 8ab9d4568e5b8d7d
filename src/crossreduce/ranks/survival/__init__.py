"""Groups that go on without lost ranks, or with new ones."""
