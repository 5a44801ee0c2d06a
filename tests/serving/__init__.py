"""Tests of what the two services share as gRPC servers."""
