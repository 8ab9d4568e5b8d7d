"""MSCCL XML: the format, its writer, and the verifier, which reads the files of any tool."""
