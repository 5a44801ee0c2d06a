"""What users talk to: scheduling, step orchestration, REST and gRPC."""
