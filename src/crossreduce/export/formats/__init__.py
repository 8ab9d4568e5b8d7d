"""Exporters, which write schedules as files of other programs, and verifiers, which prove such files."""
