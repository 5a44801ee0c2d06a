"""Tensors in, tensors out: the arithmetic of a step, with no request, config or protobuf in sight."""
