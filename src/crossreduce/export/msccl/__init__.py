"""MSCCL XML: the format, its writer, and the verifier of anyone's files."""
