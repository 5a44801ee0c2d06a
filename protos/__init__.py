"""outrider.v1: the messages and services, and the stubs generated from them."""
