"""What do users talk to? Scheduling, step orchestration, OpenAI REST, public gRPC, metrics; never the model itself."""
