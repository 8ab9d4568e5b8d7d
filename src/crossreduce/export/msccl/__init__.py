"""MSCCL XML: the format, its writer, and the verifier, which accepts the files of any tool."""
