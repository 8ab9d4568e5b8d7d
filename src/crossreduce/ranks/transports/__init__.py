"""Transports carry bytes between hosts. One file per transport; ``base`` defines the protocols."""
