"""Exporters: a program or plan in the file formats of other tools."""
